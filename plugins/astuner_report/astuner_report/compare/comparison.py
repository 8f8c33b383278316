"""Two sides, each one run or several seeds of it, compared on the same tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from astuner import RunDir
from astuner.config.loaded import RESOLVED
from astuner.contracts.errors import ConfigError, DataError
from astuner.contracts.types import Split
from astuner.rollout.metrics import mean
from astuner_record.statistics import (
    Interval,
    PairedTable,
    bootstrap_interval,
    crossed_bootstrap_interval,
    mcnemar_exact,
    paired_success_interval,
    sign_flip_test,
)
from astuner_report.compare.measures import MEASURES, Measured, Pairing, measure, pair

TESTED = ("success", "reward")
"""The measures that get a p-value; for the others the interval says enough."""
FLIPPED = 0.5
"""A task whose success differs by this much is listed as won or lost."""
UNINTERESTING = ("astuner.experiment_name", "astuner.experiment_dir")
"""Where a run is written differs always."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key with other values on one side than on the other."""

    key: str
    a: tuple[Any, ...]
    """The different values of the runs of this side; None where a run has no such key."""
    b: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class MeasureDifference:
    """One measure on both sides."""

    measure: str
    a: float
    b: float
    difference: float
    """b - a."""
    interval: Interval
    """95 %, of the difference."""
    interval_by: str
    """How it was found."""
    p_value: float | None
    """None: not tested."""
    test: str


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A task that one side solves and the other does not."""

    task_id: str
    query: str
    success_a: float
    success_b: float
    episodes_a: tuple[str, ...]
    """Ids, with the run's name before them where a side has several."""
    episodes_b: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that `astuner diff` says."""

    a: tuple[Measured, ...]
    b: tuple[Measured, ...]
    settings: tuple[Difference, ...]
    pairing: Pairing
    measures: tuple[MeasureDifference, ...]
    table: PairedTable | None
    """Of success; None unless every task has one episode on each side."""
    won: tuple[Flip, ...]
    """Tasks that b solves and a does not."""
    lost: tuple[Flip, ...]
    seed: int


def compare(
    a: Sequence[Path],
    b: Sequence[Path],
    *,
    split: Split = Split.VALIDATION,
    step_a: int | None = None,
    step_b: int | None = None,
    by: str = "task",
    common: bool = False,
    seed: int = 0,
) -> Comparison:
    """Compare the runs of ``b`` with those of ``a``.

    :param a: run folders; several are seeds of the same experiment.
    :param step_a: of all runs of ``a``; the newest validation by default.
    :param by: one of `astuner_report.compare.measures.BY`.
    :param common: compare the tasks that are in all runs, though some have others.
    :param seed: of the random draws.
    :raises DataError: a run has no such episodes, or the task sets differ.
    """
    if repeated := {run.resolve() for run in a} & {run.resolve() for run in b} if step_a == step_b else set():
        raise ConfigError(
            f"{min(repeated)} is on both sides; give two runs, or two steps of one: --step-a N --step-b M"
        )
    settings = _differences(a, b)
    of_a = tuple(measure(run, split=split, step=step_a, by=by) for run in a)
    of_b = tuple(measure(run, split=split, step=step_b, by=by) for run in b)
    pairing = pair(of_a, of_b, common=common)
    table = _table(of_a, of_b, pairing.tasks)
    flips = _flips(of_a, of_b, pairing.tasks)
    return Comparison(
        a=of_a,
        b=of_b,
        settings=tuple(settings),
        pairing=pairing,
        measures=tuple(_difference(name, of_a, of_b, pairing.tasks, table, seed) for name in MEASURES),
        table=table,
        won=tuple(f for f in flips if f.success_b > f.success_a),
        lost=tuple(f for f in flips if f.success_b < f.success_a),
        seed=seed,
    )


def _differences(a: Sequence[Path], b: Sequence[Path]) -> list[Difference]:
    """The keys that differ, in the order of the config.

    :raises DataError: a run has no ``resolved.yaml``.
    """
    of_a, of_b = [[_settings(run) for run in side] for side in (a, b)]
    keys = dict.fromkeys(key for run in (*of_a, *of_b) for key in run)
    found = []
    for key in keys:
        values_a, values_b = [_different([run.get(key) for run in side]) for side in (of_a, of_b)]
        if values_a != values_b and key not in UNINTERESTING:
            found.append(Difference(key=key, a=values_a, b=values_b))
    return found


def _settings(run: Path) -> dict[str, Any]:
    path = RunDir(run).resolved
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise DataError(f"{run} is not a run folder: it has no {path.name}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise DataError(f"{path} cannot be read: {e}") from None
    data.pop(RESOLVED, None)
    return dict(_leaves(data, ""))


def _leaves(data: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _different(values: Sequence[Any]) -> tuple[Any, ...]:
    """Without repetitions, in a fixed order; values may be lists."""
    unique: list[Any] = []
    for value in values:
        if value not in unique:
            unique.append(value)
    return tuple(sorted(unique, key=repr))


def _table(a: Sequence[Measured], b: Sequence[Measured], tasks: Sequence[str]) -> PairedTable | None:
    if len(a) > 1 or len(b) > 1 or any(len(run.tasks[key].episodes) != 1 for run in (*a, *b) for key in tasks):
        return None
    return PairedTable.of([(_success(a[0], key) == 1, _success(b[0], key) == 1) for key in tasks])


def _success(run: Measured, key: str) -> float:
    return run.tasks[key].means["success"]


def _difference(
    name: str,
    a: Sequence[Measured],
    b: Sequence[Measured],
    tasks: Sequence[str],
    table: PairedTable | None,
    seed: int,
) -> MeasureDifference:
    values_a, values_b = [[[run.tasks[key].means[name] for key in tasks] for run in side] for side in (a, b)]
    mean_a, mean_b = [mean([mean(run) for run in side]) for side in (values_a, values_b)]
    several = len(a) > 1 or len(b) > 1
    p_value: float | None = None
    test = ""
    if several:
        interval = crossed_bootstrap_interval(values_b, values_a, seed=seed)
        by = "bootstrap over runs and tasks"
    else:
        each = [y - x for x, y in zip(values_a[0], values_b[0], strict=True)]
        interval, by = bootstrap_interval(each, seed=seed), "bootstrap over tasks"
        if name == "success" and table is not None:
            interval, by = paired_success_interval(table), "Newcombe's paired score interval"
            p_value, test = mcnemar_exact(table), "McNemar's exact test"
        elif name in TESTED:
            p_value, test = sign_flip_test(each, seed=seed), "permutation test of signs"
    return MeasureDifference(
        measure=name,
        a=mean_a,
        b=mean_b,
        difference=mean_b - mean_a,
        interval=interval,
        interval_by=by,
        p_value=p_value,
        test=test,
    )


def _flips(a: Sequence[Measured], b: Sequence[Measured], tasks: Sequence[str]) -> list[Flip]:
    """The tasks that flipped, the clearest first."""
    found = []
    for key in tasks:
        of_a, of_b = [mean([_success(run, key) for run in side]) for side in (a, b)]
        if abs(of_b - of_a) >= FLIPPED:
            task = a[0].tasks[key]
            found.append(
                Flip(
                    task_id=task.task_id,
                    query=task.query,
                    success_a=of_a,
                    success_b=of_b,
                    episodes_a=tuple(_episodes(a, key)),
                    episodes_b=tuple(_episodes(b, key)),
                )
            )
    return sorted(found, key=lambda flip: -abs(flip.success_b - flip.success_a))


def _episodes(side: Sequence[Measured], key: str) -> Iterable[str]:
    for run in side:
        for episode in run.tasks[key].episodes:
            yield episode if len(side) == 1 else f"{run.run.name}/{episode}"


def as_dict(comparison: Comparison) -> Mapping[str, object]:
    """For ``--json``."""
    return {
        "a": [_run(run) for run in comparison.a],
        "b": [_run(run) for run in comparison.b],
        "settings": [{"key": d.key, "a": list(d.a), "b": list(d.b)} for d in comparison.settings],
        "tasks": {
            "paired": len(comparison.pairing.tasks),
            "only_a": [t.task_id for t in comparison.pairing.only_a],
            "only_b": [t.task_id for t in comparison.pairing.only_b],
            "changed": list(comparison.pairing.changed),
            "unscored": dict(comparison.pairing.unscored),
        },
        "measures": {
            m.measure: {
                "a": m.a,
                "b": m.b,
                "difference": m.difference,
                "ci_low": m.interval.low,
                "ci_high": m.interval.high,
                "ci_by": m.interval_by,
                "p_value": m.p_value,
                "test": m.test,
            }
            for m in comparison.measures
        },
        "table": vars(comparison.table) if comparison.table else None,
        "won": [vars(flip) for flip in comparison.won],
        "lost": [vars(flip) for flip in comparison.lost],
        "seed": comparison.seed,
    }


def _run(run: Measured) -> Mapping[str, object]:
    return {
        "run": str(run.run),
        "split": run.split.value,
        "step": run.step,
        "tasks": len(run.tasks),
        "episodes": run.episodes,
        "stop_reasons": dict(run.stop_reasons),
    }
