"""Measure how much noise of the helper model learned rubrics tolerate, and how much votes help.

The helper is scripted (`plugins/astuner_rubrics/tests/true_rubric.py`) and runs in this process: it reads the same
messages as a real one.  Its errors are of two kinds, with a table for each: complete answers that are inverted, and
single grades that are inverted independently.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, cast

from astuner.contracts.errors import AstunerError
from astuner_rubrics.grading import Messages, overall
from astuner_rubrics.labels import read_labels
from astuner_rubrics.learning import Journal, Result, Settings, learn
from benchmarks.report import Report
from plugins.astuner_rubrics.tests.true_rubric import TrueRubric

WEIGHTS = {"source": 4, "example": 2, "polite": 1}
"""Weights of the true rubric: no two qualities outweigh a heavier one, so every pair has a better answer."""
PAIRS, HELD_OUT, UNSEEN = 140, 0.4, 400
LEVELS = (0.0, 0.05, 0.1, 0.2)
VOTES = (1, 3, 5)
SEEDS = tuple(range(5))
GOAL = 0.9
"""Goal of the agreement on held-out pairs."""


@dataclass(frozen=True)
class Recovered:
    """Result of one rubric file, learned with one noisy helper."""

    held_out: float
    """Agreement on the held-out pairs that `astuner judge learn` reports; the noisy helper grades them."""
    rubric: float
    """Return the agreement with the truth on unseen pairs when a helper without noise reads the rubrics."""


class InProcess:
    """Helper model that is a function, with the part of a `Journal` that `learn` needs."""

    model = "scripted"

    def __init__(self, world: TrueRubric) -> None:
        self._world = world

    async def ask(self, messages: Messages, *, purpose: str, answer: type[Any], sample: int) -> Any:
        return answer.model_validate(self._world({"messages": messages}))


def run(*, quick: bool) -> Report:
    seeds, levels, votes = (SEEDS[:1], (0.1,), (1, 3)) if quick else (SEEDS, LEVELS, VOTES)
    report = Report(
        "Rubrics learned with a noisy helper model",
        f"`astuner judge learn` on {PAIRS} pairs, {HELD_OUT:.0%} of them held out, whose true rubric is known (three "
        "qualities that count 4 : 2 : 1, and two that count nothing), with a scripted helper that follows the true "
        f"rubric, with errors. Mean (minimum) of {len(seeds)} seeds. *Held out* is the agreement that the command "
        "reports: the same noisy helper grades, with as many votes. *Rubric* is the quality of the learned rubrics: "
        f"read without noise, on {UNSEEN} unseen pairs. The goal is {GOAL:.0%}.",
    )
    for kind, title, says in (
        ("noise", "Whole answers", "share of answers of the helper with all grades inverted, and of proposals that "
                                   "are junk, inverted, or off topic"),
        ("grade_noise", "Single grades", "share of grades that are inverted, each independently"),
    ):  # fmt: skip
        report.heading(title)
        report.text(f"The first column: {says}.")
        header = ["errs", *(f"{name}, {v} vote{'s' * (v > 1)}" for name in ("held out", "rubric") for v in votes)]
        rows = []
        for level in levels:
            found = {v: [recover(seed, v, **{kind: level}) for seed in seeds] for v in votes}
            measured = [[one.held_out for one in found[v]] for v in votes]
            worth = [[one.rubric for one in found[v]] for v in votes]
            rows.append([f"{level:.0%}", *(f"{mean(each):.2f} ({min(each):.2f})" for each in [*measured, *worth])])
        report.table(header, rows)
    return report


def recover(seed: int, votes: int, **noise: float) -> Recovered:
    """Learn rubrics and return their agreement; it is 0 if learning failed."""
    world = TrueRubric(WEIGHTS, seed=seed, **noise)
    with tempfile.TemporaryDirectory(prefix="rubric-noise-") as folder:
        path = Path(folder) / "samples.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in world.samples(PAIRS)), encoding="utf-8")
        labels = read_labels(path)
    settings = Settings(votes=votes, held_out=HELD_OUT, seed=seed, force=True)
    try:
        result = asyncio.run(learn(labels, settings, cast(Journal, InProcess(world)), None, lambda line: None))
    except AstunerError:
        return Recovered(0.0, 0.0)
    return Recovered(result.held_out.share, _without_noise(result, TrueRubric(WEIGHTS, seed=10_000 + seed)))


def _without_noise(result: Result, world: TrueRubric) -> float:
    rubrics: Sequence[Any] = result.rubrics.rubrics
    right = 0
    for row in world.samples(UNSEEN):
        grades = tuple(tuple(world.grade(r.text, answer, 0, 10) for answer in row["answers"]) for r in rubrics)
        one, other = overall(grades, [r.weight for r in rubrics])
        right += one != other and (one > other) == (row["preferred"] == 0)
    return right / UNSEEN
