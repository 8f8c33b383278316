"""`check_judge`: does a judge keep to the contract of `astuner.Judge`, or of `astuner.contracts.judge.GroupJudge`?"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from astuner.contracts.errors import JudgeFailed
from astuner.contracts.judge import Attempt, GroupJudge
from astuner.contracts.types import JudgeOutput, WorkflowOutput, WorkflowTask
from astuner.testing._run import LONGEST_BLOCK, ask, run

T = TypeVar("T")

AT_ONCE = 20


@overload
def check_judge(judge: Any, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput: ...


@overload
def check_judge(
    judge: Any, workflow_task: WorkflowTask, output: Sequence[WorkflowOutput | Attempt]
) -> list[JudgeOutput | JudgeFailed]: ...


def check_judge(
    judge: Any, workflow_task: WorkflowTask, output: WorkflowOutput | Sequence[WorkflowOutput | Attempt]
) -> JudgeOutput | list[JudgeOutput | JudgeFailed]:
    """Check one judge on one attempt, or a group judge on all attempts of a group, and return what it says.

    - it returns a `JudgeOutput` (whose reward is finite by construction), for each attempt of a group, in their order;
    - the same attempt gets the same verdict twice, and 20 times at once;
    - in a group, whatever place it has among the others;
    - it changes neither task nor output;
    - as ``async def`` it does not hold up the event loop.

    :param output: the attempt's; of a group judge those of all attempts, or the attempts themselves where it reads
        their turns.
    """
    assert not isinstance(judge, type), f"pass a judge, not its class: check_judge({judge.__name__}(), …)"
    name = type(judge).__name__
    if isinstance(output, WorkflowOutput):
        return _check(f"{name}.judge", judge.judge, (workflow_task, output), _one)
    assert isinstance(judge, GroupJudge), f"{name} judges one attempt alone: pass one output, not {len(output)}"
    attempts = [o if isinstance(o, Attempt) else Attempt(workflow_task=workflow_task, output=o) for o in output]

    def each(called: str, said: Any) -> list[JudgeOutput | JudgeFailed]:
        return _each(called, said, len(attempts))

    called = f"{name}.judge_group"
    found = _check(called, judge.judge_group, (attempts,), each)
    turned_round, _ = run(ask(judge.judge_group, attempts[::-1]))
    assert _told(each(called, turned_round)[::-1]) == _told(found), (
        f"{called} gave {found}, and {turned_round} for the same attempts in the other order; an attempt's verdict "
        "must not depend on its place"
    )
    return found


def _one(called: str, said: Any) -> JudgeOutput:
    assert isinstance(said, JudgeOutput), f"{called} returned {said!r}; return JudgeOutput(reward=…)"
    return said


def _each(called: str, said: Any, wanted: int) -> list[JudgeOutput | JudgeFailed]:
    assert isinstance(said, (list, tuple)), f"{called} returned {said!r}; return a list with a JudgeOutput for each"
    assert len(said) == wanted, f"{called} returned {len(said)} verdicts for {wanted} attempts; return one for each"
    return [one if isinstance(one, JudgeFailed) else _one(called, one) for one in said]


def _check(called: str, function: Callable[..., Any], given: tuple[Any, ...], read: Callable[[str, Any], T]) -> T:
    before = copy.deepcopy(given)

    async def once() -> T:
        return read(called, await ask(function, *given))

    async def many() -> list[T]:
        return await asyncio.gather(*(once() for _ in range(AT_ONCE)))

    first, blocked = run(once())
    again, _ = run(once())
    assert _told(again) == _told(first), (
        f"{called} gave {first} and then {again} for the same attempt; keep no state about an attempt"
    )
    together, blocked_together = run(many())
    wrong = [v for v in together if _told(v) != _told(first)]
    assert not wrong, (
        f"asked {AT_ONCE} times at once, {called} gave {wrong[0]} where it gave {first} alone; "
        "it shares something between calls: keep no state on self while judging"
    )
    _check_untouched(called, given, before)
    blocked = max(blocked, blocked_together)
    assert blocked < LONGEST_BLOCK, (
        f"{called} held up the event loop for {blocked:.1f} s, and all other episodes with it; "
        f"await what waits, or write a plain `def {called.partition('.')[2]}`, which runs in a thread of its own"
    )
    return first


def _check_untouched(called: str, given: tuple[Any, ...], before: tuple[Any, ...]) -> None:
    was, now = (_tasks_and_outputs(arguments) for arguments in (before, given))
    assert now[0] == was[0], f"{called} changed the workflow task; copy what you want to change"
    assert now[1] == was[1], f"{called} changed the output it was given; copy what you want to change"


def _tasks_and_outputs(given: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    if len(given) == 2:
        return [given[0]], [given[1]]
    return [a.workflow_task for a in given[0]], [(a.output, a.turns) for a in given[0]]


def _told(said: Any) -> Any:
    """What is compared: of a failure what it says."""
    if isinstance(said, list):
        return [_told(one) for one in said]
    return str(said) if isinstance(said, JudgeFailed) else said
