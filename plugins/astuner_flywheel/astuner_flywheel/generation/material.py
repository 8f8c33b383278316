"""What new tasks are made from: passages of documents, samples, or both; and its fingerprint.

Everything is read before anything is asked.  Invariant: two runs over the same files have the same passages with the
same names, and a file that changed changes the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from astuner import RunDir
from astuner.contracts.errors import DataError
from astuner_flywheel.documents.chunks import chunk
from astuner_flywheel.documents.document import READER_VERSION, BadDocument, Chunk, Document, Limits
from astuner_flywheel.documents.find import find
from astuner_flywheel.documents.reading import DocumentReader, check, sha256_of
from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_flywheel.generation.samples import Sample, read_samples

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Material:
    """Passages and samples, and what was left out on the way to them."""

    documents: tuple[Document, ...]
    chunks: tuple[Chunk, ...]
    samples: tuple[Sample, ...]
    samples_sha256: str | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    """Documents that could not be read (`on_bad_document: skip`) -> why."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Files in the folders that are no documents, and documents that are there twice -> why they are not used."""

    def fingerprint(self) -> dict[str, Any]:
        """What it is made of, as JSON."""
        documents = {document.path: document.sha256 for document in self.documents}
        return {"documents": documents, "seeds": self.samples_sha256, "reader": READER_VERSION}


def gather(config: DataGenerationConfig, base_dir: Path, kept: Path | None, say: Say = lambda _: None) -> Material:
    """Read the documents and samples that a section names.

    :param kept: the folder that texts are kept in, so that going on parses nothing again; None keeps none.
    :raises BadDocument: a document cannot be read, and on_bad_document is ``stop``.
    :raises astuner.contracts.errors.DataError: there is nothing to make tasks from.
    """
    documents: dict[str, Document] = {}
    skipped: dict[str, str] = {}
    ignored: dict[str, str] = {}
    if config.documents:
        found = find(config.documents, base_dir)
        ignored.update(found.ignored)
        with DocumentReader(config.limits, config.encoding) as reader:
            for number, path in enumerate(found.files, start=1):
                name = _name(path, base_dir)
                begins = partial(say, f"reading document {number} of {len(found.files)}: {name}")
                try:
                    document = _read(reader, path, name, config, kept, begins)
                except BadDocument as e:
                    if config.on_bad_document == "stop":
                        raise BadDocument(f"{e}. Or leave such documents out with on_bad_document: skip") from None
                    skipped[name] = str(e)
                    continue
                if document.sha256 in documents:
                    ignored[name] = f"the same as {documents[document.sha256].path}"
                else:
                    documents[document.sha256] = document
        if not documents:
            first = next(iter(skipped.values()), "")
            raise DataError(f"none of the {len(found.files)} documents can be read, the first because {first}")
    samples, samples_sha256 = ((), None) if config.seeds is None else read_samples(config, base_dir / config.seeds)
    return Material(
        documents=tuple(documents.values()),
        chunks=tuple(c for document in documents.values() for c in chunk(document, config.chunk_characters)),
        samples=samples,
        samples_sha256=samples_sha256,
        skipped=skipped,
        ignored=ignored,
    )


def _read(
    reader: DocumentReader,
    path: Path,
    name: str,
    config: DataGenerationConfig,
    kept: Path | None,
    begins: Callable[[], None],
) -> Document:
    """The document in a file; ``begins`` is called where it is not known yet, before it is read."""
    kind = check(path, name, config.limits)
    if kept is None:
        begins()
        return reader.read(path, name)
    sha256 = sha256_of(path, name)
    index = kept / f"{_kept_as(sha256, kind, config.encoding, config.limits)}.json"
    text = index.with_suffix(".txt")
    if index.exists() and text.exists():
        about = json.loads(index.read_text(encoding="utf-8"))
        with text.open(encoding="utf-8", newline="") as file:
            pages, notes = tuple(about["pages"]), tuple(about["notes"])
            return Document(path=name, sha256=sha256, kind=kind, text=file.read(), pages=pages, notes=notes)
    begins()
    document = reader.read(path, name)
    kept.mkdir(parents=True, exist_ok=True)
    with text.open("w", encoding="utf-8", newline="") as file:
        file.write(document.text)
    about = {"path": name, "sha256": document.sha256, "pages": document.pages, "notes": document.notes}
    RunDir.write_atomically(index, json.dumps(about, ensure_ascii=False, indent=1) + "\n")
    return document


def _kept_as(sha256: str, kind: str, encoding: str | None, limits: Limits) -> str:
    """A name that starts with the file's hash, as spans name it, and changes with how it was read."""
    how = hashlib.sha256(repr((kind, encoding, READER_VERSION, limits)).encode()).hexdigest()
    return f"{sha256[:16]}-{how[:8]}"


def _name(path: Path, base_dir: Path) -> str:
    return str(path.relative_to(base_dir)) if path.is_relative_to(base_dir) else str(path)


