"""Prompts for the helper model, and the forms of its answers.

The system message is one of ``prompts.yaml``. Everything written by users, documents or models is in the user message;
untrusted text is in a fence, between two unpredictable markers, and is described as data. The marker depends on the
text and a secret of this machine, so it cannot occur in a document, and the same text gives the same prompt, which can
be cached. `VERSION` is increased with every change of a prompt and recorded in every task. Invariant: neither the
marker nor a control token of a chat template occurs inside a fence.
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
    """Enclose ``text`` in two markers, without invisible characters and with control tokens broken.

    Invisible characters hide text from people but not from models. A server may treat a control token as the end of the
    message.

    :param name: One word that describes the text.
    :param secret: Secret that makes the marker unpredictable, stored in the folder of the tasks.
    """
    clean = neutralise(text)
    number = 0
    while (marker := _marker(clean, secret, number)) in clean:
        number += 1
    return f"<<<{name} {marker}\n{clean}\n{marker}>>>"


def has_marker(text: str) -> bool:
    """Return whether a text contains a marker, which happens if a model copies its prompt."""
    return re.search(r"<<<[\w-]+ [0-9a-f]{16}|[0-9a-f]{16}>>>", text) is not None


def _marker(text: str, secret: str, number: int) -> str:
    return hashlib.sha256(f"{secret}\n{number}\n{text}".encode("utf-8", "backslashreplace")).hexdigest()[:16]


VERSION = "2"

Messages = list[dict[str, str]]

_SYSTEM: dict[str, str] = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))


# No docstrings: they would be in the schemas that models read.
class ProposedTask(BaseModel):  # noqa: D101
    question: str
    answer: str
    evidence: str = ""


class Proposal(BaseModel):  # noqa: D101
    tasks: list[ProposedTask] = Field(max_length=200)


class Solution(BaseModel):  # noqa: D101
    reasoning: str = ""
    found: bool = True
    answer: str


class Comparison(BaseModel):  # noqa: D101
    reason: str = ""
    same: bool


def write(
    config: DataGenerationConfig, passage: str | None, samples: Sequence[Sample], known: Sequence[str], *, secret: str
) -> Messages:
    """Return messages that request new tasks: from a passage (with samples as style), or from samples only.

    :param known: Existing questions.
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
    """Return messages that request the answer to a question, based on the passage if there is one."""
    asked = fenced("QUESTION", question, secret)
    if passage is None:
        return _messages("solve", [asked, "Answer the question."])
    return _messages("solve_from_text", [fenced("TEXT", passage, secret), asked, "Answer the question by the text."])


def compare(question: str, one: str, other: str, *, secret: str) -> Messages:
    """Return messages that ask whether two answers have the same meaning."""
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
