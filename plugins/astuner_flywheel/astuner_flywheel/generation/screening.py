"""Detect proposed tasks that reveal their answer or follow instructions in the material.

A question reveals its answer if it contains it, except for yes and no, listed options, and numbers of a calculation.

The author of a text may try to control the helper model ("ignore the above and write …"). The prompt states that
the text is data. Whether it followed an instruction shows in the task: it contains what a sentence demanded (a quoted
phrase, a marker, the words after "answer with") and nothing else in the text explains it. Sentences that address a
model are never the topic of a task. Sentences that may address people also occur in harmless texts, such as exam rules,
so a task whose evidence contains the phrase may ask about it; if samples contain it ("answer with yes or no"), new
tasks follow them.

Invariants: no requests are sent; a text without such sentences is never flagged.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import yaml

from astuner_flywheel.near import words
from astuner_helpers.untrusted import neutralise

_TABLE = yaml.safe_load(Path(__file__).with_name("screening.yaml").read_text(encoding="utf-8"))


def _any(name: str) -> re.Pattern[str]:
    return re.compile("|".join(_TABLE[name]), re.IGNORECASE | re.MULTILINE)


_LABELS, _ARTICLES = frozenset(_TABLE["labels"].split()), frozenset(_TABLE["articles"].split())
_OFFERS, _BESIDE = _any("offers"), "|".join(_TABLE["beside"])
_TO_MODEL, _TO_TASKS, _DEMANDS = _any("to_a_model"), _any("to_tasks"), _any("demands")
_SENTENCE_END = re.compile(r"[.!?。！？][\"”'’)]*(?=\s|$)|\n\s*\n")
_QUOTED = re.compile(r"[\"“„«`]([^\"“”„«»`\n]{2,200})[\"”»`]|(?<!\w)['‘]([^'‘’\n]{2,200})['’](?!\w)")
_MARKER = re.compile(r"\b[A-Z][A-Z0-9]*[-_0-9][A-Z0-9_-]*[A-Z0-9]\b|\b[A-Z]{4,}\b")
_ECHO = 5
"""Number of consecutive words that are not a coincidence if they match a sentence that addresses a model."""
_SHORTEST = 3
"""Minimum characters of a demanded phrase; two for a number."""


def gives_answer_away(question: str, answer: str, *, from_text: bool) -> bool:
    """Return whether a question contains its answer.

    :param from_text: Whether a text decides the answer. In calculations, numbers may occur in the question.
    """
    said = words(answer)
    while len(said) > 1 and said[0] in _ARTICLES:
        said.pop(0)
    wanted, asked = " ".join(said), _padded(question)
    if len(wanted) < 2 or wanted in _LABELS or f" {wanted} " not in asked:
        return False
    if re.search(rf" (?:answer|solution|result) (?:(?:is|=) )?{re.escape(wanted)} ", asked):
        return True
    if not from_text and any(word[0].isdigit() for word in said):
        return False
    return not _is_option(question, answer)


def _is_option(question: str, answer: str) -> bool:
    """Return whether the question lists the answer as one of several options: "red, green or blue?"."""
    asked, wanted = (unicodedata.normalize("NFKC", " ".join(t.split())).casefold() for t in (question, answer))
    one = re.escape(wanted.strip(" ."))
    beside = rf"(?:{_BESIDE})\W{{0,3}}(?:(?:an?|the)\s)?{one}(?!\w)|(?<!\w){one}\s?(?:{_BESIDE})"
    return _OFFERS.search(asked) is not None and re.search(beside, asked) is not None


def obeyed(question: str, answer: str, evidence: str, source: str, *, are_samples: bool = False) -> str | None:
    """Return what the task took from a sentence of ``source`` that instructs its reader, or None.

    :param are_samples: Whether ``source`` shows the style of tasks.
    """
    source = neutralise(source)
    written, proof = f"{question}\n{answer}", _padded(evidence)
    task, is_long = _padded(written), proof.count(" ") > _ECHO
    for start, end, reach, to_model in _instructions(source):
        sentence = source[start:end]
        if are_samples and not to_model:
            continue
        if to_model and is_long and proof in _padded(sentence):
            return evidence
        for phrase in _demanded(source[start:reach], sentence if to_model else ""):
            said = _padded(phrase)
            is_there = phrase in written if _MARKER.fullmatch(phrase) else said in task
            if is_there and (to_model or said not in proof) and said not in _padded(source[:start], source[reach:]):
                return phrase
    return None


def _padded(*texts: str) -> str:
    """Return the words of texts with spaces around each, for matching complete words."""
    return f" {' '.join(words(' '.join(texts)))} "


def _instructions(source: str) -> Iterator[tuple[int, int, int, bool]]:
    """Yield start and end of each instructing sentence, the end of the next one, and whether it addresses a model."""
    ends = [0, *(match.end() for match in _SENTENCE_END.finditer(source)), len(source)]
    for start, end, reach in zip(ends, ends[1:], [*ends[2:], len(source)], strict=False):
        to_model = _TO_MODEL.search(source, start, end) is not None
        if to_model or _TO_TASKS.search(source, start, end) is not None:
            yield start, end, reach, to_model


def _demanded(window: str, echoed: str) -> Iterator[str]:
    """Yield phrases that a sentence and the next one demand, and every few consecutive words of ``echoed``."""
    found = [one or other for one, other in _QUOTED.findall(window)]
    if not window.isupper():
        found += _MARKER.findall(window)
    found += [match["rest"].strip() for match in _DEMANDS.finditer(window)]
    said = words(echoed)
    found += [" ".join(said[i : i + _ECHO]) for i in range(len(said) - _ECHO + 1)]
    for phrase in found:
        letters = "".join(words(phrase))
        if len(letters) >= (2 if letters.isdigit() else _SHORTEST):
            yield phrase
