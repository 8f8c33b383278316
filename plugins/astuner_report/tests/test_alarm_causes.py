"""The rules need a baseline, a test with a stated error rate, and evidence for a cause: tables of synthetic runs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from astuner_report.duplicates import EXCESS
from astuner_report.sentinel import Sentinel, causes
from astuner_report.sentinel.settings import Sentinel as Settings
from astuner_report.sentinel.statistics import exact_tail, lower_bound
from tests.table import table

Row = dict[str, Any]
Rows = Sequence[Row]


def step(n: int, **numbers: float | None) -> Row:
    """Return a row of a healthy step of 8 groups of 4, with other numbers; ``__`` is a slash."""
    wave = (n * 7 % 5 - 2) / 2  # -1, -0.5, 0, 0.5, 1
    success = 0.3 + 0.03 * wave
    row: Row = {
        "step": n, "rollout/episodes": 32.0, "rollout/groups": 8.0, "rollout/errored_frac": 0.0,
        "tokens/generated": 650.0, "tokens/trained": 650.0, "tokens/trainable": 650.0,
        "reward/mean": success, "success/mean": success, "reward/std": 0.46, "reward/max": 1.0, "reward/min": 0.0,
        "response_length/mean": 20.0 + wave, "rollout/entropy": 0.1 + 0.01 * wave, "entropy": 0.1 + 0.01 * wave,
        "adv/zero_frac": 0.4, "adv/zero_group_frac": 0.4, "adv/reward_min": 0.0, "adv/reward_max": 1.0,
        "merge/untrained_rollout_frac": 0.0, "lr": 1e-3, "loss": 0.011, "pg_loss": 0.01, "kl": 1e-4, "kl/ref": 0.05,
        "grad_norm": 0.5 + 0.1 * wave, "kl/mismatch_mean": 1e-7, "kl/mismatch_max": 1e-5,
        "logit_grad/policy": 0.04, "logit_grad/kl": 0.002, "judge/boxed": 0.98,
        "duplicates/share": 0.3, "duplicates/expected": 0.3, "duplicates/evidence": -1.0, "duplicates/repeats": 9.0,
        "duplicates/reward_noise": 0.0, "policy_version": n - 1.0, "staleness/max": 0.0,
    }  # fmt: skip
    return row | {name.replace("__", "/"): value for name, value in numbers.items()}


def run(steps: int, change: Callable[[int], dict[str, float | None]] = lambda n: {}, *, every: int = 0) -> list[Row]:
    """Return a run; ``change`` gives the numbers of a step that differ, those named ``val__`` of a validation."""
    rows = []
    for n in range(steps + 1):
        numbers = change(n)
        trained = {name: value for name, value in numbers.items() if not name.startswith("val__")}
        rows += [step(n, **trained)] if n else []
        if every and n % every == 0:
            success = numbers.get("val__success", 0.3)
            assert success is not None
            half = 1.96 * math.sqrt(max(success * (1 - success), 0.01) / 128)
            row = {"val/success": success, "val/success_ci_low": success - half, "val/success_ci_high": success + half}
            same = numbers.get("val__same_answer", 0.05)
            rows.append({"step": n, **row, "val/tasks": numbers.get("val__tasks", 128.0), "val/same_answer": same})
    return rows


def raised(rows: Iterable[Row], *, grad_clip: float = 1.0, policies: Sequence[str] = ()) -> list[str]:
    """Return the causes that the rules name, in their order."""
    sentinel = Sentinel(Settings(), policies)
    sentinel.max_staleness, sentinel.grad_clip = 0, grad_clip
    alarms = [a for row in rows for a in sentinel.see(row["step"], {k: v for k, v in row.items() if k != "step"})]
    return list(causes(alarm.rule for alarm in alarms))


def test_the_healthy_run_of_the_tables_raises_nothing() -> None:
    assert raised(run(200)) == raised(run(50, every=10)) == []


# ------------------------------------------------------------------------------------------------ 13: bad_gradients


def drawn(name: str, draw: Callable[[random.Random], float], seed: int = 0) -> Callable[[int], dict[str, float | None]]:
    rng = random.Random(seed)
    return lambda n: {name: draw(rng)}


def pairs(n: int) -> dict[str, float | None]:
    """Two attempts a step: two steps of three have no signal, and the gradient of the KL term alone."""
    signal = n % 3 == 0
    return {
        "rollout__groups": 1.0, "rollout__episodes": 2.0, "tokens__generated": 40.0, "adv__zero_frac": 1.0 - signal,
        "grad_norm": 4.0 + n % 4 if signal else 0.02, "adv__zero_group_frac": 1.0 - signal,
    }  # fmt: skip


OLDER: dict[str, float | None] = {"logit_grad__kl": None, "logit_grad__policy": None}
GRADIENTS: dict[str, tuple[Rows, float, list[str]]] = {
    "two attempts, most steps without a signal": (run(150, pairs), 1.0, []),
    "no gradient at all in steps without a signal": (
        run(150, lambda n: {"grad_norm": 3.0 if n % 4 == 0 else 0.0, "adv__zero_frac": float(n % 4 != 0)}),
        1.0,
        [],
    ),
    "hard tasks, one step of five has a signal": (
        run(
            150,
            lambda n: {
                "grad_norm": 2.0 if n % 5 == 0 else 0.05,
                "adv__zero_frac": 0.9 if n % 5 == 0 else 1.0,
                "adv__zero_group_frac": 0.9 if n % 5 == 0 else 1.0,
                "success__mean": 0.02,
            },
        ),
        1.0,
        ["nothing_to_learn"],
    ),
    "twenty times as large, below grad_clip": (
        run(80, lambda n: {"grad_norm": 0.04 if n <= 40 else 0.8}),
        1.0,
        [],
    ),
    "the same, with a lower grad_clip": (
        run(80, lambda n: {"grad_norm": 0.04 if n <= 40 else 0.8}),
        0.1,
        ["bad_gradients"],
    ),
    "fifty times as large, below a high grad_clip": (
        run(80, lambda n: {"grad_norm": 1.0 if n <= 40 else 50.0}),
        100.0,
        [],
    ),
    "heavy tails": (run(400, drawn("grad_norm", lambda rng: rng.lognormvariate(1.0, 1.2))), 1.0, []),
    "Cauchy": (run(400, drawn("grad_norm", lambda rng: abs(math.tan(math.pi * (rng.random() - 0.5))))), 1.0, []),
    "growing a hundredfold in 300 steps": (run(300, lambda n: {"grad_norm": 2.0 * math.exp(n / 65)}), 1.0, []),
    "one spike in three": (run(150, lambda n: {"grad_norm": 60.0 if n % 3 == 0 else 2.0}), 1.0, []),
    "large from the start": (run(100, lambda n: {"grad_norm": 400.0}), 1.0, []),
    "no baseline yet": (run(18, lambda n: {"grad_norm": 2.0 if n <= 12 else 90.0}), 1.0, []),
    "a series of spikes": (run(80, lambda n: {"grad_norm": 2.0 if n <= 40 else 90.0}), 1.0, ["bad_gradients"]),
    "not finite": (run(30, lambda n: {"grad_norm": None if n == 20 else 2.0}), 1.0, ["bad_gradients"]),
    "a KL coefficient of 100": (
        run(
            80,
            lambda n: {"grad_norm": 2.0 if n <= 30 else 60.0, "loss": 0.4, "kl__ref": 0.004, "logit_grad__kl": 0.8},
        ),
        1.0,
        ["regularizer_dominates"],
    ),
    "the same without the sizes of the terms": (
        run(80, lambda n: {"grad_norm": 2.0 if n <= 30 else 60.0, "loss": 0.4, "kl__ref": 0.004, **OLDER}),
        1.0,
        ["regularizer_dominates"],
    ),
    "a usual KL coefficient and a policy that moved far": (
        run(80, lambda n: {"loss": 0.3, "kl__ref": 15.0, "logit_grad__kl": 0.5}),
        1.0,
        [],
    ),
}
"""What -> its rows, `optim.grad_clip`, the causes."""


@table("what", GRADIENTS)
def test_gradients_are_an_alarm_only_where_they_are_not_ordinary(what: str) -> None:
    rows, grad_clip, expected = GRADIENTS[what]
    assert raised(rows, grad_clip=grad_clip) == expected


# ------------------------------------------------------------------------------------------------ 14: learning_rate


def zero(**numbers: float | None) -> dict[str, float | None]:
    return {"success__mean": 0.0, "reward__mean": 0.0, **numbers}


def after(start: int, **numbers: float | None) -> Callable[[int], dict[str, float | None]]:
    return lambda n: dict(numbers) if n > start else {}


ACCUSED = {"learning_rate", "policy_broke", "regularizer_dominates"}
BROKEN: dict[str, tuple[Rows, set[str]]] = {
    "success is 0 from the start, no answer can be read": (run(60, lambda n: zero(judge__boxed=0.0)), set()),
    "a temperature of 3": (
        run(60, lambda n: zero(rollout__entropy=3.0 + 0.02 * n, judge__boxed=0.0)),
        set(),
    ),
    "entropy rises while success was never above 0": (
        run(60, lambda n: zero(rollout__entropy=0.1 if n < 5 else 3.0)),
        set(),
    ),
    "answers become unreadable while success was never above 0": (
        run(60, lambda n: zero(judge__boxed=1.0 if n < 5 else 0.0)),
        set(),
    ),
    "large updates and success 0 from the first step on": (run(60, lambda n: zero(kl=0.5)), set()),
    "entropy was never measured before": (
        run(60, lambda n: {"rollout__entropy": None} if n <= 4 else zero(rollout__entropy=2.0)),
        set(),
    ),
    "an unreadable share was never measured before": (
        run(60, lambda n: {} if n <= 4 else zero(judge__unreadable=1.0)),
        set(),
    ),
    "a KL of 0.2 in each update, success as before": (run(80, after(20, kl=0.2)), set()),
    "entropy five times as high, success as before": (run(80, after(20, rollout__entropy=0.6)), set()),
    "a service fails in the middle": (run(80, after(40, **zero(judge__boxed=0.0))), set()),
    "success falls in a step of two attempts": (
        run(80, lambda n: {"rollout__episodes": 2.0, "rollout__groups": 1.0, "success__mean": float(n % 3 == 0) / 2,
                           "kl": 0.12 if n % 9 > 6 else 0.01}),
        set(),
    ),
    "old weights make the KL": (run(80, after(40, **zero(kl=0.4, staleness__max=4.0))), set()),
    "updates of 0.5 nats from the fourth on": (run(60, after(4, **zero(kl=0.5))), {"learning_rate"}),
    "one step per update, entropy jumps in the sixth": (
        run(60, after(5, **zero(rollout__entropy=2.0))),
        {"learning_rate"},
    ),
    "one step per update, unreadable in the fourth": (run(60, after(3, **zero(judge__boxed=0.0))), {"learning_rate"}),
    "a late break with large updates": (run(80, after(50, **zero(kl=0.5))), {"learning_rate"}),
    "a late break without": (run(80, after(50, **zero(rollout__entropy=2.0))), {"policy_broke"}),
    "an entropy coefficient of 1": (
        run(60, lambda n: {"loss": -0.1, "pg_loss": 0.01, "logit_grad__entropy": 0.11, "logit_grad__kl": None}
            | (zero(rollout__entropy=2.0) if n > 8 else {})),
        {"regularizer_dominates"},
    ),
    "the same in rows of an older run": (
        run(60, lambda n: {"loss": -0.1, "pg_loss": 0.01, "logit_grad__policy": None, "logit_grad__kl": None,
                           "kl__ref": None} | (zero(rollout__entropy=2.0) if n > 8 else {})),
        {"regularizer_dominates"},
    ),
    "a negative entropy coefficient": (
        run(60, lambda n: {"loss": 0.11, "pg_loss": 0.01, "logit_grad__entropy": 0.1, "logit_grad__kl": None,
                           "kl__ref": None}),
        {"regularizer_dominates"},
    ),
    "a small entropy coefficient": (
        run(60, lambda n: {"loss": 0.0099, "pg_loss": 0.01, "logit_grad__entropy": 0.0001, "logit_grad__kl": None}),
        set(),
    ),
    "a learning rate of 0": (run(20, lambda n: {"lr": 0.0}), {"learning_rate"}),
}  # fmt: skip
"""What -> its rows, and which of `ACCUSED` are causes."""


@table("what", BROKEN)
def test_a_policy_that_never_moved_accuses_nothing_and_one_that_broke_what_there_is_evidence_for(what: str) -> None:
    rows, expected = BROKEN[what]
    assert ACCUSED & set(raised(rows)) == expected


# ------------------------------------------------------------------------------------------------ 15: silent cases


def rising(n: int, low: float, high: float, steps: int = 60) -> float:
    return low + (high - low) * min(n, steps) / steps


def paid(n: int, low: float, high: float, success: float = 0.3, **numbers: float | None) -> dict[str, float | None]:
    """A reward that rises by itself."""
    wave = 0.03 * (n * 7 % 5 - 2) / 2
    return {"reward__mean": rising(n, low, high), "success__mean": success + wave, **numbers}


def nearly_all(n: int) -> dict[str, float | None]:
    """94 % of the groups have no signal, and no ten steps in a row are below 90 %."""
    equal = 1.0 if n % 2 else 0.875
    return {"adv__zero_frac": equal, "adv__zero_group_frac": equal, "success__mean": 0.03, "reward__mean": 0.03}


SILENT: dict[str, tuple[Rows, list[str]]] = {
    "a keyword is paid": (run(60, lambda n: paid(n, 0.25, 0.95)), ["reward_only"]),
    "a keyword is paid in grades from 1 to 5": (
        run(60, lambda n: paid(n, 2.0, 4.5, reward__std=1.2, reward__max=5.0, reward__min=1.0)),
        ["reward_only"],
    ),
    "length is paid, and success falls": (
        run(60, lambda n: paid(n, 0.2, 0.9) | {"success__mean": rising(n, 0.4, 0.1)}),
        ["reward_success_apart"],
    ),
    "partial credit rises, success is undefined": (run(60, lambda n: paid(n, 0.2, 0.7) | {"success__mean": 0.0}), []),
    "both rise": (run(60, lambda n: paid(n, 0.2, 0.8) | {"success__mean": rising(n, 0.2, 0.8)}), []),
    "the reward rises by a tenth of its spread": (run(60, lambda n: paid(n, 0.30, 0.34)), []),
    "success wavers too much to tell": (
        run(60, lambda n: paid(n, 0.25, 0.95) | {"success__mean": (n * 7 % 10) / 10}),
        [],
    ),
    "the reward rises for twelve steps": (run(12, lambda n: paid(n, 0.25, 0.95)), []),
    "agents have rewards of their own": (run(60, lambda n: paid(n, 0.25, 0.95, reward__wolf__mean=0.5)), []),
    "a tool returns the reference in training": (
        run(40, lambda n: {"success__mean": 0.95, "reward__mean": 0.95, "val__success": 0.2}, every=20),
        ["train_only"],
    ),
    "training is ten points above": (
        run(40, lambda n: {"success__mean": 0.4, "reward__mean": 0.4, "val__success": 0.3}, every=20),
        [],
    ),
    "a greedy validation is ahead": (run(40, lambda n: {"val__success": 0.8}, every=20), []),
    "training learns between two validations": (
        run(20, lambda n: {"success__mean": rising(n, 0.2, 0.9, 20), "reward__mean": rising(n, 0.2, 0.9, 20),
                           "val__success": rising(n, 0.2, 0.9, 20)}, every=20),
        [],
    ),
    "policies that play each other": (
        run(40, lambda n: {"success__mean": 0.95, "reward__mean": 0.95, "val__success": 0.2, "policy__a__lr": 1e-3,
                           "policy__b__lr": 1e-3}, every=20),
        [],
    ),
    "nine tasks of ten are impossible": (run(60, nearly_all), ["nothing_to_learn"]),
    "three groups of four have no signal": (
        run(100, lambda n: {"adv__zero_frac": 0.75, "adv__zero_group_frac": 0.75, "success__mean": 0.1}),
        [],
    ),
    "nearly all groups are solved": (
        run(100, lambda n: {"adv__zero_frac": 0.95, "adv__zero_group_frac": 0.95, "success__mean": 0.95}),
        [],
    ),
    "half of the tasks are solved, the others not yet": (
        run(100, lambda n: {"adv__zero_frac": 0.92, "adv__zero_group_frac": 0.92, "success__mean": 0.5}),
        [],
    ),
    "entropy rises from 3 to 9 nats while success rises": (
        run(60, lambda n: {"rollout__entropy": rising(n, 3.0, 9.0), "success__mean": rising(n, 0.2, 0.5),
                           "reward__mean": rising(n, 0.2, 0.5)}),
        ["entropy_explosion"],
    ),
    "entropy rises from 0.1 to 0.6 nats": (run(60, lambda n: {"rollout__entropy": rising(n, 0.1, 0.6)}), []),
    "all answers of a validation are one word": (
        run(40, lambda n: {"val__same_answer": 0.05 if n < 40 else 0.97}, every=20),
        ["same_answer"],
    ),
    "one word, and it is right": (run(40, lambda n: {"val__same_answer": 1.0, "val__success": 0.95}, every=20), []),
    "one word for eight tasks": (run(40, lambda n: {"val__same_answer": 1.0, "val__tasks": 8.0}, every=20), []),
}  # fmt: skip
"""What -> its rows, and the causes."""


@table("what", SILENT)
def test_what_was_silent_is_raised_and_what_only_looks_like_it_is_not(what: str) -> None:
    rows, expected = SILENT[what]
    assert raised(rows) == expected


# ------------------------------------------------------------------------------------------------ 16: few observations

FEW = {"rollout__episodes": 2.0, "rollout__groups": 1.0, "tokens__generated": 40.0}
OLD_PAIRS = {"rollout__groups": None, "duplicates__evidence": None, "rollout__episodes": 2.0}
CHANCE: dict[str, tuple[Rows, list[str]]] = {
    "three of five pairs are the same": (
        run(5, lambda n: FEW | {"duplicates__share": float(n <= 3), "duplicates__evidence": 0.4 if n <= 3 else -0.7}),
        [],
    ),
    "three of five pairs, in rows of an older run": (
        run(5, lambda n: OLD_PAIRS | {"duplicates__share": float(n <= 3)}),
        [],
    ),
    "all of many pairs, in rows of an older run": (
        run(60, lambda n: OLD_PAIRS | {"duplicates__share": 1.0}),
        ["duplicate_answers"],
    ),
    "one of two episodes meets a limit, now and then": (
        run(60, lambda n: FEW | {"limits__rollout.max_model_len": 0.5 if n % 6 == 0 else 0.0}),
        [],
    ),
    "a third of the episodes meets a limit": (run(20, lambda n: {"limits__rollout.max_model_len": 0.34}), ["cut_off"]),
    "ten rewards in a row are equal": (
        run(5, lambda n: FEW | {"adv__reward_max": 0.0, "reward__mean": 0.0, "adv__zero_frac": 1.0}),
        [],
    ),
    "forty rewards in a row are equal": (
        run(20, lambda n: FEW | {"adv__reward_max": 0.0, "success__mean": 0.0, "adv__zero_frac": 1.0}),
        ["zero_variance"],
    ),
    "eight pairs without a signal": (run(8, lambda n: FEW | {"adv__zero_frac": 1.0, "adv__zero_group_frac": 1.0}), []),
    "forty tokens without a choice": (
        run(18, lambda n: FEW | {"rollout__entropy": 0.001 if n > 12 else 0.1}),
        [],
    ),
    "four thousand tokens without a choice": (
        run(25, lambda n: {"rollout__entropy": 0.001 if n > 12 else 0.1}),
        ["entropy_collapse"],
    ),
    "two of eight episodes fail after none of twenty": (
        run(15, lambda n: FEW | {"rollout__errored_frac": 0.5 if n in (12, 14) else 0.0}),
        [],
    ),
    "a fifth of the episodes fails from the start": (
        run(15, lambda n: {"rollout__errored_frac": 0.2}),
        ["failures_rising"],
    ),
    "three equal attempts are judged differently": (
        run(10, lambda n: {"duplicates__repeats": 0.3, "duplicates__share": 0.02, "duplicates__reward_noise": 0.015}),
        [],
    ),
    "half of the scored episodes of small steps have no token": (
        run(8, lambda n: FEW | {"merge__untrained_rollout_frac": 0.5}),
        [],
    ),
    "answers of three steps are twice as long": (
        run(40, lambda n: {"response_length__mean": 45.0 if 30 < n <= 33 else 20.0}),
        [],
    ),
    "eight steps correlate by chance": (
        run(8, lambda n: {"reward__mean": 0.3 + 0.01 * n, "success__mean": 0.3 - 0.01 * n + 0.03 * (n % 3 == 0)}),
        [],
    ),
    "unreadable answers are counted only where they occur": (
        run(40, lambda n: {"judge__unreadable": 1.0} if n > 20 and n % 2 else {}),
        [],
    ),
    "unreadable answers rise from a known share": (
        run(40, lambda n: {"judge__unreadable": 0.5 if n > 20 else 0.02}),
        ["invalid_rising"],
    ),
}
"""What -> its rows, and the causes."""


@table("what", CHANCE)
def test_a_few_observations_are_no_alarm_and_enough_of_them_are(what: str) -> None:
    rows, expected = CHANCE[what]
    assert raised(rows) == expected


@pytest.mark.parametrize("attempts", [2, 4])
def test_an_engine_that_samples_as_it_says_is_accused_less_often_than_stated(attempts: int) -> None:
    """A thousand steps each of one group: the rule states a probability of 1 % for that many."""
    false = 0
    for seed in range(40):
        rng, total = random.Random(seed), 0.0
        for _ in range(1000):
            p = rng.choice((0.9, 0.6, 0.3, 0.05))  # of the usual answer; the others are never repeated
            seen, s, evidence = False, 0.0, 0.0
            for k in range(attempts):
                usual = rng.random() < p
                if usual and seen:
                    evidence += math.log((s + EXCESS * (1 - s)) / s)
                    continue
                evidence += math.log(1 - EXCESS) if k else 0.0
                s, seen = s + p * usual, seen or usual
            total = max(total + evidence, 0.0)
            if total >= math.log(100_000):
                false += 1
                break
    assert false <= 2


def test_exact_tail_and_lower_bound_agree_with_published_values() -> None:
    assert exact_tail((1, 4), (3, 4)) == pytest.approx(17 / 70)  # Fisher's tea: three of four right by chance
    assert exact_tail((0, 4), (4, 4)) == pytest.approx(1 / 70)
    assert exact_tail((0, 0), (1, 1)) == exact_tail((2, 5), (0, 5)) == pytest.approx(1.0)
    assert lower_bound(8, 10, 1.959964) == pytest.approx(0.4901625, abs=1e-6)  # Wilson 1927
    assert lower_bound(0, 0) == 0
