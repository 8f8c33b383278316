"""Documents: from files on disk to text, and from text to passages that know where they are from.

`find` says which files are meant, `reading` reads each in a confined process of its own (`inside` is what runs there,
`pdf`, `docx`, `html` and `plain` know the formats), and `chunks` cuts the text into passages.
"""
