"""A waiter who books tables over several turns, the guest who talks to it, and the judge of the booking."""

import re
from collections.abc import Mapping

from astuner import Judge, JudgeOutput, ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner_agentscope import make_tool_agent

SYSTEM_PROMPT = "You book tables. Note in brackets what you know, then ask for one thing, or book."
QUESTIONS = {"people": "How many people?", "day": "Which day?", "hour": "What time?"}
ASKED = {"people": r"\bhow many\b", "day": r"\b(which|what) day\b", "hour": r"\bwhat time\b"}
"""By which words the guest knows what a question asks for."""
NOTE = r"(?:\[[^]]*\] *)?"
"""What the waiter may write for itself first; the guest does not hear it."""
BOOKING = re.compile(NOTE + r"Book (\d+) on (\w+) at (\d+)\.?")
COST = 0.2
"""Of a question; a right booking still pays more than a wrong one, whatever the turns allow."""


def note(known: Mapping[str, str]) -> str:
    return f"[{', '.join(known.get(part, '?') for part in QUESTIONS)}] "


def booking(wish: Mapping[str, str]) -> str:
    """How the waiter says what it books."""
    return f"Book {wish['people']} on {wish['day']} at {wish['hour']}."


class Guest:
    """Has a wish, and says of it what it is asked for."""

    def __init__(self, wish: Mapping[str, str]) -> None:
        self.wish = wish
        self.asked: list[str] = []
        """What the waiter asked for so far; `unclear` where that was not one thing."""

    def answer(self, said: str) -> str:
        heard = re.sub(NOTE, "", said, count=1)
        asked = [part for part, words in ASKED.items() if re.search(words, heard, re.IGNORECASE)]
        self.asked.append(asked[0] if len(asked) == 1 else "unclear")
        return self.wish[asked[0]] if len(asked) == 1 else "Sorry, what do you want to know?"


class Waiter(Workflow):
    """One episode: the guest's wish, questions and answers, a booking."""

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
    """1 for the table that the guest wants, less `COST` for each question; 0 for any other and for none.

    A success is the right table without a question that was not needed.
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
