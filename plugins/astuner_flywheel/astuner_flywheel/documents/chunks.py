"""Passages of a document: as long as fits, cut at headings, paragraphs or sentences, each with its exact place.

The cutting is semantic-text-splitter's.  Invariant: passages come in the order of the text, and each is the text
between its two positions, letter by letter.
"""

from __future__ import annotations

from astuner_flywheel.documents.document import Chunk, Document


def chunk(document: Document, characters: int, *, overlap: int = 0, least: int = 80) -> list[Chunk]:
    """The passages of a document.

    :param characters: the longest passage.
    :param overlap: characters of the passage before that each may repeat.
    :param least: a shorter passage, such as a lone page number, says too little and is left out, unless it is all
        there is.
    """
    from semantic_text_splitter import MarkdownSplitter, TextSplitter

    splitter = (MarkdownSplitter if document.kind == "markdown" else TextSplitter)(characters, overlap=overlap)
    found = [
        Chunk(document=document, start=start, end=start + len(text))
        for start, text in splitter.chunk_indices(document.text)
        if text.strip()
    ]
    long = [passage for passage in found if passage.end - passage.start >= least]
    return long or found
