"""Every example that shows learning, with five seeds, the default among them.

Each is run as its README says, in processes and run folders of their own; what counts is where a run ends, not its best
moment.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Report
from benchmarks.trained import AS_SHIPPED, FRESH, REPOSITORY, Command, Condition, Runs, Trained, train_all

EXAMPLES = REPOSITORY / "examples"
SEEDS = (0, 1, 2, 3, 4)
MATH_AGENT = EXAMPLES / "math_agent/math_agent.yaml"


@dataclass(frozen=True)
class Example:
    """An example, and what somebody gets who understands nothing of its task."""

    name: str
    naive: float
    """Success on its held-out tasks."""
    how: str
    """Of whom that is."""
    options: Sequence[str] = ()
    beside: Path | None = None
    measured_by: Path | None = None

    def command(self, *overrides: str) -> Command:
        file = EXAMPLES / f"{self.name}/{self.name}.yaml"
        arguments = (str(file), *self.options, "--backbone", "local", *overrides)
        return Command(arguments, 100, self.beside, self.measured_by)


MEASURED = (
    Example("math_agent", 0.25, "the operation is drawn at random, and the numbers are in the right order"),
    Example("frozen_lake", 0.21, "goes down or right without looking", ("--with", "frozen_lake")),
    Example("werewolves", 0.39, "the untrained werewolves, against the same village"),
    Example(
        "feedback",
        0.25,
        "as of math_agent, whose held-out tasks and agent measure it: no user has asked these questions",
        ("--with", "feedback"),
        EXAMPLES / "feedback/users.py",
        MATH_AGENT,
    ),
)
SCRIPTED = ("rubrics", "flywheel")
"""Examples of several runs each, whose own scripts measure them against their control arms."""


def run(*, quick: bool, runs: Runs = FRESH) -> Report:
    seeds = SEEDS[:1] if quick else SEEDS
    report = Report(
        "The examples that learn",
        f"`astuner run examples/NAME/NAME.yaml --backbone local`, seeds {', '.join(map(str, seeds))}: success on the "
        "held-out tasks before and at the end, with Wilson's 95 % interval. *Above* means that the whole interval at "
        "the end lies above what somebody gets who understands nothing.",
    )
    rows = []
    for example in MEASURED:
        command = example.command(*(("astuner.trainer_common.total_steps=2",) if quick else ()))
        folder = Runs(runs.folder / example.name if runs.folder else None, runs.jobs)
        found = train_all({AS_SHIPPED: Condition((), seeds)}, command, folder)[AS_SHIPPED]
        rows += [_row(example, run) for run in found]
    report.table(("example", "seed", "before", "at the end", "naive", "", "seconds"), rows)
    report.text("Naive: " + "; ".join(f"*{e.name}*, {e.how}: {e.naive:.0%}" for e in MEASURED) + ".")
    for name in SCRIPTED:
        report.heading(name)
        report.text(_scripted(name, seeds, runs.folder, quick=quick))
    return report


def _row(example: Example, run: Trained) -> tuple[object, ...]:
    above = "above" if run.after.low > example.naive else "NOT ABOVE"
    return example.name, run.seed, run.before, run.after, f"{example.naive:.0%}", above, f"{run.seconds:.0f}"


def _scripted(name: str, seeds: Sequence[int], kept: Path | None, *, quick: bool) -> str:
    """What an example's own script found; it keeps its stages, so that a second start goes on."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = (kept.resolve() if kept else Path(temporary)) / name
        command = [sys.executable, str(EXAMPLES / name / f"{name}.py"), "--folder", str(folder)]
        command += ["--seeds", *map(str, seeds), *(("--quick",) if quick else ())]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return (folder / "results.md").read_text(encoding="utf-8").strip()
