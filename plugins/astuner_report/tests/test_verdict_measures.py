"""The verdict on a run whose rewards are not 0 or 1: by which measure, and that no advice is false."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from astuner import RunDir
from astuner.contracts.types import counts_as_success
from astuner.contracts.validation import TaskResult
from astuner.support.json_lines import write_jsonl
from astuner_report.run_report import write_report
from astuner_report.run_report.facts import gather
from tests.table import table

Facts = Mapping[str, Any]
TASKS = 64
RANDOM = random.Random(7)
NOISE = [RANDOM.random() for _ in range(TASKS)]
RIGHT = [n < 20 for n in range(TASKS)]
BETTER = [n < 50 for n in range(TASKS)]
SETTINGS = {"astuner": {"trainer_common": {"optim": {"lr": 0.001}}}}
LONGER = "Train longer"


def graded(right: Sequence[bool], yes: float, no: float) -> list[float]:
    return [yes if each else no for each in right]


def ladder(low: float, high: float) -> list[float]:
    """Rewards between the two, another for each task."""
    return [low + (high - low) * noise for noise in NOISE]


def result(rewards: Sequence[float], stated: Sequence[bool] | None = None) -> TaskResult:
    successes = sum(map(counts_as_success, rewards)) if stated is None else sum(stated)
    return TaskResult(successes, len(rewards), 0 if stated is None else len(stated), sum(rewards) / len(rewards))


def a_run(folder: Path, before: Sequence[TaskResult], after: Sequence[TaskResult], *, tasks: bool = True) -> RunDir:
    run_dir = RunDir(folder / "run")
    run_dir.start()
    run_dir.resolved.write_text(yaml.safe_dump(SETTINGS))
    rows: list[dict[str, Any]] = []
    for step, results in ((0, before), (9, after)):
        success = sum(r.success for r in results) / len(results)
        reward = sum(r.reward for r in results) / len(results)
        ci = {"val/success_ci_low": 0.0, "val/success_ci_high": 1.0}
        counts = {"val/tasks": float(len(results)), "val/unscored_tasks": 0.0, "val/failed_episodes": 0.0}
        rows.append({"step": step, "time": 0.0, "val/success": success, "val/reward/mean": reward, **ci, **counts})
        if tasks:
            run_dir.write_task_results(step, {f"t{n}": each for n, each in enumerate(results)})
    rows.insert(1, {"step": 9, "time": 1.0, "reward/mean": 0.5, "tokens/generated": 9.0, "tokens/trained": 9.0})
    write_jsonl(run_dir.metrics, rows)
    run_dir.tasks.write_text('{"overlap": {"tasks": 0}}')
    return run_dir


def said(folder: Path, *rewards: Sequence[float], stated: Sequence[Sequence[bool] | None] = (None, None)) -> Facts:
    """:param rewards: before and after; ``stated`` likewise."""
    before, after = (
        [result([r], None if success is None else [success[n]]) for n, r in enumerate(of)]
        for of, success in zip(rewards, stated, strict=True)
    )
    return write_report(a_run(folder, before, after))


MEMBERS: list[tuple[str, list[float], list[float], str, str]] = [
    # what the rewards are, before, after, the verdict, by which measure
    ("a correct judge times 0.9", graded(RIGHT, 0.9, 0), graded(BETTER, 0.9, 0), "learned", "reward"),
    ("grades of 1 to 5", graded(RIGHT, 4, 1), graded(BETTER, 5, 2), "learned", "reward"),
    ("5 and 100", graded(RIGHT, 100, 5), graded(BETTER, 100, 5), "learned", "reward"),
    ("a judge divided by 10", ladder(0.01, 0.03), ladder(0.05, 0.1), "learned", "reward"),
    ("percent", ladder(10, 40), ladder(60, 90), "learned", "reward"),
    ("negative distances", ladder(-90, -60), ladder(-30, -5), "learned", "reward"),
    ("penalties only", graded(RIGHT, 0, -1), graded(BETTER, 0, -1), "learned", "reward"),
    ("log likelihoods", ladder(-9.5, -7), ladder(-4, -2), "learned", "reward"),
    ("shares that never reach 1", ladder(0.1, 0.5), ladder(0.4, 0.9), "learned", "reward"),
    ("shares of which 2 reach 1", ladder(0.1, 0.5), [*ladder(0.4, 0.9)[2:], 1.0, 1.0], "learned", "reward"),
    ("grades that 2 do not pass", [0.5, 0.5, *ladder(1, 2)[2:]], ladder(2, 4), "learned", "reward"),
    ("very large", ladder(1e8, 4e8), ladder(5e8, 9e8), "learned", "reward"),
    ("very small", ladder(1e-7, 2e-7), ladder(3e-7, 4e-7), "learned", "reward"),
    ("a reward that falls", ladder(0.4, 0.9), ladder(0.1, 0.5), "got worse", "reward"),
    ("grades that fall", ladder(3, 5), ladder(1, 2), "got worse", "reward"),
    ("a huge variance", ladder(2, 1e6), ladder(2, 1.01e6)[::-1], "may be chance", "reward"),
    ("a reward that hardly moves", NOISE, [*NOISE[1:], NOISE[0] - 0.01], "may be chance", "reward"),
    ("unchanged grades", ladder(2, 4), ladder(2, 4), "nothing was learned", "reward"),
    ("unchanged shares", ladder(0.1, 0.9), ladder(0.1, 0.9), "nothing was learned", "reward"),
    ("all equal", [0.5] * TASKS, [0.5] * TASKS, "nothing was learned", "success"),
    ("0 and 1", graded(RIGHT, 1, 0), graded(BETTER, 1, 0), "learned", "success"),
    ("0 and 1, unchanged", graded(RIGHT, 1, 0), graded(RIGHT, 1, 0), "nothing was learned", "success"),
    ("-1 and 1", graded(RIGHT, 1, -1), graded(BETTER, 1, -1), "learned", "success"),
    ("success with a bonus", [r + n / 10 for r, n in zip(RIGHT, NOISE, strict=True)],
     [r + n / 10 for r, n in zip(BETTER, NOISE, strict=True)], "learned", "success"),
    ("only the bonus rises", [r + n / 10 for r, n in zip(RIGHT, NOISE, strict=True)],
     [r + 0.2 + n / 10 for r, n in zip(RIGHT, NOISE, strict=True)], "reward rose", "success"),
    ("only the bonus falls", [r + 0.2 + n / 10 for r, n in zip(RIGHT, NOISE, strict=True)],
     [r + n / 10 for r, n in zip(RIGHT, NOISE, strict=True)], "reward fell", "success"),
]  # fmt: skip


@table("what, before, after, word, by", MEMBERS)
def test_a_reward_that_never_says_success_is_judged_by_itself(
    tmp_path: Path, what: str, before: list[float], after: list[float], word: str, by: str
) -> None:
    facts = said(tmp_path, before, after)
    verdict, difference = facts["verdict"], facts["held_out"]["difference"]
    assert (verdict["word"], difference["measure"]) == (word, by), (what, verdict["text"])
    assert re.match(r"[A-Z][a-z ]+: ", verdict["text"])
    assert f"{TASKS} " in verdict["text"]
    assert (LONGER in verdict["text"]) == (before == after)
    assert ("is_success" in verdict["text"]) == (by == "reward")
    assert difference["reward"]["tasks"] == difference["tasks"] == TASKS
    page = RunDir(tmp_path / "run").report_md.read_text()
    assert ("The rewards are compared" in page) == (by == "reward")


STATED: list[tuple[str, list[bool], list[bool], str, str]] = [
    # success before, after, the verdict, its level, where the reward rises for every task
    ("constant 0", [False] * TASKS, [False] * TASKS, "reward rose", "warning"),
    ("constant 1", [True] * TASKS, [True] * TASKS, "learned", "good"),
    ("the same tasks", RIGHT, RIGHT, "reward rose", "warning"),
    ("it rises too", RIGHT, BETTER, "learned", "good"),
    ("it falls", BETTER, RIGHT, "got worse", "error"),
    ("three more", RIGHT, [n < 23 for n in range(TASKS)], "reward rose", "warning"),
    ("three of none", [False] * TASKS, [n < 3 for n in range(TASKS)], "reward rose", "warning"),
    ("six of none", [False] * TASKS, [n < 6 for n in range(TASKS)], "learned", "good"),
]


@table("what, before, after, word, level", STATED)
def test_success_that_a_judge_states_is_not_overruled_by_its_reward(
    tmp_path: Path, what: str, before: list[bool], after: list[bool], word: str, level: str
) -> None:
    facts = said(tmp_path, ladder(0.1, 0.4), ladder(0.5, 0.9), stated=(before, after))
    verdict = facts["verdict"]
    assert (verdict["word"], verdict["level"]) == (word, level), (what, verdict["text"])
    assert facts["held_out"]["difference"]["success_stated"]
    assert LONGER not in verdict["text"]
    assert "to define it" not in verdict["text"], "it is defined"
    assert word == "learned" or "reward 0." in verdict["text"]


def test_several_attempts_at_a_task_are_one_pair(tmp_path: Path) -> None:
    before = [result([noise, noise / 2]) for noise in NOISE]
    after = [result([noise + 0.01, noise]) for noise in NOISE]
    facts = gather(a_run(tmp_path, before, after))
    assert facts["verdict"]["word"] == "learned"
    assert facts["held_out"]["difference"]["reward"]["tasks"] == TASKS


def test_the_verdict_is_of_the_tasks_that_both_scored_and_says_how_many(tmp_path: Path) -> None:
    """The hard tasks failed at the end: success rose from 33 % to 100 %, and not for any task."""
    run_dir = a_run(tmp_path, [result([float(n < 20)]) for n in range(60)], [result([1.0])] * 20)
    facts = gather(run_dir)
    assert facts["verdict"]["text"].startswith("No change: +0.0 points, p = 1 (held-out success 100.0 % to 100.0 %, 20")
    assert facts["held_out"]["best"]["compared"] is not None


def test_without_results_of_tasks_a_reward_that_moved_is_not_tested(tmp_path: Path) -> None:
    """As a folder of an older run whose conversations were deleted."""
    before, after = ([result([r]) for r in ladder(*ends)] for ends in ((0.1, 0.3), (0.5, 0.9)))
    verdict = gather(a_run(tmp_path, before, after, tasks=False))["verdict"]
    assert verdict["word"] == "not measured"
    assert "reward went from" in verdict["text"]
    assert LONGER not in verdict["text"]


def test_few_tasks_cannot_tell_by_the_reward_either(tmp_path: Path) -> None:
    verdict = said(tmp_path, [0.1, 0.2, 0.3], [0.5, 0.6, 0.7])["verdict"]
    assert verdict["word"] == "may be chance"
    assert "Too few tasks" in verdict["text"]


@table(
    ("same", "after", "word"),
    [
        (1.0, BETTER, "one answer for all"),
        (0.9, BETTER, "one answer for all"),
        (0.89, BETTER, "learned"),
        (None, BETTER, "learned"),  # an older run
        (1.0, [n < 60 for n in range(TASKS)], "learned"),  # the tasks have one answer
        (1.0, RIGHT, "nothing was learned"),
        (1.0, [False] * TASKS, "got worse"),
    ],
)
def test_success_that_one_answer_for_all_tasks_has_is_not_called_learned(
    same: float | None, after: Sequence[bool], word: str, tmp_path: Path
) -> None:
    before, later = ([result([float(each)]) for each in right] for right in (RIGHT, after))
    run_dir = a_run(tmp_path / f"{same}{sum(after)}", before, later)
    rows = run_dir.read_metrics()
    if same is not None:
        rows[-1]["val/same_answer"] = same
    write_jsonl(run_dir.metrics, rows)
    assert gather(run_dir)["verdict"]["word"] == word
