"""What a judge shows a helper model of a task and an attempt, and how all judges here ask for a verdict.

Whatever an agent wrote is plain text that nobody vouches for, and stands in fences (`astuner_rubrics.fence`).
Invariants: the system message is made of the person's own settings alone, so whatever an agent wrote, it is the same;
text that is missing is a `JudgeFailed` that says which key to set, never an empty text; an attempt that said nothing is
shown as such.
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
    """One message of a conversation."""

    who: str
    """Its role, and the agent's name where there are several; fit for a fence's label."""
    text: str


def question_of(workflow_task: WorkflowTask) -> str:
    """What was asked.

    :raises JudgeFailed: the task has no text.
    """
    task = workflow_task.task
    asked = [text_of(m.get("content")) for m in task.init_messages if m.get("role") == "user"]
    if text := task.main_query or "\n\n".join(filter(None, asked)):
        return text
    raise JudgeFailed(f"task {task.task_id!r} has neither a main_query nor a user's message, so there is no question")


def reference_of(workflow_task: WorkflowTask, field: str) -> str:
    """The task's reference answer.

    :param field: where in its metadata it is.
    :raises JudgeFailed: it has none.
    """
    task = workflow_task.task
    if text := text_of(task.metadata.get(field)):
        return text
    there = ", ".join(map(str, task.metadata)) or "nothing"
    raise JudgeFailed(
        f"task {task.task_id!r} has no metadata[{field!r}] (there is {there}); name the reference answer's field in "
        "reference, or leave it out to judge without one"
    )


def answer_of(output: WorkflowOutput, field: str | None) -> str:
    """What the attempt answered.

    :param field: ``response`` or a key of the output's metadata; None: ``final_answer`` there if it is, else
        ``response``.
    :raises JudgeFailed: the output has no such thing.
    """
    if field is None:
        found = output.metadata.get("final_answer")
        found = output.response if found is None else found
    elif field == "response":
        found = output.response
    elif field in output.metadata:
        found = output.metadata[field]
    elif "stop_reason" in output.metadata and output.response is not None:  # it ended before it could return one
        found = output.response
    else:
        there = ", ".join(output.metadata) or "nothing"
        raise JudgeFailed(
            f"the workflow's output has no metadata[{field!r}] (there is {there}, and response); correct answer_field"
        )
    if found is None:
        raise JudgeFailed(
            "the workflow's output has no response; return WorkflowOutput(response=…), or name what to judge in "
            "answer_field"
        )
    return text_of(found) or NOTHING


def text_of(value: Any) -> str:
    """The text of a string, of a chat message or its content, or of any other data as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value.strip()
    if callable(getattr(value, "get_text_content", None)):  # a message of AgentScope
        return text_of(value.get_text_content())
    if isinstance(value, Mapping):
        for key in ("text", "content"):
            if isinstance(value.get(key), (str, list)):
                return text_of(value[key])
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "type" in part for part in value):
        return "\n".join(filter(None, map(text_of, value)))
    return json.dumps(value, ensure_ascii=False, default=str)


def conversation_of(turns: Sequence[Turn]) -> tuple[Message, ...]:
    """Everything that was said in an attempt, each message once.

    :raises JudgeFailed: no model was asked.
    """
    if not turns:
        raise JudgeFailed("the attempt has no turns, so there is no conversation; judge its answer with show: answer")
    several = len({turn.agent for turn in turns}) > 1
    seen: dict[str, list[Message]] = {}
    found: list[Message] = []
    for turn in sorted(turns, key=lambda t: t.index):
        agent = turn.agent if several else ""
        known = seen.setdefault(turn.agent, [])
        new = [_message(message, agent) for message in turn.request]
        if turn.continues is None:  # a branch begins with the messages that were there before
            shared = next((i for i, (a, b) in enumerate(zip(known, new, strict=False)) if a != b), len(known))
            new = new[shared:]
        new.append(_message(turn.message, agent))
        known += new
        found += new
    return tuple(found)


def labelled(messages: Sequence[Message], label: str = "message", *, most: int = MOST_MESSAGES) -> dict[str, str]:
    """The messages with a fence's label each; the middle of a long conversation is left out, and that is said.

    :param most: messages, 8 or more; of a longer conversation an eighth of them are its first ones.
    """
    numbered = {f"{label} {n} {m.who}"[:40].strip(): m.text or NOTHING for n, m in enumerate(messages, start=1)}
    if len(numbered) <= most:
        return numbered
    items, first = list(numbered.items()), most // 8
    last = most - first
    note = {f"{label}s left out": f"{len(items) - most} messages, {label} {first + 1} to {len(items) - last}"}
    return {**dict(items[:first]), **note, **dict(items[-last:])}


def limit_of(shown: Mapping[str, str], most: int) -> int:
    """Most characters of each of these texts, so that many messages take about four times the room of one text."""
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
    """What the judges have in common that ask by criteria in plain words."""

    helper_model: str = Field(min_length=1)
    """The name of the model that is asked, below `astuner.helper_models`."""
    criteria: str = Field(min_length=1)
    """What a good answer is, in plain words."""
    reference: str | None = None
    """Where in the task's metadata its reference answer is, e.g. `answer`; null: it is judged without one."""
    answer_field: str | None = None
    """What is judged: `response`, or a key of the output's metadata; null: `final_answer` if it is there."""
    show: Literal["answer", "conversation"] = "answer"
    """Show the answers, or all that was said; then verdicts come when all attempts of the group have ended."""
    temperature: float | None = Field(None, ge=0)
    """Of the verdicts; null: the helper's. Several samples at 0 say the same."""
    explain: bool = True
    """Ask for a reason before the verdict, which makes it better and dearer."""
    system_prompt: str | None = None
    """In place of the first sentence of the helper's instructions; the rest of them stays."""
    max_chars: int = Field(LIMIT, ge=200)
    """Most characters of each text that are shown, of a conversation, or of all attempts together, four times as many;
    the middle of a longer text is left out, and the helper told so."""

    def system_message(self, task: str, *, conversation: str, reference: str, form: str) -> dict[str, str]:
        """The system message: what to do, by which criteria, what fences are, and the form of the answer.

        :param conversation: what is said where conversations are shown.
        :param reference: what is said where there is a reference answer.
        """
        lines = [self.system_prompt or task]
        lines += [conversation] * (self.show == "conversation") + [reference] * (self.reference is not None)
        criteria = f"The criteria:\n{self.criteria.strip()}"
        content = "\n\n".join(["\n".join(lines).strip(), criteria, EXPLAINED, form])
        return {"role": "system", "content": content}

    def asked(self, workflow_task: WorkflowTask) -> dict[str, str]:
        """What stands before the answers: the question, and the reference answer where there is one.

        :raises JudgeFailed: the task lacks one of them.
        """
        texts = {"question": question_of(workflow_task)}
        if self.reference is not None:
            texts["reference"] = reference_of(workflow_task, self.reference)
        return texts


def user_message(texts: Mapping[str, str], question: str, *, limit: int) -> dict[str, str]:
    """The user message: fenced texts, and what is asked about them."""
    return {"role": "user", "content": f"{fences(texts, limit=limit)}\n\n{question}"}


async def ask(helper: Helper, messages: Sequence[Mapping[str, str]], answer: type[BaseModel], **how: Any) -> Any:
    """One verdict of the wanted form; the helper is asked again where it is not of that form.

    :param how: as of `Helper.ask`: ``purpose``, ``temperature``, ``sample``.
    :raises JudgeFailed: there is none.
    :raises BudgetSpent: the helper's budget is spent.
    """
    try:
        return (await helper.ask(messages, answer=answer, **how)).data
    except HelperFailed as e:
        raise JudgeFailed(f"no verdict: {e}") from e
