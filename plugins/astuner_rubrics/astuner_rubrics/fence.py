"""Show untrusted text to a judge.

Texts of agents, users and data sets are data for a judge, and an agent that is rewarded for a good verdict will sooner
or later write a verdict itself. Such text is enclosed in two marker lines with an unpredictable number. Every line
starts with a gutter, and marker lines and control tokens of chat templates are neutralized
(`astuner_helpers.untrusted`).

Invariant: between the marker lines, every line without the gutter was written by ASTuner, and no untrusted text is
outside of them. The number is a hash of all shown texts: an identical question gives an identical request, which can be
cached, and a text cannot contain its own marker.
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
"""Maximum characters to show of a text: about 6,000 tokens of English."""

GUTTER = "| "

_PROMPTS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))
EXPLAINED = _PROMPTS["fences"]
"""Explanation of fences, for the system message of every prompt with fences."""

_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9 ]{0,39}")
_FENCE = re.compile(
    r"^-----BEGIN (?P<label>[A-Za-z0-9 ]+) (?P<number>[0-9a-f]{24})-----\n"
    r"(?P<body>.*?)\n?^-----END (?P=label) (?P=number)-----$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Fenced:
    """A text in a fence."""

    label: str
    number: str
    text: str
    """The text without the gutter and without lines added by ASTuner."""


def prompt(name: str) -> str:
    """Return a system message of ``prompts.yaml``."""
    return _PROMPTS[name].replace("{FENCES}", EXPLAINED)


def fences(texts: Mapping[str, str], *, limit: int = LIMIT) -> str:
    """Enclose each text in marker lines with its label. All share one number, which depends on all of them.

    :param limit: Maximum characters to show of each text: the first three quarters and the last quarter of them. A line
        states how many are missing.
    :raises ValueError: A label has characters other than letters, digits and spaces, or more than 40 of them.
    """
    shown = {_label(label): _shown(text, limit) for label, text in texts.items()}
    number = _number(shown)
    return "\n\n".join(
        f"-----BEGIN {label} {number}-----\n{body}\n-----END {label} {number}-----" for label, body in shown.items()
    )


def fences_in(content: str) -> tuple[Fenced, ...]:
    """Return the fences of a message in order, as a judge that reads the marker lines finds them."""
    found = []
    for match in _FENCE.finditer(content):
        lines = [line[len(GUTTER) :] for line in match["body"].split("\n") if line.startswith(GUTTER)]
        found.append(Fenced(match["label"], match["number"], "\n".join(lines)))
    return tuple(found)


def without_fences(content: str) -> str:
    """Return the text of a message outside of all fences."""
    return _FENCE.sub("", content)


def _label(label: str) -> str:
    if not _LABEL.fullmatch(label):
        raise ValueError(f"{label!r} is not a valid fence label: use at most 40 letters, digits and spaces")
    return label.upper()


def _shown(text: str, limit: int) -> str:
    """Return the lines between the markers."""
    head, tail = limit - limit // 4, limit // 4
    most = 4 * limit  # limit the text to neutralize: 100 MB must not take minutes
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
