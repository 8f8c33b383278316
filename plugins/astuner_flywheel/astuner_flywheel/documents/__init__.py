"""Documents: from files on disk to text, and from text to passages that know where they are from.

`document` says which files are meant and cuts texts into passages, `reading` reads each file in a confined process of
its own, and `inside` is what runs there and knows the formats.
"""
