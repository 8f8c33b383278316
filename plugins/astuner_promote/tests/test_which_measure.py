"""What the gate compares: success, or the reward if success is constant; and success beside the reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from astuner import Group
from astuner.contracts.statistics import percent
from astuner.contracts.types import Episode, JudgeOutput, Split, StopReason, Task, WorkflowTask
from astuner_promote.gate import Comparison, compare
from tests.table import table


def groups(rewards: Sequence[float], success: Sequence[bool | None] | None = None) -> list[Group]:
    """One scored episode for each task."""
    made = []
    for n, reward in enumerate(rewards):
        stated = None if success is None else success[n]
        task = Task(task_id=f"t{n}", main_query="?")
        of = WorkflowTask(task=task, episode_id=f"v{n}-0", group_id=f"v{n}", split=Split.VALIDATION)
        verdict = JudgeOutput(reward=reward, is_success=stated)
        episode = Episode(
            workflow_task=of, turns=(), output=None, verdict=verdict, reward_source="judge",
            stop_reason=StopReason.COMPLETED,
        )  # fmt: skip
        made.append(Group(group_id=f"v{n}", task=task, episodes=(episode,)))
    return made


def right(passed: int, of: int = 38, *, yes: float = 1.0, no: float = 0.0) -> list[float]:
    return [yes if n < passed else no for n in range(of)]


def compared(a: list[Group], b: list[Group], **options: Any) -> Comparison:
    return compare("e.yaml", a, b, **{"by": None, "bound": 0.0, "proven": True, **options})


STEPS = [n / 50 for n in range(38)]
DEFAULT: list[tuple[str, list[float], list[float], str, bool]] = [
    # what the rewards are, of what serves, of the candidate, what is compared, whether it is let through
    ("0 and 1", right(7), right(30), "success", True),
    ("0 and 1, fewer", right(30), right(7), "success", False),
    ("a correct judge times 0.9", right(7, yes=0.9), right(30, yes=0.9), "reward", True),
    ("grades of 1 to 5", right(7, yes=5, no=1), right(30, yes=5, no=2), "reward", True),
    ("5 and 100", right(7, yes=100, no=5), right(30, yes=100, no=5), "reward", True),
    ("-1 and 1", right(7, no=-1), right(30, no=-1), "success", True),
    ("penalties", [-1 - s for s in STEPS], [-s for s in STEPS], "reward", True),
    ("shares of which 3 reach 1", STEPS, [*STEPS[:20], *([0.95] * 15), *([1.0] * 3)], "reward", True),
    ("a share that falls", [0.5 + s / 2 for s in STEPS], STEPS, "reward", False),
    ("a share that stays", STEPS, STEPS, "reward", False),
    ("success with a bonus", right(7, no=0.1), [r + 0.05 for r in right(30)], "success", True),
    ("a huge variance", right(4, yes=1e8), right(5, yes=1e8, no=1e-3), "success", False),
    ("all solved", right(38), right(38), "success", False),
]  # fmt: skip


@table("what, serving, candidate, by, passes", DEFAULT)
def test_what_is_compared_unless_it_is_asked_for(
    what: str, serving: list[float], candidate: list[float], by: str, passes: bool
) -> None:
    found = compared(groups(serving), groups(candidate))
    assert (found.by, not found.reason) == (by, passes), (what, found)
    assert (found.success is None, not found.note) == (by == "success", by == "success")
    assert "38 tasks" in str(found)
    assert ("is_success" in found.note) == (by == "reward")


def test_a_margin_of_success_is_no_margin_of_the_reward() -> None:
    serving, candidate = groups(right(7, yes=0.9)), groups(right(30, yes=0.9))
    assert "--by reward" in compared(serving, candidate, bound=0.05).reason
    assert not compared(serving, candidate, bound=0.05, by="reward").reason


def test_success_that_was_asked_for_and_says_nothing_is_refused_with_what_does() -> None:
    found = compared(groups(right(7, yes=0.9)), groups(right(30, yes=0.9)), by="success")
    assert found.by == "success"
    assert "--by reward" in found.reason
    assert "is_success" in found.reason


SUCCESS = [n < 7 for n in range(38)]
FELL: list[tuple[str, list[bool | None], list[bool | None], float, bool]] = [
    # success of what serves, of the candidate, by how much it may fall, whether it is let through
    ("18.4 % to 0 %", [*SUCCESS], [False] * 38, 0.05, False),
    ("to 0 %, and allowed", [*SUCCESS], [False] * 38, 1.0, True),
    ("half of it", [n < 20 for n in range(38)], [n < 10 for n in range(38)], 0.05, False),
    ("two of 38", [*SUCCESS], [n < 5 for n in range(38)], 0.05, False),
    ("one of 38", [*SUCCESS], [n < 6 for n in range(38)], 0.05, True),
    ("one of 38, and nothing may fall", [*SUCCESS], [n < 6 for n in range(38)], 0.0, False),
    ("as many others", [*SUCCESS], [n >= 31 for n in range(38)], 0.05, True),
    ("it rose", [*SUCCESS], [n < 9 for n in range(38)], 0.0, True),
    ("constant", [False] * 38, [False] * 38, 0.0, True),
]


@table("what, serving, candidate, may_fall, passes", FELL)
def test_a_reward_does_not_rise_at_the_cost_of_success_without_a_word(
    what: str, serving: list[bool | None], candidate: list[bool | None], may_fall: float, passes: bool
) -> None:
    before, after = groups([0.1] * 38, serving), groups([0.9] * 38, candidate)
    found = compared(before, after, by="reward", may_fall=may_fall)
    assert (not found.reason) == passes, (what, found)
    assert found.success is not None
    assert f"{percent(found.success.before, 1)} to {percent(found.success.after, 1)}" in str(found)
    assert found.success_fell == (found.success.mean < 0) == ("fell" in str(found))
    assert passes or "--allow-lower-success" in found.reason
    assert found.success.tasks == found.tasks == 38


def test_success_that_others_define_by_a_reward_of_1_counts_too() -> None:
    serving, candidate = right(7, no=0.1), [0.9] * 38
    assert "--allow-lower-success" in compared(groups(serving), groups(candidate), by="reward").reason
