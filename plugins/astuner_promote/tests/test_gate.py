"""The rule of the gate, and who is asked what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astuner import Group
from astuner.contracts.errors import ConfigError, PluginError
from astuner.contracts.types import (
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    SamplingParams,
    Split,
    StopReason,
    Task,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)
from astuner.testing import fake_config
from astuner_promote.gate import AskedJudge, Comparison, Seeded, checked_by, compare, find_check
from tests.table import table


def episode(number: int, reward: float | None, text: str = "four", **turn: Any) -> Episode:
    task = Task(task_id=f"t{number}", main_query="?", metadata={"answer": "4"})
    finish = turn.pop("finish", FinishReason.STOP)
    said = Turn(
        index=0,
        agent="default",
        generation=Generation(prompt_ids=[1], response_ids=[2], logprobs=[0.0], finish_reason=finish, policy_version=0),
        continues=None,
        message={"role": "assistant", "content": text},
        **turn,
    )
    return Episode(
        workflow_task=WorkflowTask(task=task, episode_id=f"v{number}-0", group_id=f"v{number}", split=Split.VALIDATION),
        turns=(said,),
        output=WorkflowOutput(metadata={"final_answer": text}),
        verdict=None if reward is None else JudgeOutput(reward=reward),
        stop_reason=StopReason.WORKFLOW_FAILED if reward is None else StopReason.COMPLETED,
    )


def groups(*tasks: Sequence[float | None]) -> list[Group]:
    """Rewards of the episodes of each task."""
    made = [tuple(episode(n, reward) for reward in rewards) for n, rewards in enumerate(tasks)]
    return [Group(group_id=f"v{n}", task=e[0].workflow_task.task, episodes=e) for n, e in enumerate(made)]


def successes(passed: int, of: int) -> list[Group]:
    return groups(*([1.0] if n < passed else [0.0] for n in range(of)))


def compared(a: list[Group], b: list[Group], **options: Any) -> Comparison:
    return compare("e.yaml", a, b, **{"by": "success", "bound": 0.0, "proven": True, **options})


def test_a_candidate_is_better_when_the_interval_says_so() -> None:
    found = compared(successes(10, 60), successes(30, 60))
    assert (found.tasks, found.serving, found.candidate) == (60, 10 / 60, 0.5)
    assert 0 < found.interval.low < found.difference < found.interval.high
    assert found.reason == ""
    assert "must be above 0.3 (--margin)" in compared(successes(10, 60), successes(30, 60), bound=0.3).reason


def test_a_difference_that_tasks_do_not_suffice_for_says_how_many_would() -> None:
    reason = compared(successes(10, 60), successes(13, 60)).reason
    assert "the interval must be above 0 (--margin); with this difference, about " in reason
    assert int(reason.rpartition("about ")[2].split()[0].replace(",", "")) > 60
    worse = compared(successes(13, 60), successes(10, 60)).reason
    assert "(--margin)" in worse
    assert "about" not in worse, "more tasks would not help it"


def test_few_tasks_that_all_agree_are_not_enough_for_the_test() -> None:
    five = groups(*[[0.0, 0.5]] * 5, *[[0.0, 0.0]] * 3)  # a bootstrap of 5 that gain has an interval above 0 ...
    nothing = groups(*[[0.0, 0.0]] * 8)
    found = compared(nothing, five, by="reward")
    assert found.interval.low > 0
    assert found.p == 0.0625
    assert "p must be at most 0.05" in found.reason
    assert compared(nothing, groups(*[[0.0, 0.5]] * 6, *[[0.0, 0.0]] * 2), by="reward").reason == ""


def test_no_regression_is_shown_and_not_assumed() -> None:
    same = successes(50, 100)
    assert compared(same, same, bound=-0.05, proven=False).reason == ""
    assert "(--tolerance 0.05)" in compared(successes(50, 100), successes(45, 100), bound=-0.05, proven=False).reason
    few = compared(successes(8, 8), successes(8, 8), bound=-0.05, proven=False)
    assert few.difference == 0
    assert "about " in few.reason, "eight tasks cannot rule five points out"


def test_a_task_that_one_side_has_no_score_of_is_in_neither() -> None:
    a = groups(*[[0.0]] * 10, [None])
    b = groups([None], *[[1.0]] * 10)
    found = compared(a, b)
    assert (found.tasks, found.left_out, found.failed_serving, found.failed_candidate) == (9, 2, 1, 1)
    assert found.reason == ""
    worse = groups([None], [None], *[[1.0]] * 9)
    assert "candidate (2) than with the serving model (1)" in compared(a, worse).reason
    nearly = groups(*[[1.0]] * 5, *[[None]] * 6)
    assert "only 5 tasks have scored episodes of both models; 6 are required" in compared(nearly, nearly).reason


def test_episodes_of_a_task_are_one_number() -> None:
    found = compared(groups(*[[0.0, 1.0]] * 8), groups(*[[1.0, 1.0]] * 8))
    assert (found.serving, found.candidate, found.p) == (0.5, 1.0, 2 / 2**8)


def test_checks_see_what_was_offered_and_how_a_reply_ended(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def offered(view):\n    return f'offered: {len(view.tools)} {view.cut_off}' if view.tools else None\n"
        "def broken(view):\n    raise ValueError('no')\n"
    )
    config = fake_config(tmp_path)
    tools = ({"type": "function", "function": {"name": "f"}},)
    first = episode(1, 1.0, tools=tools).turns[0]
    ended = replace(first.generation, finish_reason=FinishReason.LENGTH)
    cut = replace(first, index=1, continues=0, tools=(), generation=ended)
    both = replace(episode(1, 1.0), turns=(replace(first, tools=()), replace(cut, continues=None, tools=tools)))
    found = checked_by("m", find_check(config, "mine.py->offered"), [both, episode(2, 1.0)], 0.0)
    assert (found.complaints, found.episodes, found.first) == (1, 2, "v1-0, turn 1: offered: 1 True")
    assert found.reason == (
        "--check m: failed 1 of 2 episodes, allowed: 0. First failure: v1-0, turn 1: offered: 1 True"
    )
    inherited = checked_by("m", find_check(config, "mine.py->offered"), [replace(both, turns=(first, cut))], 0.0)
    assert inherited.first.endswith("turn 0: offered: 1 False")
    later = replace(both, turns=(replace(first, tools=()), cut))
    assert not checked_by("m", find_check(config, "mine.py->offered"), [later], 0.0).complaints
    assert checked_by("m", find_check(config, "mine.py->offered"), [both, episode(2, 1.0)], 0.5).reason == ""
    with pytest.raises(PluginError, match=r"--check m raised ValueError .*: no"):
        checked_by("m", find_check(config, "mine.py->broken"), [both], 0.0)


def test_a_judge_is_a_check_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from astuner import Judge, JudgeOutput\n"
        "class Polite(Judge):\n"
        "    def judge(self, workflow_task, workflow_output):\n"
        "        return JudgeOutput(reward=float('please' in workflow_output.metadata['final_answer']))\n"
    )
    found = find_check(fake_config(tmp_path), "mine.py->Polite")
    assert isinstance(found, AskedJudge)
    asked = checked_by("polite", found, [episode(1, 0.0, "please"), episode(2, 1.0, "no")], 0.0)
    assert (asked.complaints, asked.first) == (1, "v2-0: reward 0")


@table(("name", "says"), [("nonsens", "nonsens"), ("mine.py->gone", "mine.py")])
def test_a_check_that_is_not_there_is_named(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, PluginError), match=says):
        find_check(fake_config(tmp_path), name)


async def _asked(sessions: Sequence[str]) -> list[int | None]:
    seen: list[int | None] = []

    class Engine:
        max_model_len = 10

        async def generate(self, prompt_ids: Any, sampling: SamplingParams, *, session: str = "") -> None:
            seen.append(sampling.seed)

    seeded = Seeded(Engine(), 7)  # type: ignore[arg-type]
    for session in sessions:
        await seeded.generate([1], SamplingParams(max_tokens=1), session=session)
    return seen


def test_both_models_draw_with_the_same_seeds_whatever_runs_first() -> None:
    import asyncio

    one, other, again = asyncio.run(_asked(["a", "b", "a"]))
    assert len({one, other, again}) == 3
    assert asyncio.run(_asked(["b", "a", "a"])) == [other, one, again]
