"""Recorded runs: each planted fault is named for what it is within three validations, healthy ones raise nothing.

The rows are of real runs on the `local` backbone: examples/math_agent (the tiny model, a validation every 20 steps of
100), and two examples with recipes under which their policies came apart; `data/runs/README.md` says how each was made.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from astuner import RunDir
from astuner.contracts.types import (
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    StopReason,
    Task,
    Turn,
    WorkflowTask,
)
from astuner_report.duplicates import duplicates, same_answer, sampled_entropy
from astuner_report.run_report.facts import gather
from astuner_report.sentinel import RULES, Alarm, Sentinel, causes
from astuner_report.sentinel.rules import EXPLAINS
from astuner_report.sentinel.settings import Sentinel as Settings
from tests.table import table

RUNS = Path(__file__).parent / "data" / "runs"
Row = dict[str, Any]
CAUSES = {
    "lr0": "learning_rate",
    "lr100": "learning_rate",
    "lr100once": "learning_rate",
    "random": "random_reward",
    "shuffled": "random_reward",
    "lrtiny": "no_progress",
    "constant": "zero_variance",
    "swapped": "reward_success_apart",
    "told": "train_only",
}
"""What was planted -> what is to be said of it."""
BESIDES = {(f"told_{seed}", "invalid_rising") for seed in (21, 22, 23)}
"""What is also true of a run: such questions are new to the model, and it forgets the box for a while."""
RECORDED = sorted(path.name.partition(".")[0] for path in RUNS.glob("*.jsonl.gz"))
LAST = 60
"""The step of the third validation."""


def rows_of(name: str) -> list[Row]:
    with gzip.open(RUNS / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def watch(rows: Sequence[Row], **settings: Any) -> list[Alarm]:
    sentinel = Sentinel(Settings(**settings), ())
    sentinel.max_staleness = 0
    return [
        alarm
        for row in rows
        for alarm in sentinel.see(row["step"], {name: v for name, v in row.items() if name not in ("step", "time")})
    ]


def of_kind(kind: str) -> list[str]:
    return [name for name in RECORDED if name.partition("_")[0] == kind]


@table("name", of_kind("healthy"))
def test_a_healthy_run_raises_nothing(name: str) -> None:
    assert [str(alarm) for alarm in watch(rows_of(name))] == []


@table("name", [name for name in RECORDED if name.partition("_")[0] in CAUSES])
def test_a_planted_fault_is_named_within_three_validations_and_once(name: str) -> None:
    cause = CAUSES[name.partition("_")[0]]
    alarms = watch(rows_of(name))
    found = [other for other in causes(alarm.rule for alarm in alarms) if (name, other) not in BESIDES]
    assert found == [cause], [str(alarm) for alarm in alarms]
    (named,) = [alarm for alarm in alarms if alarm.rule == cause]
    assert named.step <= LAST


def test_the_recordings_are_there() -> None:
    assert [kind for kind in CAUSES if not of_kind(kind)] == []
    assert len(of_kind("healthy")) == 20


def unsaid(*kinds: str) -> list[Row]:
    """The first recorded run of a kind, without some numbers."""
    return [{name: value for name, value in row.items() if name not in kinds} for row in rows_of(of_kind("healthy")[0])]


def test_the_explanations_have_no_circle_and_name_rules_only() -> None:
    names = {rule.name for rule in RULES}
    below: dict[str, set[str]] = {name: set(EXPLAINS.get(name, ())) for name in names}
    assert set().union(*below.values()) <= names
    for _ in names:
        below = {name: others.union(*(below[other] for other in others)) for name, others in below.items()}
    assert not [name for name, others in below.items() if name in others]


def test_what_follows_from_a_cause_is_said_with_it_and_by_itself_where_that_is_not_watched_or_stops_the_run() -> None:
    rows = rows_of(of_kind("lr100")[0])
    said = [alarm.rule for alarm in watch(rows)]
    assert "zero_variance" not in said
    assert "zero_variance" in [alarm.rule for alarm in watch(rows, disable=["learning_rate", "policy_broke"])]
    assert "zero_variance" in [alarm.rule for alarm in watch(rows, stop_on=["zero_variance"])]
    assert causes(["cut_off", "learning_rate", "failures_rising"]) == {
        "learning_rate": ["cut_off"],
        "failures_rising": [],
    }
    assert causes(["answer_in_prompt", "train_only"]) == {"answer_in_prompt": ["train_only"]}


def test_a_sign_that_is_swapped_in_training_alone_is_asked_for_at_the_first_validation() -> None:
    """Success follows from the reward, and only validation has the right judge."""
    rows = [row | {"success/mean": row["reward/mean"]} if "lr" in row else row for row in rows_of("swapped_1")]
    (alarm,) = watch(rows)
    assert (alarm.rule, alarm.step) == ("reward_hacking", 20)
    assert "sign of the reward may be swapped" in alarm.message


def test_the_learning_rate_is_named_with_its_value() -> None:
    for kind in ("lr100", "lr0"):
        rows = rows_of(of_kind(kind)[0])
        (alarm,) = [alarm for alarm in watch(rows) if alarm.rule == "learning_rate"]
        rate = next(row["lr"] for row in rows if row["step"] == alarm.step and "lr" in row)
        assert f"{rate:.3g}" in alarm.message
        assert alarm.severity == "error"


def test_the_learning_rate_of_a_policy_among_several_is_named() -> None:
    told = ("lr", "kl", "rollout/entropy")
    for kind in ("lr100", "lr0"):
        sentinel, alarms = Sentinel(Settings(), ("wolf", "sheep")), []
        for row in rows_of(of_kind(kind)[0]):
            numbers = {f"policy/wolf/{name}" if name in told else name: value for name, value in row.items()}
            alarms += sentinel.see(row["step"], {n: value for n, value in numbers.items() if n not in ("step", "time")})
        (alarm,) = [alarm for alarm in alarms if alarm.rule == "learning_rate"]
        assert "policy wolf" in alarm.message


def flat(tasks: int, gained: float = 0.0) -> list[Row]:
    """A run whose success wavers and gains nothing, or something at last, with a validation every 20 steps."""
    half = 1.96 * math.sqrt(0.2 * 0.8 / tasks)
    rows: list[Row] = []
    for step in range(0, 101):
        success = 0.2 + gained * step / 100
        if step:
            wavering = success + 0.02 * (step * 7 % 5 - 2)
            rows.append({"step": step, "reward/mean": wavering, "success/mean": wavering, "lr": 1e-9})
        if step % 20 == 0:
            interval = {"val/success_ci_low": success - half, "val/success_ci_high": success + half}
            rows.append({"step": step, "val/success": success, "val/tasks": float(tasks), **interval})
    return rows


def test_no_progress_is_said_once_a_gain_of_15_points_would_have_been_seen_and_not_before() -> None:
    (alarm,) = watch(flat(256))
    assert (alarm.rule, alarm.step) == ("no_progress", 60)
    assert "after 60 steps at a learning rate of 1e-09" in alarm.message
    assert "3 validations of 256 tasks would have detected a gain of 15 points" in alarm.message
    (later,) = watch(flat(32))
    assert later.step == 80
    assert "4 validations of 32 tasks" in later.message
    assert watch(flat(16)) == []  # so few tasks cannot tell
    assert watch(flat(256, gained=0.3)) == []
    one = [{**row, "policy/a/lr": 1e-3} if "lr" in row else row for row in flat(256)]
    assert [alarm.rule for alarm in watch(one)] == ["no_progress"]
    assert watch([{**row, "policy/b/lr": 1e-3} if "lr" in row else row for row in one]) == []  # they play each other


def collapsing(at: int, before: float, after: float) -> list[Row]:
    """Rows made up after the numbers of issue 21: from step ``at`` on the policy comes apart within 20 steps."""
    draw, rows = random.Random(at), []
    for step in range(0, 81):
        gone = min(1.0, max(0.0, (step - at) / 20))
        success = before + gone * (after - before)
        if step:
            share = max(0.0, success + draw.gauss(0, 0.04))
            rows.append(
                {"step": step, "reward/mean": share, "success/mean": share, "rollout/episodes": 64.0, "lr": 2e-3}
            )
        if step % 20 == 0:
            half = 1.96 * math.sqrt(max(success, 0.01) * (1 - success) / 256)
            interval = {"val/success_ci_low": success - half, "val/success_ci_high": success + half}
            rows.append({"step": step, "val/success": success, "val/tasks": 256.0, **interval})
    return rows


def test_a_real_collapse_is_named_before_the_validation_that_shows_it() -> None:
    """What was seen on 2026-11-23, and named twenty steps late or never: held out 37.5 to 0 %, and 28 to 12 %."""
    (wolves,) = watch(rows_of("werewolves_1"))  # whose answers then grow, are cut off and earn nothing
    assert (wolves.rule, wolves.step) == ("invalid_rising", 19)  # of validations at 20, 40 and 60
    assert "workflow/werewolf_unclear rose from 3 % to 20 %" in wolves.message
    first, second = watch(rows_of("lake_0"))
    assert (first.rule, first.step, second.rule, second.step) == ("cut_off", 63, "invalid_rising", 64)  # at 75


def test_a_collapse_of_which_nobody_counts_what_cannot_be_read_is_named() -> None:
    (silent,) = watch(collapsing(25, 0.24, 0.08))
    assert silent.rule == "worse_than_best"
    assert silent.step <= 60


def test_entropy_is_watched_in_steps_with_equal_rewards_and_one_good_step_hides_no_collapse() -> None:
    def low(step: int, row: Row) -> Row:
        if "reward/mean" not in row or step <= 15:
            return row
        return row | {"rollout/entropy": 0.0005, "success/mean": 0.95 if step % 4 == 0 else 0.4, "entropy": None}

    rows = [low(row["step"], row) for row in unsaid() if "reward/mean" in row]
    rows = [row | {"reward/mean": row["success/mean"]} for row in rows]
    alarm = next(alarm for alarm in watch(rows) if alarm.rule == "entropy_collapse")
    assert alarm.step == 20
    older = [{name: value for name, value in row.items() if name != "rollout/entropy"} for row in unsaid()]
    assert watch(older) == []  # rows of an older run have `entropy` at times


def test_numbers_that_no_run_writes_leave_a_report(tmp_path: Path) -> None:
    draw = random.Random(0)
    names = [*sorted({name for row in rows_of(RECORDED[0]) for name in row} - {"step", "time"}), "limits/other"]
    strange = (0.0, 1.0, -1.0, 0.5, 1e-300, 9e299, -9e299, None)
    rows = [
        {
            name: draw.choice(strange)
            for name in names
            if draw.random() < 0.8 and name.startswith("val/") == (step % 6 == 5)
        }
        | {"step": step}
        for step in range(60)
    ]
    (tmp_path / "resolved.yaml").write_text("astuner: {}\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "metrics.jsonl contains invalid numbers" in "".join(gather(RunDir(tmp_path))["damage"])


def said(group: str, token: int, reward: float, prompt: int = 1, **turn: Any) -> Episode:
    generation = Generation(
        prompt_ids=[prompt], response_ids=[token, 0], logprobs=[math.log(0.5), math.log(0.25)],
        finish_reason=FinishReason.STOP, policy_version=0,
    )  # fmt: skip
    return Episode(
        workflow_task=WorkflowTask(task=Task(task_id="t"), episode_id=f"{group}-{token}", group_id=group),
        turns=[Turn(index=0, agent="a", generation=generation, continues=None, **turn)],
        output=None,
        verdict=JudgeOutput(reward=reward),
        stop_reason=StopReason.COMPLETED,
    )


def test_the_noise_of_a_reward_is_between_attempts_that_are_the_same() -> None:
    alike, other = [said("a", 1, 0.0), said("a", 1, 1.0)], [said("b", 1, 0.0), said("b", 2, 1.0)]
    assert duplicates([*alike, *other])["duplicates/reward_noise"] == pytest.approx(0.5)
    assert duplicates(other)["duplicates/reward_noise"] == 0
    elsewhere = [said("c", 1, 0.0), said("c", 1, 1.0, prompt=2)]  # the environment answered otherwise
    assert duplicates(elsewhere)["duplicates/reward_noise"] == 0


def test_entropy_is_measured_of_what_may_be_trained_and_for_each_policy() -> None:
    nats = (math.log(2) + math.log(4)) / 2
    spoken = [said("a", 1, 0.0), said("a", 2, 0.0, trained=False), said("a", 3, 0.0, policy="wolf")]
    assert sampled_entropy(spoken) == {"rollout/entropy": pytest.approx(nats)}
    assert sampled_entropy(spoken, ["wolf", "sheep"]) == {"policy/wolf/rollout/entropy": pytest.approx(nats)}
    assert sampled_entropy([said("a", 1, 0.0, trained=False)]) == {}


def test_the_most_common_answer_of_a_validation_counts_once_for_each_task() -> None:
    same, other = [said(task, 1, 0.0) for task in "abc"], said("d", 2, 0.0)
    assert same_answer([*same, other]) == {"val/same_answer": 0.75}
    assert same_answer([*same, said("a", 2, 0.0), other]) == {"val/same_answer": 0.75}  # a second attempt at task a
    assert same_answer([]) == {}


def test_attempts_that_repeat_an_unlikely_one_are_evidence_of_copying() -> None:
    copied, drawn = [said("a", 1, 0.0)] * 4, [said("b", token, 0.0) for token in range(4)]
    assert duplicates(copied)["duplicates/repeats"] == 3
    once = math.log((0.125 + 0.5 * 0.875) / 0.125)  # of an answer with probability 1 / 8
    assert duplicates(copied)["duplicates/evidence"] == pytest.approx(3 * once)
    assert duplicates(drawn)["duplicates/evidence"] == pytest.approx(3 * math.log(0.5))
