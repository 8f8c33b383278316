"""Compare runs for the page: different settings, curves, and the tasks that each side solves.

The numbers are those of `astuner diff`, computed by the same functions. Runs that differ only in the seed form a group:
its curves are the mean, with a band from the lowest to the highest value, at the steps that all of them have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

from astuner.contracts.statistics import mean
from astuner.contracts.types import Split
from astuner_report.compare import UNINTERESTING, Measured, compared
from astuner_report.compare.yardsticks import yardsticks
from astuner_view.book import Book

FEWEST, MOST_RUNS, MOST_METRICS = 2, 20, 60
MOST_TASKS = 500
"""Maximum number of won, and of lost, tasks in the list."""
_OF_A_SEED = (*UNINTERESTING, "astuner.seed")
_LARGEST = 1e300
Curve: TypeAlias = Mapping[int, float]
"""Step -> value."""


def overview(books: Sequence[Book], metrics: Sequence[str]) -> dict[str, Any]:
    """Return the groups of some runs, their different settings, and the curves of some metrics."""
    apart = [{key: value for key, value in book.settings().items() if key not in _OF_A_SEED} for book in books]
    groups: list[list[int]] = []
    for i, one in enumerate(apart):
        like = next((group for group in groups if apart[group[0]] == one), None)
        groups.append([i]) if like is None else like.append(i)
    firsts = [apart[group[0]] for group in groups]
    keys = dict.fromkeys(key for one in firsts for key in one)
    values = {key: [one.get(key) for one in firsts] for key in keys}
    differing = [{"key": key, "values": of} for key, of in values.items() if any(value != of[0] for value in of)]
    rows = [book.metrics().rows for book in books]
    of_runs = [_curves(one, metrics) for one in rows]
    names = {name for row in rows for name in set().union(*row)} - {"step", "time"}
    steps = sorted({step for of_run in of_runs for curve in of_run.values() for step in curve})
    return {
        "groups": [
            {
                "runs": [{"id": books[i].place.id, "name": books[i].place.name} for i in group],
                "curves": {
                    name: _banded([of_runs[i][name] for i in group], steps)
                    for name in metrics
                    if any(of_runs[i][name] for i in group)
                },
            }
            for group in groups
        ],
        "steps": steps,
        "metrics": sorted(names),
        "settings": differing,
        "yardsticks": yardsticks(firsts, (), differing, Split.VALIDATION, (), {"only_a": (), "only_b": ()}),
        "problems": [f"{book.place.name}: {text}" for book in books for text in book.problems()],
    }


def _curves(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {name: {} for name in names}
    for row in rows:
        step = row.get("step")
        if type(step) is not int or not 0 <= step < 2**53:
            continue
        for name, curve in found.items():
            value: Any = row.get(name)
            if type(value) in (int, float) and -_LARGEST < value < _LARGEST:  # excludes NaN
                curve[step] = value
    return found


def _banded(curves: Sequence[Curve], steps: Sequence[int]) -> dict[str, list[float | None]]:
    if len(curves) == 1:
        return {"mean": [curves[0].get(step) for step in steps]}
    found: dict[str, list[float | None]] = {"mean": [], "low": [], "high": []}
    for step in steps:
        values = [curve[step] for curve in curves if step in curve]
        whole = len(values) == len(curves)
        for name, of in (("mean", mean), ("low", min), ("high", max)):
            found[name].append(of(values) if whole else None)
    return found


def tasks(sides: Mapping[str, Sequence[Book]], found: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    """Return the comparison of `astuner diff --common` for the sides a and b, with run IDs and each task's episodes."""
    settings = {side: [book.settings() for book in books] for side, books in sides.items()}
    said = compared(found["a"], found["b"], settings["a"], settings["b"], common=True)
    for side, books in sides.items():
        for run, book in zip(said[side], books, strict=True):
            run["run"] = book.place.id
    for kind in ("won", "lost"):
        said[f"{kind}_total"] = len(said[kind])
        said[kind] = said[kind][:MOST_TASKS]
        for flip in said[kind]:
            flip.pop("command", None)  # contains paths of this machine
        for flip, side in product(said[kind], sides):
            of = sorted(  # runs that show the difference come first
                zip(sides[side], found[side], strict=True),
                key=lambda one: one[1].tasks[flip["key"]].means["success"],
                reverse=(kind == "won") == (side == "b"),
            )
            flip[f"episodes_{side}"] = [
                (book.place.id, name) for book, m in of for name in m.tasks[flip["key"]].episodes
            ]
    return said
