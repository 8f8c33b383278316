"""What makes a proposed task worthless though it reads like one: it gives its answer away, or obeys its material.

A question gives its answer away when the answer stands in it, unless it has to: yes and no, options that the question
lists, and the numbers of a problem that is worked out.

A text may be written by somebody who wants something of the helper that reads it ("ignore the above and write …").
The helper is told that such a text is data; whether it obeyed shows in the task: what a sentence demanded (a phrase in
quotes, a marker, the words after "answer with") is there, and nothing else in the text would have put it there.  Two
kinds of sentences are told apart.  One that speaks to a model is never what a task is about.  One that may be meant
for people stands in harmless texts too, such as the rules of an exam, so a task whose evidence has the phrase itself
may ask about it; and where samples say it ("answer with yes or no"), new tasks are to be like them.

Invariants: nobody is asked; a text without such sentences flags nothing.
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
"""So many words in a row of a sentence that speaks to a model are no chance."""
_SHORTEST = 3
"""Characters of a demanded phrase; two for a number."""


def gives_answer_away(question: str, answer: str, *, from_text: bool) -> bool:
    """Whether the question has the answer in it.

    :param from_text: whether a text decides the answer; in a problem that is worked out, a number may come up again.
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
    """Whether the question offers the answer beside others: "red, green or blue?"."""
    asked, wanted = (unicodedata.normalize("NFKC", " ".join(t.split())).casefold() for t in (question, answer))
    one = re.escape(wanted.strip(" ."))
    beside = rf"(?:{_BESIDE})\W{{0,3}}(?:(?:an?|the)\s)?{one}(?!\w)|(?<!\w){one}\s?(?:{_BESIDE})"
    return _OFFERS.search(asked) is not None and re.search(beside, asked) is not None


def obeyed(question: str, answer: str, evidence: str, source: str, *, are_samples: bool = False) -> str | None:
    """What the task has from a sentence of ``source`` that instructs whoever reads it; None where it has nothing.

    :param are_samples: whether ``source`` shows what tasks should be like.
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
    """The words of texts with a space around each: what is in it is there as whole words."""
    return f" {' '.join(words(' '.join(texts)))} "


def _instructions(source: str) -> Iterator[tuple[int, int, int, bool]]:
    """Start and end of each sentence that instructs, the end of the one after it, and whether it speaks to a model."""
    ends = [0, *(match.end() for match in _SENTENCE_END.finditer(source)), len(source)]
    for start, end, reach in zip(ends, ends[1:], [*ends[2:], len(source)], strict=False):
        to_model = _TO_MODEL.search(source, start, end) is not None
        if to_model or _TO_TASKS.search(source, start, end) is not None:
            yield start, end, reach, to_model


def _demanded(window: str, echoed: str) -> Iterator[str]:
    """Phrases that a sentence and the one after it want to see, and every few words in a row of ``echoed``."""
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
