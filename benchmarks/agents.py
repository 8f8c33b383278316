"""Tasks and agents of the benchmarks: word problems, and a calculator as a tool.

`CalculatorLoop` is a plain loop, comparable with what TRL runs. The AgentScope agent of the example is measured too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from astuner import Task, TaskReader, Workflow, WorkflowOutput, WorkflowTask
from astuner.contracts.types import Split
from astuner.rollout.model_tuner import ModelTuner
from astuner_local.tiny.problems import distinct
from astuner_local.tiny.transcripts import TOOLS, first_messages
from astuner_math.calculator import CalculatorError, calculate

TASKS = 1000
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def problems(count: int = TASKS) -> list[tuple[str, str]]:
    """Return (question, answer) of training problems; the same at every call."""
    return [(p.question, p.answer) for p in distinct(count, 1, held_out=False)]


def reward(text: str, answer: str) -> float:
    """Return 1 if the last box of ``text`` is exactly ``answer``, else 0; both sides use this comparison."""
    boxes = _BOXED.findall(text)
    return float(bool(boxes) and boxes[-1].strip() == answer)


def use_calculator(expression: str) -> str:
    """Return the calculator's output."""
    try:
        return str(round(calculate(expression), 4))
    except CalculatorError as error:
        return f"error: {error}"


class Problems(TaskReader):
    """Task reader of the problems; it has training tasks only."""

    def read(self, split: Split) -> Iterator[Task]:
        for number, (question, answer) in enumerate(problems() if split is Split.TRAIN else ()):
            yield Task(task_id=str(number), main_query=question, metadata={"answer": answer})


class CalculatorLoop(Workflow):
    """Agent loop without a framework: ask, run the calculator if the model calls it, and ask again."""

    name = "calculator_loop"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        messages: list[Mapping[str, Any]] = [*first_messages(workflow_task.task.main_query)]
        reply = await model_tuner.chat(messages, TOOLS)
        if reply.tool_calls:
            messages = [*messages, reply.message, *(_answered(call) for call in reply.tool_calls)]
            reply = await model_tuner.chat(messages, TOOLS)
        return WorkflowOutput(reward=reward(reply.text, workflow_task.task.metadata["answer"]))


def _answered(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    expression = json.loads(function["arguments"]).get("expression", "")
    return {
        "role": "tool",
        "tool_call_id": call["id"],
        "name": function["name"],
        "content": use_calculator(str(expression)),
    }


class OneTurn(Workflow):
    """Agent with one question and one answer; the reward is the number of digits, which varies without training."""

    name = "one_turn"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        reply = await model_tuner.chat(first_messages(workflow_task.task.main_query))
        return WorkflowOutput(reward=digits(reply.text))


def digits(text: str) -> float:
    return float(sum(c.isdigit() for c in text))
