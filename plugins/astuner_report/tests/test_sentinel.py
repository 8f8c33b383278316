"""Every rule of the sentinel fires on its planted fault, and is silent on a healthy run; nothing is said twice."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from astuner.contracts.errors import AstunerError, ConfigError, RunError
from astuner.contracts.events import Measured, RunContext
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
from astuner_report.duplicates import duplicates
from astuner_report.sentinel import RULES, Alarm, Sentinel, causes
from astuner_report.sentinel.rules import EXPLAINS, trend, two_proportions
from astuner_report.sentinel.settings import AlarmRule
from astuner_report.sentinel.settings import Sentinel as Settings
from astuner_report.subscriber import Watch
from astuner_testing.fakes import fake_config
from tests.table import table

HEALTHY = Path(__file__).parent / "data" / "healthy_run.jsonl"
"""The rows of a run of examples/math_agent on the local backbone: 40 steps, validations between."""
Row = dict[str, Any]
Change = Callable[[int, Row], Row]


def recorded() -> list[Row]:
    return [json.loads(line) for line in HEALTHY.read_text().splitlines()]


def longer(steps: int, seed: int = 0) -> Iterator[Row]:
    """A healthy run of any length: the recorded one's rows with noise, reward and success rising to 0.8."""
    draw, trained = random.Random(seed), [row for row in recorded() if "reward/mean" in row]
    for step in range(1, steps + 1):
        row = dict(trained[draw.randrange(len(trained))])
        skill = 0.2 + 0.6 * step / steps
        reward = min(0.95, max(0.05, skill + draw.gauss(0, 0.05)))
        noisy = ("entropy", "grad_norm", "response_length/mean", "kl/mismatch_mean", "duplicates/share")
        row |= {name: row[name] * draw.lognormvariate(0, 0.1) for name in noisy if name in row}
        row |= {"step": step, "reward/mean": reward, "success/mean": reward, "policy_version": step - 1.0}
        row |= {"workflow/unreadable": 0.02, **({"rollout/entropy": row["entropy"]} if "entropy" in row else {})}
        yield row
        if step % 10 == 0:
            yield validation(step, skill + draw.gauss(0, 0.03))


def validation(step: int, success: float, half: float = 0.06) -> Row:
    low, high = max(0.0, success - half), min(1.0, success + half)
    return {"step": step, "val/success": success, "val/success_ci_low": low, "val/success_ci_high": high}


def watch(rows: Iterator[Row] | list[Row], *, max_staleness: int | None = 0, **settings: Any) -> list[Alarm]:
    sentinel = Sentinel(Settings(**settings), ())
    sentinel.max_staleness = max_staleness
    return [alarm for row in rows for alarm in sentinel.see(row["step"], without_place(row))]


def without_place(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in ("step", "time")}


def planted(change: Change, *, steps: int = 60, since: int = 25, **settings: Any) -> list[Alarm]:
    """What is said of a healthy run in which something goes wrong after step ``since``."""
    rows = [change(row["step"], dict(row)) if row["step"] > since else row for row in longer(steps)]
    return watch(rows, **settings)


def to(**numbers: float | None) -> Change:
    """Some numbers are these; ``__`` is a slash."""
    return lambda step, row: row | {name.replace("__", "/"): value for name, value in numbers.items()}


def times(name: str, factor: float) -> Change:
    return lambda step, row: row | ({name: row[name] * factor} if name in row else {})


def rewarded(success: float) -> Row:
    """A training step with this share of successes, each a reward of 1."""
    return {"reward/mean": success, "success/mean": success}


def broken(row: Row) -> Row:
    return row if "val/success" in row else row | rewarded(0.0) | {"kl": 0.4, "rollout/entropy": 2.0}


def solved(success: float, **numbers: float) -> Change:
    """From here on this share of the tasks is solved, in validation, too."""
    change = to(**numbers)
    return lambda step, row: (
        validation(step, success, 0.02) if "val/success" in row else change(step, row) | rewarded(success)
    )


def flat_rewards(step: int) -> Row:
    return rewarded(wavering(step))


def wavering(step: int) -> float:
    return 0.3 + 0.02 * (step * 7 % 5 - 2)


def held_out(row: Row, success: float) -> Row:
    """Validations with this success, whatever the policy does in training."""
    return validation(row["step"], success) if "val/success" in row else row


def hacked(step: int, row: Row) -> Row:
    """Validation falls and the reward rises, by little, so that `reward_only` has nothing to say."""
    if "val/success" in row:
        return validation(step, 0.12)
    return row | {"success/mean": 0.3 + 0.02 * (step * 7 % 5 - 2), "reward/std": 1.0}


FAULTS: dict[str, Change] = {
    "zero_variance": to(reward__std=0.0, adv__reward_min=0.0, adv__reward_max=0.0, adv__zero_frac=1.0),
    "nothing_to_learn": to(adv__zero_frac=1.0, adv__zero_group_frac=1.0),
    "empty_masks": to(tokens__trainable=0.0, merge__untrained_rollout_frac=1.0),
    "stale_weights": lambda step, row: row | {"staleness/max": step - 25.0, "policy_version": 25.0},
    "logprob_drift": to(**{"kl__mismatch_mean": 0.2, "kl__mismatch_max": 3.0}),
    "entropy_collapse": to(rollout__entropy=0.001, success__mean=0.4),
    "entropy_explosion": to(rollout__entropy=2.0),
    "duplicate_answers": to(duplicates__share=0.9, duplicates__expected=0.4),
    "length_explosion": lambda step, row: times("response_length/mean", 4.0)(step, row) | rewarded(0.3),
    "cut_off": to(**{"limits__rollout.max_response_length_in_one_turn": 0.3}),
    "bad_gradients": times("grad_norm", 50.0),
    "regularizer_dominates": lambda step, row: row | {"loss": 0.5, "pg_loss": 0.0, "kl/ref": 0.01} | flat_rewards(step),
    "failures_rising": to(rollout__errored_frac=0.2),
    "reward_hacking": hacked,
    "learning_rate": lambda step, row: broken(row),
    "policy_broke": lambda step, row: {name: n for name, n in broken(row).items() if name != "kl"},
    "random_reward": to(duplicates__share=0.2, duplicates__reward_noise=0.1),
    "reward_success_apart": lambda step, row: row | {"success/mean": 1 - row["reward/mean"]} if "lr" in row else row,
    "reward_only": lambda step, row: row | {"success/mean": wavering(step)} if "lr" in row else row,
    "no_progress": lambda step, row: held_out(row, 0.3) if "val/success" in row else row | rewarded(wavering(step)),
    "train_only": lambda step, row: held_out(row, 0.2),
    "same_answer": lambda step, row: (
        row | {"val/same_answer": 0.95, "val/tasks": 64.0} if "val/success" in row else row
    ),
    "worse_than_best": lambda step, row: validation(step, 0.12) if "val/success" in row else row | rewarded(0.3),
    "invalid_rising": to(workflow__unreadable=0.4),
}


SINCE = {"no_progress": 0, "train_only": 0, "reward_only": 0}
"""Faults that are there from the start; the others begin after step 25."""


def test_there_is_a_planted_fault_for_every_rule_and_the_config_names_them_all() -> None:
    names = [rule.name for rule in RULES]
    assert list(get_args(AlarmRule)) == names == list(FAULTS)


@table("name", FAULTS)
def test_a_rule_fires_on_its_planted_fault_and_not_before(name: str) -> None:
    since = SINCE.get(name, 25)
    alarms = planted(FAULTS[name], since=since)
    assert list(causes(a.rule for a in alarms)) == [name], [str(a) for a in alarms]
    alarm = alarms[-1]
    assert since < alarm.step <= max(50, since + 60)  # two validations later at most; from the start, 60 steps
    assert any(character.isdigit() for character in alarm.message)
    assert len(alarm.advice) > 20
    assert alarm.severity in ("warning", "error")


@table("name", FAULTS)
def test_a_rule_that_is_turned_off_is_silent(name: str) -> None:
    since = SINCE.get(name, 25)
    off = planted(FAULTS[name], since=since, disable=[name])
    assert {alarm.rule for alarm in off} <= set(EXPLAINS.get(name, ()))  # what follows from it is then said by itself
    assert planted(FAULTS[name], since=since, enabled=False) == []


def test_a_recorded_healthy_run_raises_no_alarm() -> None:
    rows = recorded()
    assert sum("reward/mean" in row for row in rows) == 40
    assert sum("val/success" in row for row in rows) >= 3
    assert watch(rows) == []
    assert watch(rows, max_staleness=None) == []


@table("seed", range(8))
def test_a_long_healthy_run_with_noise_raises_no_alarm(seed: int) -> None:
    assert [str(alarm) for alarm in watch(longer(400, seed))] == []


MORE_FAULTS: dict[str, tuple[str, Change]] = {
    "half of the masks": ("empty_masks", to(merge__untrained_rollout_frac=0.6)),
    "most groups": ("nothing_to_learn", to(adv__zero_frac=0.95, adv__zero_group_frac=0.95, **rewarded(0.05))),
    "drift has grown": ("logprob_drift", to(**{"kl__mismatch_mean": 0.02})),
    "one token is impossible": ("logprob_drift", to(**{"kl__mismatch_max": 12.0})),
    "drift is no number": ("logprob_drift", to(**{"kl__mismatch_mean": None})),
    "always the same": (
        "duplicate_answers",
        to(duplicates__share=0.99, duplicates__expected=0.98, **rewarded(0.3)),
    ),
    "too few calls": ("cut_off", to(**{"limits__rollout.multi_turn.max_steps": 0.21, "limits__other": 0.1})),
    "not finite": ("bad_gradients", to(grad_norm=float("nan"))),
    "skipped": ("bad_gradients", to(skipped_steps=1.0)),
    "norm is missing": ("bad_gradients", lambda step, row: {k: v for k, v in row.items() if k != "grad_norm"}),
}


@table("what", MORE_FAULTS)
def test_other_ways_to_go_wrong(what: str) -> None:
    name, change = MORE_FAULTS[what]
    assert [alarm.rule for alarm in planted(change)] == [name]


ORDINARY: dict[str, Change] = {
    "one step in four has equal rewards": lambda step, row: (
        row | {"adv/reward_min": 0.0, "adv/reward_max": 0.0, "adv/zero_frac": 1.0} if step % 4 == 0 else row
    ),
    "everything solved": solved(1.0, adv__reward_min=1.0, adv__reward_max=1.0, adv__zero_frac=1.0),
    "nearly everything solved": solved(0.95, adv__zero_frac=1.0, adv__zero_group_frac=1.0),
    "a fifth is cut off": to(**{"limits__rollout.max_response_length_in_one_turn": 0.2}),
    "entropy falls as the tasks are solved": solved(0.97, entropy=0.001),
    "attempts are alike, as they should be": to(duplicates__share=0.7, duplicates__expected=0.68),
    "one gradient in ten is huge": lambda step, row: times("grad_norm", 100.0)(step, row) if step % 10 == 0 else row,
    "float32 rounding grows a hundredfold": times("kl/mismatch_mean", 100.0),
    "single episodes fail": to(rollout__errored_frac=1 / 64),
    "two steps of long answers": lambda step, row: (
        times("response_length/mean", 5.0)(step, row) if step in (30, 31) else row
    ),
}


@table("what", ORDINARY)
def test_what_is_ordinary_is_no_alarm(what: str) -> None:
    assert [str(alarm) for alarm in planted(ORDINARY[what])] == []


def test_answers_that_grow_with_the_reward_are_no_alarm_and_without_it_they_are() -> None:
    rows = [row | {"response_length/mean": 100.0 + 5 * row["step"]} for row in longer(120) if "reward/mean" in row]
    assert watch(rows) == []
    flat = [row | {"reward/mean": 0.3 + 0.01 * (row["step"] % 3)} for row in rows]
    assert {alarm.rule for alarm in watch(flat)} == {"length_explosion"}


def test_a_held_out_judge_that_falls_while_the_reward_rises_is_an_alarm_if_it_is_named() -> None:
    draw = random.Random(1)
    rows = [row | {"judge/other": 0.8 - row["step"] / 200 + draw.gauss(0, 0.02)} for row in longer(60)]
    (alarm,) = watch(rows, held_out=["judge/other"])
    assert alarm.rule == "reward_hacking"
    assert "judge/other falls" in alarm.message
    assert watch(rows) == []


def test_held_out_success_that_merely_wavers_is_no_alarm() -> None:
    draw = random.Random(2)
    rows = [validation(r["step"], 0.4 + draw.gauss(0, 0.03)) if "val/success" in r else r for r in longer(600)]
    said = {alarm.rule for alarm in watch(rows)}
    assert said == {"no_progress", "train_only"}  # flat at first, then left behind by the training reward; no fall


def test_versions_that_do_not_grow_are_an_alarm_where_the_backbone_states_no_bound() -> None:
    slow = [row | {"policy_version": row["step"] // 8 * 8.0, "staleness/max": 8.0} for row in longer(60)]
    assert watch(slow, max_staleness=None) == []  # new weights every eight steps
    (alarm,) = planted(to(policy_version=24.0, staleness__max=30.0), max_staleness=None)
    assert (alarm.rule, "version 24" in alarm.message) == ("stale_weights", True)
    untrained = [row | {"policy_version": 3.0, "nothing_learnable": 1.0} for row in longer(40)]
    assert watch(untrained, max_staleness=None) == []  # the weights did not change


def test_an_alarm_is_raised_once_and_again_when_it_comes_back_and_a_warning_is_said_once() -> None:
    change = FAULTS["zero_variance"]
    lasting = [change(row["step"], row) for row in longer(120)]
    assert [alarm.step for alarm in watch(lasting)] == [5]
    back = [change(row["step"], row) if row["step"] <= 8 or row["step"] > 20 else row for row in longer(30)]
    assert [(alarm.step, alarm.is_said) for alarm in watch(back)] == [(5, True), (25, False)]
    flickering = [row if row["step"] in (8, 9) else change(row["step"], row) for row in longer(30)]
    assert [alarm.step for alarm in watch(flickering)] == [5]
    sentinel = Sentinel(Settings(), ())
    sentinel.replay(back)
    assert sentinel.held["zero_variance"] == [5, 6, 7, 8, *range(25, 31)]
    empty = [FAULTS["empty_masks"](0, row) if row["step"] <= 8 or row["step"] > 20 else row for row in longer(30)]
    assert [(alarm.step, alarm.is_said) for alarm in watch(empty)] == [(1, True), (21, True)]


def test_each_policy_is_watched_by_itself() -> None:
    sentinel, said = Sentinel(Settings(), ("wolf", "villager")), []
    for row in longer(20):
        if "reward/mean" not in row:
            continue
        both = {f"policy/{p}/{n}": row[n] for p in ("wolf", "villager") for n in row if n.startswith(("adv/", "ent"))}
        silent = {name: both.pop(name) for name in list(both) if name.startswith("policy/villager/adv/reward_")}
        assert silent
        numbers = without_place(row) | both | {"policy/villager/adv/zero_frac": 1.0}
        said += sentinel.see(row["step"], numbers)
    (alarm,) = said
    assert (alarm.rule, alarm.step) == ("nothing_to_learn", 5)
    assert "No agent of the policy villager generated a trainable token" in alarm.message


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("stopped_at", [20, 28, 40])
def test_a_resumed_run_says_what_it_would_have_said(name: str, stopped_at: int, tmp_path: Path) -> None:
    since = SINCE.get(name, 25)
    rows = [FAULTS[name](row["step"], dict(row)) if row["step"] > since else row for row in longer(90)]
    whole = [(a.step, a.rule, a.message) for a in watch(rows)]
    sentinel = Sentinel(Settings(), ())
    sentinel.max_staleness = 0
    sentinel.replay(json.loads(json.dumps([row for row in rows if row["step"] <= stopped_at])))
    rest = [a for row in rows if row["step"] > stopped_at for a in sentinel.see(row["step"], without_place(row))]
    assert [(a.step, a.rule, a.message) for a in rest] == [said for said in whole if said[0] > stopped_at]


def test_a_rule_of_stop_on_ends_the_run_and_a_resumed_one_goes_on() -> None:
    sentinel = Sentinel(Settings(stop_on=["empty_masks"]), ())
    rows = [FAULTS["empty_masks"](row["step"], row) for row in longer(3)]
    assert sentinel.stops is None
    for row in rows:
        sentinel.see(row["step"], without_place(row))
    assert isinstance(sentinel.stops, RunError)
    assert re.search(r"stop_on stopped the run after step 1 \(empty_masks\): None of .* saved", str(sentinel.stops))
    again = Sentinel(Settings(stop_on=["empty_masks"]), ())
    again.replay(rows)
    assert again.stops is None


def test_a_misspelt_rule_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    text = "  trainer_common: {sentinel: {disable: [zero_varianse]}}\n"
    with pytest.raises(ConfigError, match=r"sentinel\.disable.*did you mean zero_variance"):
        fake_config(tmp_path, text)


def test_rows_without_numbers_or_with_strange_ones_do_no_harm() -> None:
    sentinel = Sentinel(Settings(), ())
    assert sentinel.see(1, {}) == []
    assert sentinel.see(1, {"reward/mean": float("nan")}) == []
    assert sentinel.see(0, {"val/success": 0.5}) == []  # of an older run, without an interval
    names = {name for row in recorded() for name in row} - {"step", "time"}
    for value in (float("inf"), float("nan"), 0.0, -1.0, 1e300):
        for step in range(1, 30):
            sentinel.see(step, dict.fromkeys(names - {"val/success"}, value))


def test_the_trend_test_agrees_with_published_values() -> None:
    rising = [1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert trend(rising) == pytest.approx(44 / 11.180339887, rel=1e-9)  # S = 45, var = 10 * 9 * 25 / 18 = 125
    assert trend([-x for x in rising]) == -trend(rising)
    assert trend([1.0] * 10) == trend([1.0, 2.0, 3.0]) == 0.0
    tied = [1.0, 1, 2, 2, 3, 3]  # S = 12, var = (6 * 5 * 17 - 3 * 2 * 1 * 9) / 18
    assert trend(tied) == pytest.approx(11 / ((510 - 54) / 18) ** 0.5)


def test_two_proportions() -> None:
    assert two_proportions((50, 100), (50, 100)) == 0
    assert two_proportions((10, 100), (30, 100)) == pytest.approx(3.5355339)  # 0.2 / sqrt(0.2 * 0.8 * 2 / 100)
    assert two_proportions((0, 0), (1, 2)) == two_proportions((0, 5), (0, 9)) == 0


def own_rule() -> str:
    """The example of docs/sentinel.md."""
    page = (Path(__file__).parents[3] / "docs" / "sentinel.md").read_text(encoding="utf-8")
    return page.partition("```python\n")[2].partition("```")[0]


def test_a_rule_of_ones_own_is_named_by_a_key_and_ends_a_run_like_any(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(own_rule())
    text = "  trainer_common: {sentinel: {rules: [rules.py->SlowSteps], stop_on: [rules.py->SlowSteps]}}\n"
    config = fake_config(tmp_path, text)
    said: list[Any] = []
    ended: list[Any] = []
    (tmp_path / "run").mkdir()
    context = RunContext(
        config=config, run_dir=tmp_path / "run", policies=(), trains=True, publish=said.append, stop=ended.append
    )
    Watch.check(config)
    (watching,) = Watch.for_run(context)
    for step in range(1, 7):
        watching.handle(Measured(step=step, metrics={"reward/mean": 0.5, "time/step": 900.0}))
    (note,) = said
    assert "WARNING (slow_steps) step 5: The last 5 steps took more than 600 s each" in note.text
    assert re.search(r"stop_on stopped the run after step 5 \(slow_steps\)", str(ended[0]))


@table(
    ("settings", "says"),
    [
        ("rules: [nobodys]", "unknown sentinel rule 'nobodys'"),
        ("stop_on: [empty_mask]", "stop_on: 'empty_mask' is not a known rule; did you mean empty_masks"),
        ("stop_on: [slow_steps]", "'slow_steps' is not a known rule"),
    ],
)
def test_a_rule_that_is_not_there_is_refused_when_the_config_is_read(tmp_path: Path, settings: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fake_config(tmp_path, f"  trainer_common: {{sentinel: {{{settings}}}}}\n")


@table(
    ("line", "says"),
    [
        ("SlowSteps = 1", "a subclass of astuner_report.sentinel.Rule"),
        ("SlowSteps.name = 'cut_off'", "is missing or already in use"),
    ],
)
def test_what_is_no_rule_is_refused_before_the_run(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "rules.py").write_text(own_rule() + line)
    config = fake_config(tmp_path, "  trainer_common: {sentinel: {rules: [rules.py->SlowSteps]}}\n")
    with pytest.raises(AstunerError, match=says):
        Watch.check(config)


def test_attempts_that_say_the_same_are_counted_pair_by_pair_within_a_task() -> None:
    def said(group: str, token: int, *, scored: bool = True, spoke: bool = True) -> Episode:
        generation = Generation(
            prompt_ids=[1], response_ids=[token], logprobs=[math.log(0.25)], finish_reason=FinishReason.STOP,
            policy_version=0,
        )  # fmt: skip
        return Episode(
            workflow_task=WorkflowTask(task=Task(task_id="t"), episode_id=f"{group}-{token}", group_id=group),
            turns=[Turn(index=0, agent="a", generation=generation, continues=None)] if spoke else [],
            output=None,
            verdict=JudgeOutput(reward=1.0) if scored else None,
            stop_reason=StopReason.COMPLETED if scored else StopReason.WORKFLOW_FAILED,
        )

    alike, mixed = [said("a", 1)] * 3, [said("b", 1), said("b", 1), said("b", 2), said("b", 1, scored=False)]
    found = duplicates([*alike, *mixed, said("c", 1), said("c", 1, spoke=False)])
    assert found.pop("duplicates/evidence") > 0
    assert found == {
        "duplicates/repeats": 3.0,
        "duplicates/share": pytest.approx((1 + 1 / 3) / 2),
        "duplicates/expected": pytest.approx(0.25),
        "duplicates/reward_noise": 0.0,
    }
    assert duplicates([said("a", 1), said("b", 1)]) == {}
