"""Build the questions of judges: what a helper model is shown of a task and an attempt.

Everything an agent wrote is untrusted text and is placed in fences (`astuner_rubrics.fence`). Invariants: the system
message depends only on the user's settings; missing text raises a `JudgeFailed` that names the key to set and is never
replaced by empty text; an attempt without text is shown as such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

from astuner import WorkflowTask
from astuner.contracts.errors import JudgeFailed
from astuner.contracts.section import Section
from astuner.contracts.types import Turn, WorkflowOutput
from astuner_helpers import Helper, HelperFailed
from astuner_rubrics.fence import EXPLAINED, LIMIT, fences

MOST_MESSAGES = 80
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
NOTHING = "(nothing was said)"


@dataclass(frozen=True)
class Message:
    """A message of a conversation."""

    who: str
    """Role, and the agent's name if there are several agents. Valid as the label of a fence."""
    text: str


def question_of(workflow_task: WorkflowTask) -> str:
    """Return the question of a task.

    :raises JudgeFailed: The task has no text.
    """
    task = workflow_task.task
    asked = [text_of(m.get("content")) for m in task.init_messages if m.get("role") == "user"]
    if text := task.main_query or "\n\n".join(filter(None, asked)):
        return text
    raise JudgeFailed(f"task {task.task_id!r} has no question: main_query and a message of the user are missing")


def reference_of(workflow_task: WorkflowTask, field: str) -> str:
    """Return the reference answer of a task.

    :param field: Metadata field that contains it.
    :raises JudgeFailed: The field is missing.
    """
    task = workflow_task.task
    if text := text_of(task.metadata.get(field)):
        return text
    there = ", ".join(map(str, task.metadata)) or "none"
    raise JudgeFailed(
        f"task {task.task_id!r} has no metadata[{field!r}] (available: {there}); set reference to the field of the "
        "reference answer, or remove it to judge without one"
    )


def answer_of(output: WorkflowOutput, field: str | None) -> str:
    """Return the answer of an attempt.

    :param field: ``response`` or a key of the output's metadata. None: ``final_answer`` if present, else ``response``.
    :raises JudgeFailed: The output has no such field.
    """
    if field is None:
        found = output.metadata.get("final_answer")
        found = output.response if found is None else found
    elif field == "response":
        found = output.response
    elif field in output.metadata:
        found = output.metadata[field]
    elif "stop_reason" in output.metadata and output.response is not None:  # ended before it could return an answer
        found = output.response
    else:
        there = ", ".join(output.metadata) or "nothing"
        raise JudgeFailed(
            f"the workflow's output has no metadata[{field!r}] (available: {there}, response); correct answer_field"
        )
    if found is None:
        raise JudgeFailed(
            "the workflow's output has no response; return WorkflowOutput(response=…), or set answer_field to the "
            "field to judge"
        )
    return text_of(found) or NOTHING


def text_of(value: Any) -> str:
    """Return the text of a string, a chat message or its content, or any other data as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value.strip()
    if callable(getattr(value, "get_text_content", None)):  # an AgentScope message
        return text_of(value.get_text_content())
    if isinstance(value, Mapping):
        for key in ("text", "content"):
            if isinstance(value.get(key), (str, list)):
                return text_of(value[key])
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "type" in part for part in value):
        return "\n".join(filter(None, map(text_of, value)))
    return json.dumps(value, ensure_ascii=False, default=str)


def conversation_of(turns: Sequence[Turn]) -> tuple[Message, ...]:
    """Return all messages of an attempt, each once.

    :raises JudgeFailed: The attempt has no turns.
    """
    if not turns:
        raise JudgeFailed("the attempt has no turns to show as a conversation; set show: answer to judge its answer")
    several = len({turn.agent for turn in turns}) > 1
    seen: dict[str, list[Message]] = {}
    found: list[Message] = []
    for turn in sorted(turns, key=lambda t: t.index):
        agent = turn.agent if several else ""
        known = seen.setdefault(turn.agent, [])
        new = [_message(message, agent) for message in turn.request]
        if turn.continues is None:  # a branch starts with messages of an earlier turn
            shared = next((i for i, (a, b) in enumerate(zip(known, new, strict=False)) if a != b), len(known))
            new = new[shared:]
        new.append(_message(turn.message, agent))
        known += new
        found += new
    return tuple(found)


def labelled(messages: Sequence[Message], label: str = "message", *, most: int = MOST_MESSAGES) -> dict[str, str]:
    """Return the messages by fence label. The middle of a long conversation is replaced by a note.

    :param most: Maximum number of messages, at least 8. The first eighth of them comes from the start.
    """
    numbered = {f"{label} {n} {m.who}"[:40].strip(): m.text or NOTHING for n, m in enumerate(messages, start=1)}
    if len(numbered) <= most:
        return numbered
    items, first = list(numbered.items()), most // 8
    last = most - first
    note = {f"{label}s left out": f"{len(items) - most} messages, {label} {first + 1} to {len(items) - last}"}
    return {**dict(items[:first]), **note, **dict(items[-last:])}


def limit_of(shown: Mapping[str, str], most: int) -> int:
    """Return the character limit per text, so that many messages take about four times the size of one text."""
    return min(most, max(400, 4 * most // max(len(shown), 1)))


def _message(message: Mapping[str, Any], agent: str) -> Message:
    role = str(message.get("role", ""))
    who = role if role in _ROLES else "other"
    text = text_of(message.get("content"))
    if calls := message.get("tool_calls"):
        text = f"{text}\n(calls tools) {json.dumps(calls, ensure_ascii=False, default=str)}".strip()
    name = re.sub(r"[^A-Za-z0-9]+", " ", agent)[:16].strip()
    return Message(f"{who} {name}".strip(), text)


class AskingConfig(Section):
    """Options shared by judges that use plain-text criteria."""

    helper_model: str = Field(min_length=1)
    """Name of the model in `astuner.helper_models`."""
    criteria: str = Field(min_length=1)
    """Description of a good answer in plain words."""
    reference: str | None = None
    """Task metadata field of the reference answer, e.g. `answer`. Default: judge without a reference."""
    answer_field: str | None = None
    """Text to judge: `response` or a key of the output's metadata. Default: `final_answer` if present."""
    show: Literal["answer", "conversation"] = "answer"
    """Show the answer or the full conversation. With conversations, verdicts wait for all attempts of the group."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature of verdicts. Default: the helper model's. With 0, several samples are identical."""
    explain: bool = True
    """Request a reason before the verdict. This improves verdicts and costs more."""
    system_prompt: str | None = None
    """Replacement for the first sentence of the instructions. The remaining instructions are kept."""
    max_chars: int = Field(LIMIT, ge=200)
    """Maximum characters per text; four times as many for a conversation or for all attempts together. The middle of a
    longer text is left out, and the helper model is notified."""

    def system_message(self, task: str, *, conversation: str, reference: str, form: str) -> dict[str, str]:
        """Return the system message: the task, the criteria, the explanation of fences and the answer form.

        :param conversation: Text to add if conversations are shown.
        :param reference: Text to add if there is a reference answer.
        """
        lines = [self.system_prompt or task]
        lines += [conversation] * (self.show == "conversation") + [reference] * (self.reference is not None)
        criteria = f"The criteria:\n{self.criteria.strip()}"
        content = "\n\n".join(["\n".join(lines).strip(), criteria, EXPLAINED, form])
        return {"role": "system", "content": content}

    def asked(self, workflow_task: WorkflowTask) -> dict[str, str]:
        """Return the texts before the answers: the question and, if configured, the reference answer.

        :raises JudgeFailed: One of them is missing.
        """
        texts = {"question": question_of(workflow_task)}
        if self.reference is not None:
            texts["reference"] = reference_of(workflow_task, self.reference)
        return texts


def user_message(texts: Mapping[str, str], question: str, *, limit: int) -> dict[str, str]:
    """Return the user message: fenced texts and the question about them."""
    return {"role": "user", "content": f"{fences(texts, limit=limit)}\n\n{question}"}


async def ask(helper: Helper, messages: Sequence[Mapping[str, str]], answer: type[BaseModel], **how: Any) -> Any:
    """Return a verdict in the requested form. Other answers are requested again.

    :param how: Options of `Helper.ask`: ``purpose``, ``temperature``, ``sample``.
    :raises JudgeFailed: There is no verdict.
    :raises BudgetSpent: The helper model's budget is spent.
    """
    try:
        return (await helper.ask(messages, answer=answer, **how)).data
    except HelperFailed as e:
        raise JudgeFailed(f"no verdict: {e}") from e
