"""`check_judge`: does a judge keep to the contract of `astuner.Judge`?"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from astuner.testing._run import LONGEST_BLOCK, ask, run
from astuner.types import JudgeOutput, WorkflowOutput, WorkflowTask

AT_ONCE = 20


def check_judge(judge: Any, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
    """Check one judge on one attempt, and return its verdict.

    - it returns a `JudgeOutput` (whose reward is finite by construction);
    - the same attempt gets the same verdict twice, and 20 times at once;
    - it changes neither task nor output;
    - as ``async def`` it does not hold up the event loop.
    """
    assert not isinstance(judge, type), f"pass a judge, not its class: check_judge({judge.__name__}(), …)"
    name = type(judge).__name__
    task_before, output_before = copy.deepcopy(workflow_task), copy.deepcopy(output)

    async def once() -> Any:
        return await ask(judge.judge, workflow_task, output)

    async def many() -> list[Any]:
        return await asyncio.gather(*(once() for _ in range(AT_ONCE)))

    first, blocked = run(once())
    assert isinstance(first, JudgeOutput), f"{name}.judge returned {first!r}; return JudgeOutput(reward=…)"
    again, _ = run(once())
    assert again == first, (
        f"{name}.judge gave {first} and then {again} for the same attempt; keep no state about an attempt"
    )
    together, blocked_together = run(many())
    wrong = [v for v in together if v != first]
    assert not wrong, (
        f"asked {AT_ONCE} times at once, {name}.judge gave {wrong[0]} where it gave {first} alone; "
        "it shares something between calls: keep no state on self while judging"
    )
    assert workflow_task == task_before, f"{name}.judge changed the workflow task; copy what you want to change"
    assert output == output_before, f"{name}.judge changed the output it was given; copy what you want to change"
    blocked = max(blocked, blocked_together)
    assert blocked < LONGEST_BLOCK, (
        f"{name}.judge held up the event loop for {blocked:.1f} s, and all other episodes with it; "
        "await what waits, or write a plain `def judge`, which runs in a thread of its own"
    )
    return first
