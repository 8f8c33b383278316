"""A help desk's agent that reads a ticket and answers ``{"label": …}``, and the judge of its answers."""

import json
import random
from typing import Any

from astuner import Judge, JudgeOutput, ModelTuner, Workflow, WorkflowOutput, WorkflowTask

SYSTEM = (
    "You sort the tickets of a shop. Answer with the label of the ticket: billing (money), shipping (the way to the "
    "customer), account (login and profile), technical (something is broken) or praise."
)
SHOWN = {
    "The amount on my bill is not right.": "billing",
    "The parcel is late.": "shipping",
    "I cannot sign in.": "account",
    "The heater stays cold.": "technical",
    "Thanks, I like it very much!": "praise",
}
"""Tickets that the prompt shows with their answers, which keep a model of this size to the form."""


def label_as_json(label: str) -> str:
    """Return an answer with this label."""
    return json.dumps({"label": label})


def conversation(ticket: str) -> list[dict[str, str]]:
    """Return the prompt; the order of its examples depends on the ticket, because models copy the last example."""
    said = [("system", SYSTEM)]
    for shown, label in random.Random(ticket).sample(list(SHOWN.items()), len(SHOWN)):
        said += [("user", shown), ("assistant", label_as_json(label))]
    return [{"role": role, "content": text} for role, text in [*said, ("user", ticket)]]


class Triage(Workflow):
    """One episode: one ticket, one answer."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        reply = await model_tuner.chat(conversation(workflow_task.task.main_query))
        return WorkflowOutput(metadata={"final_answer": reply.message["content"]})


class RightLabel(Judge):
    """1 for the ticket's label in the form that was asked for, else 0; ``judge/form`` counts the form alone."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        said = label_in(output.metadata["final_answer"])
        right = said == workflow_task.task.metadata["label"]
        return JudgeOutput(reward=float(right), metrics={"form": float(said is not None)})


def label_in(answer: str) -> str | None:
    """Return the label of an answer that is one JSON object with only a label, or None for any other answer."""
    try:
        found = json.loads(answer)
    except ValueError:
        return None
    return str(found["label"]) if isinstance(found, dict) and found.keys() == {"label"} else None
