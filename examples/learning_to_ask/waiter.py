"""Book tables over several turns with a simulated guest, and judge the booking."""

import re
from collections.abc import Mapping

from astuner import Judge, JudgeOutput, ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner_agentscope import make_tool_agent

SYSTEM_PROMPT = "You book tables. Note in brackets what you know, then ask for one thing, or book."
QUESTIONS = {"people": "How many people?", "day": "Which day?", "hour": "What time?"}
ASKED = {"people": r"\bhow many\b", "day": r"\b(which|what) day\b", "hour": r"\bwhat time\b"}
"""Patterns by which the guest recognizes a question."""
NOTE = r"(?:\[[^]]*\] *)?"
"""Optional note of the waiter, which the guest does not hear."""
BOOKING = re.compile(NOTE + r"Book (\d+) on (\w+) at (\d+)\.?")
COST = 0.2
"""Cost of a question, low enough that a right booking always pays more than a wrong one."""


def note(known: Mapping[str, str]) -> str:
    """Return the waiter's note of the known values."""
    return f"[{', '.join(known.get(part, '?') for part in QUESTIONS)}] "


def booking(wish: Mapping[str, str]) -> str:
    """Return the sentence of a booking."""
    return f"Book {wish['people']} on {wish['day']} at {wish['hour']}."


class Guest:
    """Simulated guest who answers questions about a wish."""

    def __init__(self, wish: Mapping[str, str]) -> None:
        self.wish = wish
        self.asked: list[str] = []
        """Things that the waiter asked for; `unclear` if it was not exactly one."""

    def answer(self, said: str) -> str:
        heard = re.sub(NOTE, "", said, count=1)
        asked = [part for part, words in ASKED.items() if re.search(words, heard, re.IGNORECASE)]
        self.asked.append(asked[0] if len(asked) == 1 else "unclear")
        return self.wish[asked[0]] if len(asked) == 1 else "Sorry, what do you want to know?"


class Waiter(Workflow):
    """Workflow of one episode: wish, questions and answers, booking."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        guest = Guest(workflow_task.task.metadata["wish"])
        agent = make_tool_agent(model_tuner, name="waiter", system_prompt=SYSTEM_PROMPT)
        heard, booked = workflow_task.task.main_query, None
        while booked is None and len(guest.asked) < 4 and not model_tuner.context_overflow:
            said = (await agent.reply(heard, "guest")).strip()
            booked = BOOKING.fullmatch(said)
            heard = guest.answer(said) if booked is None else ""
        return WorkflowOutput(metadata={"booked": booked and booked.groups(), "asked": guest.asked})


class RightTable(Judge):
    """Judge: 1 for the right table, minus `COST` per question; 0 for another table or none.

    A success is the right table without unnecessary questions.
    """

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        task, asked = workflow_task.task.metadata, output.metadata.get("asked", [])
        right = output.metadata.get("booked") == tuple(task["wish"][part] for part in QUESTIONS)
        needless = len(asked) - len({*asked} & {*task["missing"]})
        return JudgeOutput(
            reward=right * (1 - COST * len(asked)),
            is_success=right and not needless,
            metrics={"right": float(right), "questions": float(len(asked)), "needless": float(needless)},
        )
