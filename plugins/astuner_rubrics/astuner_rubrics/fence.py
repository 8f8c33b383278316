"""Showing a judge text that nobody vouches for.

What an agent, a user or a data set wrote is data to a judge, and an agent that is rewarded for a good verdict will
sooner or later write one itself.  So such text stands between two marker lines whose number it cannot know, every
line of it begins with a gutter, and nothing in it is a marker of ours or of a chat template any more
(`astuner_helpers.untrusted`).

Invariant: between the two marker lines, a line that does not begin with the gutter is ours; and outside of them there
is nothing of the text.  The marker's number is a hash of all that is shown, so that the same question asked twice is
the same request (a cache may answer it), and a text that holds its own marker cannot be found by trying.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from astuner_helpers.untrusted import neutralise

LIMIT = 24_000
"""Most characters of one text that are shown: about 6,000 tokens of English."""

GUTTER = "| "

_PROMPTS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))
EXPLAINED = _PROMPTS["fences"]
"""For the system message of every prompt that has fences."""

_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9 ]{0,39}")
_FENCE = re.compile(
    r"^-----BEGIN (?P<label>[A-Za-z0-9 ]+) (?P<number>[0-9a-f]{24})-----\n"
    r"(?P<body>.*?)\n?^-----END (?P=label) (?P=number)-----$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Fenced:
    """One text as it was shown."""

    label: str
    number: str
    text: str
    """Without the gutter, and without the lines that are ours."""


def prompt(name: str) -> str:
    """A system message of ``prompts.yaml``."""
    return _PROMPTS[name].replace("{FENCES}", EXPLAINED)


def fences(texts: Mapping[str, str], *, limit: int = LIMIT) -> str:
    """Each text between marker lines with its label, in order; all have one number, which all of them decide.

    :param limit: most characters of each text that are shown, the first three quarters and the last one; the line
        where the others are missing says how many.
    :raises ValueError: a label has other characters than letters, digits and spaces, or is longer than 40.
    """
    shown = {_label(label): _shown(text, limit) for label, text in texts.items()}
    number = _number(shown)
    return "\n\n".join(
        f"-----BEGIN {label} {number}-----\n{body}\n-----END {label} {number}-----" for label, body in shown.items()
    )


def fences_in(content: str) -> tuple[Fenced, ...]:
    """The fences of a message, in order: what a judge that reads the marker lines finds."""
    found = []
    for match in _FENCE.finditer(content):
        lines = [line[len(GUTTER) :] for line in match["body"].split("\n") if line.startswith(GUTTER)]
        found.append(Fenced(match["label"], match["number"], "\n".join(lines)))
    return tuple(found)


def without_fences(content: str) -> str:
    """What of a message stands outside of every fence."""
    return _FENCE.sub("", content)


def _label(label: str) -> str:
    if not _LABEL.fullmatch(label):
        raise ValueError(f"{label!r} is no label of a fence: letters, digits and spaces, at most 40")
    return label.upper()


def _shown(text: str, limit: int) -> str:
    """The lines between the markers."""
    head, tail = limit - limit // 4, limit // 4
    most = 4 * limit  # what is neutralised at all: a text of 100 MB must not take minutes
    if len(text) <= most:
        first = neutralise(text)
        if len(first) <= limit:
            return _guttered(first)
        first, last = first[:head], first[-tail:] if tail else ""
    else:
        first, last = neutralise(text[: most // 2])[:head], neutralise(text[-most // 2 :])[-tail:] if tail else ""
    missing = max(len(text) - len(first) - len(last), 1)
    return f"{_guttered(first)}\n(about {missing:,} characters of {len(text):,} are left out here)\n{_guttered(last)}"


def _guttered(text: str) -> str:
    return "\n".join(GUTTER + line for line in text.split("\n"))


def _number(shown: Mapping[str, str]) -> str:
    everything = "\0".join(f"{label}\0{body}" for label, body in shown.items())
    numbers = (hashlib.sha256(f"{turn}\0{everything}".encode()).hexdigest()[:24] for turn in itertools.count())
    return next(number for number in numbers if number not in everything)
