"""The agent, the tasks and the judge of the planted runs; `Behaviour` holds what a fault changes in them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from astuner import Judge, JudgeOutput, ModelTuner, Task, TaskReader, Workflow, WorkflowOutput, WorkflowTask
from astuner.contracts.types import Split
from astuner_local.tiny.problems import distinct
from astuner_local.tiny.transcripts import TOOLS, first_messages
from astuner_math.calculator import CalculatorError, calculate

TRAIN_TASKS, VALIDATION_TASKS = 1000, 128
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What a judge or a tool of a planted run can look at."""

    task: Mapping[str, Any]
    trains: bool
    share: float
    """Share of the run's training episodes that have begun, 0 to 1."""
    draw: random.Random
    text: str = ""
    """The final answer."""
    calls: str = ""
    """Expressions that the calculator was called with, joined by spaces."""
    right: bool = False


def _right(attempt: Attempt) -> JudgeOutput:
    return JudgeOutput(reward=float(attempt.right), is_success=attempt.right)


@dataclass(kw_only=True)
class Behaviour:
    """What a fault changes; the defaults are a healthy run."""

    judge: Callable[[Attempt], JudgeOutput] = _right
    tool: Callable[[Attempt, str], str] = lambda attempt, expression: use_calculator(expression)
    question: Callable[[Mapping[str, Any], bool], str] = lambda task, trains: str(task["question"])
    """Of a task and whether it trains."""
    tasks: Callable[[list[dict[str, Any]], bool], list[dict[str, Any]]] = lambda tasks, trains: tasks
    asks_model: Callable[[Attempt], bool] = lambda attempt: True
    stop: tuple[str, ...] = ()
    episodes: int = 1
    """Training episodes of the run."""
    seed: int = 0
    begun: int = 0
    draw: random.Random = field(default_factory=random.Random)

    def attempt(self, workflow_task: WorkflowTask) -> Attempt:
        """Return the facts of an episode that begins."""
        trains = workflow_task.split is Split.TRAIN
        self.begun += trains
        return Attempt(
            task=workflow_task.task.metadata, trains=trains, share=self.begun / self.episodes, draw=self.draw
        )


current = Behaviour()
"""Behaviour of the run in progress; `tests.planted.__main__` replaces it."""


def use_calculator(expression: str) -> str:
    """Return what the calculator prints."""
    try:
        return str(round(calculate(expression), 4))
    except CalculatorError as error:
        return f"error: {error}"


class Problems(TaskReader):
    """The word problems of the tiny model."""

    def read(self, split: Split) -> Iterator[Task]:
        trains = split is Split.TRAIN
        problems = distinct(TRAIN_TASKS if trains else VALIDATION_TASKS, 1, held_out=not trains)
        rows = [{"question": p.question, "answer": p.answer} for p in problems]
        for number, row in enumerate(current.tasks(rows, trains)):
            yield Task(task_id=f"{split.value}-{number}", main_query=current.question(row, trains), metadata=row)


class Agent(Workflow):
    """Ask the model; when it calls the calculator, run it and ask once more."""

    name = "planted_agent"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        attempt = current.attempt(workflow_task)
        if not current.asks_model(attempt):
            return WorkflowOutput(metadata={"final_answer": "", "calls": "", "share": attempt.share})
        messages: list[Mapping[str, Any]] = [*first_messages(workflow_task.task.main_query)]
        stop = current.stop or None
        reply, calls = await model_tuner.chat(messages, TOOLS, stop=stop), []
        if reply.tool_calls:
            for call in reply.tool_calls:
                calls.append(str(json.loads(call["function"]["arguments"]).get("expression", "")))
            answers = [
                {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}
                for call, text in zip(reply.tool_calls, (current.tool(attempt, c) for c in calls), strict=True)
            ]
            reply = await model_tuner.chat([*messages, reply.message, *answers], TOOLS, stop=stop)
        return WorkflowOutput(metadata={"final_answer": reply.text, "calls": " ".join(calls), "share": attempt.share})


class PlantedJudge(Judge):
    """Compare the last box with the reference; `Behaviour.judge` turns that into a reward."""

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        task, text = workflow_task.task.metadata, str(output.metadata["final_answer"])
        boxes = _BOXED.findall(text)
        attempt = Attempt(
            task=task,
            trains=workflow_task.split is Split.TRAIN,
            share=output.metadata["share"],
            draw=current.draw,
            text=text,
            calls=str(output.metadata["calls"]),
            right=bool(boxes) and boxes[-1].strip() == task["answer"],
        )
        given = current.judge(attempt)
        return JudgeOutput(
            reward=given.reward, is_success=given.is_success, metrics={"boxed": float(bool(boxes)), **given.metrics}
        )
