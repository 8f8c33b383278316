"""Documents: read files as text, and split text into passages with known positions.

`document` selects files and splits texts into passages, `reading` reads each file in a separate confined process, and
`inside` runs in that process and implements the formats.
"""
