"""Countdown: a player who has three tries at a target and is told what each is worth, and the judge of the last one."""

import ast
import operator
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from astuner import Judge, JudgeOutput, ModelTuner, Workflow, WorkflowOutput, WorkflowTask

SYSTEM = "Make the target with + - * / and ( ), of the numbers, each at most once."
TRIES = 3
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def told(said: str, numbers: Sequence[int]) -> str:
    """Return the feedback for a try: its exact value, or its error. The text is parsed, never executed."""
    used: list[int] = []

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant):
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and (apply := OPERATORS.get(type(node.op))):
            return apply(value(node.left), value(node.right))
        raise SyntaxError

    try:
        if not re.fullmatch(r"[0-9+*/() -]{1,40}", said):  # so short that no nesting is too deep for the parser
            raise SyntaxError
        found = value(ast.parse(said.strip(), mode="eval").body)
    except SyntaxError:
        return "That is no expression."
    except ZeroDivisionError:
        return "That divides by zero."
    return "Use the numbers, each at most once." if Counter(used) - Counter(numbers) else f"That is {found}."


class Player(Workflow):
    """One episode: tries, until one is right or none is left."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        row = workflow_task.task.metadata
        seen = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": workflow_task.task.main_query}]
        for _ in range(TRIES):
            said = (await model_tuner.chat(seen)).text
            answer = told(said, row["numbers"])
            if answer == f"That is {row['target']}.":
                break
            seen += [{"role": "assistant", "content": said}, {"role": "user", "content": answer}]
        return WorkflowOutput(response=said)


class Reached(Judge):
    """1 where the last try is worth the target, else 0."""

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        row = workflow_task.task.metadata
        return JudgeOutput(reward=float(told(output.response, row["numbers"]) == f"That is {row['target']}."))
