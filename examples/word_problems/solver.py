"""An agent that answers a word problem in its head, and the judge of its answers."""

import re
from typing import Any

from astuner import Judge, JudgeOutput, ModelTuner, Workflow, WorkflowOutput, WorkflowTask

SYSTEM = "You solve word problems. Say the answer as a number, and nothing else."
SHOWN = {
    "A box holds 14 nails, and 3 more are put in. How many nails are in it?": "17",
    "4 cats have 6 kittens each. How many kittens are there?": "24",
    "Lea had 11 balls and lost 2. How many balls are left?": "9",
    "15 cakes are shared among 3 guests. How many does each get?": "5",
}
"""Problems that the prompt shows with their answers."""


class Solver(Workflow):
    """One episode: one problem, one answer."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        said = [("system", SYSTEM)]
        for problem, number in SHOWN.items():
            said += [("user", problem), ("assistant", number)]
        said.append(("user", workflow_task.task.main_query))
        reply = await model_tuner.chat([{"role": role, "content": text} for role, text in said])
        return WorkflowOutput(metadata={"final_answer": reply.message["content"]})


class LastNumber(Judge):
    """1 where the last number of the answer is the one behind ``####`` in the reference, as in GSM8K; else 0."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        wanted = last_number(workflow_task.task.metadata["answer"].rpartition("####")[2])
        if wanted is None:
            raise ValueError("the task's answer has no number behind ####")
        return JudgeOutput(reward=float(last_number(output.metadata["final_answer"]) == wanted))


def last_number(text: str) -> float | None:
    """Return the last number in ``text``, or None."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(found[-1].replace(",", "")) if found else None
