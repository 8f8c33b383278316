"""What the helper model is asked, word by word, and the forms that it answers in.

The system message is always one of ``prompts.yaml`` as it stands; everything that a person, a document or a model wrote
is in the user's message, strangers' texts in a fence: between two markers that nobody can guess, and said to be data.
The marker is drawn from the text itself and a secret of this machine's, so it cannot be written into a document, and
the same text gives the same prompt again, which a cache of answers lives on.  `VERSION` is raised with every change of
a word, and stands in the provenance of every task.  Invariant: neither the marker nor a control token of a chat
template occurs in what a fence encloses.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import BaseModel, Field

from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_helpers.untrusted import neutralise

if TYPE_CHECKING:
    from astuner_flywheel.generation.material import Sample


def fenced(name: str, text: str, secret: str) -> str:
    """``text`` between two markers, without invisible characters, which hide text from people and not from models, and
    with control tokens broken, which a server may take for the end of the message.

    :param name: one word for what it is.
    :param secret: what makes the marker unguessable; kept in the folder that the tasks are made in.
    """
    clean = neutralise(text)
    number = 0
    while (marker := _marker(clean, secret, number)) in clean:
        number += 1
    return f"<<<{name} {marker}\n{clean}\n{marker}>>>"


def has_marker(text: str) -> bool:
    """Whether a text repeats a marker, as a model does that copies its prompt."""
    return re.search(r"<<<[\w-]+ [0-9a-f]{16}|[0-9a-f]{16}>>>", text) is not None


def _marker(text: str, secret: str, number: int) -> str:
    return hashlib.sha256(f"{secret}\n{number}\n{text}".encode("utf-8", "backslashreplace")).hexdigest()[:16]


VERSION = "2"

Messages = list[dict[str, str]]

_SYSTEM: dict[str, str] = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))


class ProposedTask(BaseModel):
    question: str
    answer: str
    evidence: str = ""


class Proposal(BaseModel):
    tasks: list[ProposedTask] = Field(max_length=200)


class Solution(BaseModel):
    reasoning: str = ""
    found: bool = True
    answer: str


class Comparison(BaseModel):
    reason: str = ""
    same: bool


def write(
    config: DataGenerationConfig, passage: str | None, samples: Sequence[Sample], known: Sequence[str], *, secret: str
) -> Messages:
    """Ask for new tasks: from a passage (then samples show the style), or else from samples alone.

    :param known: questions that there are already.
    """
    parts = [] if passage is None else [fenced("TEXT", passage, secret)]
    if samples:
        shown = "\n\n".join(f"question: {sample.question}\nanswer: {sample.answer}" for sample in samples)
        parts.append(fenced("SAMPLES", shown, secret))
    if known:
        parts.append(fenced("EXISTING", "\n".join(f"- {question}" for question in known), secret))
        parts.append("The questions in EXISTING are there already: write tasks that are different from these.")
    if config.instructions:
        parts.append(f"What the tasks should be like: {config.instructions}")
    if config.language:
        parts.append(f"Write questions and answers in {config.language}.")
    asked = "one task" if config.per_call == 1 else f"{config.per_call} tasks"
    parts.append(f"Write {asked} like the samples." if passage is None else f"Write {asked} from the text.")
    return _messages("write_from_samples" if passage is None else "write_from_text", parts)


def solve(question: str, passage: str | None, *, secret: str) -> Messages:
    """Ask for the answer alone: by the passage where there is one."""
    asked = fenced("QUESTION", question, secret)
    if passage is None:
        return _messages("solve", [asked, "Answer the question."])
    return _messages("solve_from_text", [fenced("TEXT", passage, secret), asked, "Answer the question by the text."])


def compare(question: str, one: str, other: str, *, secret: str) -> Messages:
    """Ask whether two answers mean the same."""
    parts = [
        fenced("QUESTION", question, secret),
        fenced("ANSWER-1", one, secret),
        fenced("ANSWER-2", other, secret),
        "Do the two answers mean the same?",
    ]
    return _messages("compare", parts)


def _messages(system: str, parts: Sequence[str]) -> Messages:
    content = _SYSTEM[system].replace("{RULE}", _SYSTEM["rule"])
    return [{"role": "system", "content": content}, {"role": "user", "content": "\n\n".join(parts)}]
