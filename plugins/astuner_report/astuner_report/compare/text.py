"""A comparison as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from astuner_report.compare.comparison import Comparison, Flip, MeasureDifference
from astuner_report.compare.measures import Measured

_SHARES = ("success", "cut off")
_WIDEST = 60


def as_text(comparison: Comparison, *, show: int = 10) -> str:
    """:param show: how many differing settings and flipped tasks are listed of each kind."""
    return "\n".join(_lines(comparison, show))


def _lines(comparison: Comparison, show: int) -> Iterator[str]:
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        for run in side:
            yield f"{name}  {_run(run)}"
    yield ""
    yield from _settings(comparison, show)
    yield ""
    yield from _tasks(comparison)
    yield ""
    yield f"{'':<17}{'A':>10}{'B':>10}{'B - A':>10}   95 % interval         p"
    for measure in comparison.measures:
        yield _measure(measure)
    yield ""
    yield from _notes(comparison)
    for name, flips in (("won: B solves them, A does not", comparison.won), ("lost", comparison.lost)):
        if flips:
            yield ""
            yield f"{len(flips)} tasks {name}"
            yield from map(_flip, flips[:show])
            if len(flips) > show:
                yield f"  and {len(flips) - show} more: --show {len(flips)}, or --json"


def _run(run: Measured) -> str:
    at = "all steps" if run.step is None else f"step {run.step}"
    endings = ", ".join(f"{n} {reason}" for reason, n in sorted(run.stop_reasons.items(), key=lambda e: -e[1]))
    return f"{run.run}: {run.split.value} of {at}, {len(run.tasks)} tasks, {run.episodes} episodes ({endings})"


def _settings(comparison: Comparison, show: int) -> Iterator[str]:
    found = comparison.settings
    if not found:
        yield "settings: the same"
        return
    yield f"settings that differ ({len(found)}), A | B"
    for difference in found[:show]:
        yield f"  {difference.key}: {_values(difference.a)} | {_values(difference.b)}"
    if len(found) > show:
        yield f"  and {len(found) - show} more: --show {len(found)}, or --json"


def _values(values: Sequence[Any]) -> str:
    text = " or ".join("(none)" if value is None else str(value) for value in values)
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def _tasks(comparison: Comparison) -> Iterator[str]:
    pairing = comparison.pairing
    yield f"{len(pairing.tasks)} tasks are in all runs and compared"
    for name, left in (("A", pairing.only_a), ("B", pairing.only_b)):
        if left:
            yield f"  {len(left)} are left out: only in {name}, e.g. {left[0].task_id}"
    if pairing.unscored:
        task, why = next(iter(pairing.unscored.items()))
        yield f"  {len(pairing.unscored)} are left out: without a verdict in some run, e.g. {task} ({why})"


def _measure(m: MeasureDifference) -> str:
    if m.measure in _SHARES:
        numbers = [f"{m.a:.1%}", f"{m.b:.1%}", f"{m.difference:+.1%}"]
        interval = f"[{m.interval.low:+.1%}, {m.interval.high:+.1%}]"
    else:
        numbers = [f"{m.a:.4g}", f"{m.b:.4g}", f"{m.difference:+.4g}"]
        interval = f"[{m.interval.low:+.4g}, {m.interval.high:+.4g}]"
    p_value = "" if m.p_value is None else f"{m.p_value:.2g} ({m.test})"
    return f"{m.measure:<17}{numbers[0]:>10}{numbers[1]:>10}{numbers[2]:>10}   {interval:<20}  {p_value}".rstrip()


def _notes(comparison: Comparison) -> Iterator[str]:
    kinds = {m.interval_by: None for m in comparison.measures}
    by = ", ".join(f"{kind} ({_named(comparison, kind)})" if len(kinds) > 1 else kind for kind in kinds)
    yield f"intervals: {by}; random draws have the seed {comparison.seed}"
    several = len(comparison.a) > 1 or len(comparison.b) > 1
    if several:
        yield "they cover other seeds and other tasks of the same kind; with fewer than five seeds they are too narrow"
    else:
        yield "they cover other tasks of the same kind, not other seeds: give several runs of each to say that"
    if table := comparison.table:
        yield (
            f"both solve {table.both} tasks, only A {table.only_a}, only B {table.only_b}, neither {table.neither}"
        )


def _named(comparison: Comparison, kind: str) -> str:
    names = [m.measure for m in comparison.measures if m.interval_by == kind]
    return names[0] if len(names) == 1 else "the others"


def _flip(flip: Flip) -> str:
    query = " ".join(flip.query.split())
    shares = "" if {flip.success_a, flip.success_b} == {0.0, 1.0} else f" {flip.success_a:.0%} → {flip.success_b:.0%}"
    return (
        f"  {flip.task_id}{shares}  {query[:_WIDEST]}\n"
        f"      A: {' '.join(flip.episodes_a)}   B: {' '.join(flip.episodes_b)}"
    )
