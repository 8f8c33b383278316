"""Material of new tasks (passages of documents, samples or both), the order of requests, and checks of proposals.

All material is read before the first request. Every line of the samples' file must be a sample with fields of the jsonl
reader; otherwise the file is rejected with the line number. Invariants: two runs over the same files have the same
passages with the same names, and a changed file changes the fingerprint; the same material and settings give the same
units with the same names in the same order, and requesting more tasks only appends units.

Checks of a proposal without requests are here, too. Evidence is searched in the passage regardless of white space,
typography and line-end hyphens, which models do not copy exactly, and in the form that a fence showed. The result is
its exact place in the original text.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from astuner.contracts.errors import DataError
from astuner.contracts.rows import BadRow, FieldMap
from astuner_flywheel.documents.document import READER_VERSION, BadDocument, Chunk, Document, chunk, find
from astuner_flywheel.documents.reading import DocumentReader, check, sha256_of
from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_flywheel.generation.prompts import has_marker
from astuner_flywheel.generation.screening import gives_answer_away, obeyed
from astuner_flywheel.near import words
from astuner_flywheel.support import write_json
from astuner_helpers.untrusted import neutralise
from astuner_http.strict_json import parse_json

_LONGEST_FILE = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sample task."""

    id: str
    """Its ID, or the file's name and the line number."""
    question: str
    answer: str
    history: tuple[Mapping[str, Any], ...]
    """Messages before the question (``init_messages``): a system prompt, or an earlier conversation."""

    @property
    def stands_alone(self) -> bool:
        """Return whether it can be understood without earlier messages."""
        return all(message["role"] in ("system", "developer") for message in self.history)


def read_samples(config: DataGenerationConfig, path: Path) -> tuple[tuple[Sample, ...], str]:
    """Return the samples of ``path`` and the hash of the file.

    :raises DataError: The file or a line of it cannot be read.
    """
    path = path.expanduser()
    try:
        if path.stat().st_size > _LONGEST_FILE:
            raise DataError(f"{path} has more than {_LONGEST_FILE / 1e6:g} MB; use a few of the samples")
        data = path.read_bytes()
    except OSError as e:
        raise DataError(
            f"cannot read the samples in {path}: {e.strerror or e}; correct seeds (relative paths start at the "
            "experiment file)"
        ) from None
    samples = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = parse_json(line)
        except ValueError as e:
            raise DataError(f"{place}: not a sample: {e}. Correct the line") from None
        samples.append(_sample(row, place, f"{path.name}:{number}", config))
    if not samples:
        raise DataError(f"{path} is empty; add samples")
    if not config.documents and not any(sample.stands_alone for sample in samples):
        raise DataError(
            f"every sample in {path} continues a conversation (init_messages), but new tasks are modeled on first "
            "questions; add samples that can be understood alone"
        )
    return tuple(samples), hashlib.sha256(data).hexdigest()


def _sample(row: Mapping[str, Any], place: str, default_id: str, config: DataGenerationConfig) -> Sample:
    inner = row.get("metadata")
    try:
        task = FieldMap(config.query_field).task({**row, **inner} if isinstance(inner, Mapping) else row, default_id)
    except BadRow as e:
        raise DataError(f"{place}: {e}") from None
    if not (question := task.main_query.strip()):
        raise DataError(f"{place}: the question is missing (fields: {', '.join(row)}); set query_field")
    answer = task.metadata.get(config.answer_field)
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        there = ", ".join(task.metadata)
        raise DataError(f"{place}: {config.answer_field!r} is missing (fields: {there}); set answer_field")
    return Sample(id=task.task_id, question=question, answer=answer.strip(), history=tuple(task.init_messages))


Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Material:
    """Passages and samples, and skipped files."""

    documents: tuple[Document, ...]
    chunks: tuple[Chunk, ...]
    samples: tuple[Sample, ...]
    samples_sha256: str | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    """Reasons of unreadable documents (`on_bad_document: skip`)."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Reasons of unused files: other files in folders, and duplicate documents."""

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of the material as JSON."""
        documents = {document.path: document.sha256 for document in self.documents}
        return {"documents": documents, "seeds": self.samples_sha256, "reader": READER_VERSION}


def gather(config: DataGenerationConfig, base_dir: Path, kept: Path | None, say: Say = lambda _: None) -> Material:
    """Read the documents and samples of a section.

    :param kept: Folder for extracted texts, so that continuing does not parse them again. None: keep none.
    :raises BadDocument: A document cannot be read, and on_bad_document is ``stop``.
    :raises astuner.contracts.errors.DataError: There is no material.
    """
    documents: dict[str, Document] = {}
    skipped: dict[str, str] = {}
    ignored: dict[str, str] = {}
    if config.documents:
        files, ignored = find(config.documents, base_dir)
        with DocumentReader(config.limits, config.encoding) as reader:
            for number, path in enumerate(files, start=1):
                name = str(path.relative_to(base_dir)) if path.is_relative_to(base_dir) else str(path)
                begins = partial(say, f"reading document {number} of {len(files)}: {name}")
                try:
                    document = _read(reader, path, name, config, kept, begins)
                except BadDocument as e:
                    if config.on_bad_document == "stop":
                        raise BadDocument(f"{e}. Set on_bad_document: skip to skip such documents") from None
                    skipped[name] = str(e)
                    continue
                if document.sha256 in documents:
                    ignored[name] = f"the same as {documents[document.sha256].path}"
                else:
                    documents[document.sha256] = document
        if not documents:
            first = next(iter(skipped.values()), "")
            raise DataError(f"none of the {len(files)} documents can be read; the first one: {first}")
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
    """Return the document in a file. ``begins`` is called before a document is read for the first time."""
    kind = check(path, name, config.limits)
    if kept is None:
        begins()
        return reader.read(path, name)
    sha256 = sha256_of(path, name)
    # The name starts with the file's hash, as in spans, and changes with the reader's settings.
    how = hashlib.sha256(repr((kind, config.encoding, READER_VERSION, config.limits)).encode()).hexdigest()
    index = kept / f"{sha256[:16]}-{how[:8]}.json"
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
    write_json(index, about, indent=1)
    return document


SHOWN = 4
"""Number of samples in one request: enough to show their common form, with different ones in the next request."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A request for tasks."""

    id: str
    index: int
    """Position in the order."""
    chunk: Chunk | None
    """The passage, or None if there are only samples."""
    samples: tuple[Sample, ...]
    """Samples to show. They stand alone, because no earlier messages are shown."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A proposed task."""

    id: str
    """Name of the resulting task. Identical proposals have the same name."""
    unit: Unit
    number: int
    """Position in the answer."""
    question: str
    answer: str
    evidence: str

    @property
    def place(self) -> str:
        """Return the identity of the proposal: its request and its number in the answer."""
        return f"{self.unit.id}#{self.number}"


def units(material: Material, config: DataGenerationConfig) -> list[Unit]:
    """Return all possible requests: every passage once, then every passage again, …, or draws of samples."""
    if not material.chunks and config.documents:
        return []
    passages: list[tuple[str, Chunk | None]] = []
    if config.documents:
        for turn in range(config.rounds):
            drawn = sorted((_hash(f"{config.seed}:{turn}:{c.id}"), n) for n, c in enumerate(material.chunks))
            passages += [(f"{turn}:{material.chunks[n].id}", material.chunks[n]) for _, n in drawn]
    else:
        should_do = -(-config.tasks // config.per_call)
        passages = [(f"samples:{number}", None) for number in range(config.rounds * should_do)]
    samples = [sample for sample in material.samples if sample.stands_alone]
    found = []
    for index, (name, passage) in enumerate(passages):
        shown = random.Random(_hash(f"{config.seed}:{name}")).sample(samples, min(SHOWN, len(samples)))
        found.append(Unit(id=name, index=index, chunk=passage, samples=tuple(shown)))
    return found


def candidate(unit: Unit, number: int, question: str, answer: str, evidence: str) -> Candidate:
    """Return a proposed task with its name, a hash of its content and its material."""
    question, answer = question.strip(), answer.strip()
    source = unit.chunk.document.sha256 if unit.chunk else ""
    hashed = hashlib.sha256("\n".join([source, question, answer]).encode("utf-8", "backslashreplace")).hexdigest()
    return Candidate(
        id=f"gen-{hashed[:16]}", unit=unit, number=number, question=question, answer=answer, evidence=evidence.strip()
    )


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


_TABLE = yaml.safe_load(Path(__file__).with_name("refers.yaml").read_text(encoding="utf-8"))
_REFERS = re.compile("|".join(_TABLE["refers"]).replace("{TEXT}", _TABLE["text"]), re.IGNORECASE)
_QUOTES = str.maketrans({"’": "'", "‘": "'", "‚": "'", "“": '"', "”": '"', "„": '"', "«": '"', "»": '"'})
_CUT = re.compile(r"-[ \t]*\n\s*(?=[a-zà-ÿ])")
"""A hyphenated word at the end of a line."""
_DASHES = re.compile("[\u2010-\u2015\u2212]")

SHORTEST_QUOTE = 6
"""Minimum characters of evidence. Shorter texts occur everywhere."""


def fault(found: Candidate, config: DataGenerationConfig) -> tuple[str, str] | None:
    """Return why a question and its answer are not a valid task, with details, or None."""
    if (reason := _unfit(found, config)) is not None:
        return reason, ""
    chunk = found.unit.chunk
    if gives_answer_away(found.question, found.answer, from_text=chunk is not None):
        return "contains its answer", repr(found.answer[:200])
    samples = "\n\n".join(f"{sample.question}\n\n{sample.answer}" for sample in found.unit.samples)
    source = samples if chunk is None else chunk.text
    are_samples = chunk is None
    if demanded := obeyed(found.question, found.answer, found.evidence, source, are_samples=are_samples):
        return "obeys the text", f"an instruction in it demands {demanded[:200]!r}"
    return None


def _unfit(found: Candidate, config: DataGenerationConfig) -> str | None:
    question, answer, chunk = found.question, found.answer, found.unit.chunk
    if not question or not answer:
        return "empty"
    if len(question) > config.max_question_characters or len(answer) > config.max_answer_characters:
        return "too long"
    if has_marker(question) or has_marker(answer):
        return "repeats the prompt"
    if not words(question):
        return "no words"
    if chunk is not None and refers_to_text(question):
        return "asks about the text"
    return (
        "evidence is not in the passage" if chunk is not None and locate(found.evidence, chunk.text) is None else None
    )


def refers_to_text(question: str) -> bool:
    """Return whether a question refers to "the text above", which users of the task do not see."""
    return _REFERS.search(question) is not None


def locate(quote: str, text: str) -> tuple[int, int] | None:
    """Return the position of ``quote`` in ``text``, or None if it is missing or too short."""
    found = _find(_plain(quote), _plain(text))
    if found is None and neutralise(text) != text:  # the quote may match the text in the prompt
        found = _find(_tight(quote), _tight(text))
    return found


def _find(quote: tuple[str, list[int]], text: tuple[str, list[int]]) -> tuple[int, int] | None:
    whole = quote[0].strip()
    plain, places = text
    for wanted in (whole, whole.strip(" .\"'")):  # a model may end a quote with its own full stop
        if len(wanted) < min(SHORTEST_QUOTE, len(plain.strip())):
            continue
        if (at := plain.find(wanted)) >= 0:
            return places[at], places[at + len(wanted) - 1] + 1
    return None


def _plain(text: str) -> tuple[str, list[int]]:
    """Return the normalized text and the original position of each of its characters."""
    letters: list[str] = []
    places: list[int] = []
    i = 0
    while i < len(text):
        char = text[i]
        if char == "\u00ad":  # a soft hyphen
            i += 1
        elif char == "-" and (end := _CUT.match(text, i)):
            i = end.end()
        elif char.isspace():
            if letters and letters[-1] != " ":
                letters.append(" ")
                places.append(i)
            i += 1
        else:
            plain = _DASHES.sub("-", unicodedata.normalize("NFKC", char).translate(_QUOTES)).casefold()
            letters.extend(plain)
            places.extend([i] * len(plain))
            i += 1
    return "".join(letters), places


def _tight(text: str) -> tuple[str, list[int]]:
    """Return `_plain` without invisible characters and without the spaces that break control tokens."""
    plain, places = _plain(text)
    kept = [i for i, char in enumerate(plain) if char != " " and neutralise(char)]
    return "".join(plain[i] for i in kept), [places[i] for i in kept]
