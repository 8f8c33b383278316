"""Every example that shows learning on held-out tasks, with five seeds, the default among them.

Each is run as its README says, in processes and run folders of their own; what counts is where a run ends, not its best
moment.  `feedback`, `rubrics` and `flywheel` need people beside the run: their own scripts measure them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report import Report
from benchmarks.trained import AS_SHIPPED, FRESH, REPOSITORY, Condition, Runs, Trained, train_all

SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Example:
    """An example, and what somebody gets who understands nothing of its task."""

    name: str
    naive: float
    """Success on its held-out tasks."""
    how: str
    """Of whom that is."""
    options: Sequence[str] = ()

    @property
    def command(self) -> tuple[str, ...]:
        return (str(REPOSITORY / f"examples/{self.name}/{self.name}.yaml"), *self.options, "--backbone", "local")


EXAMPLES = (
    Example("math_agent", 0.25, "the operation is drawn at random, and the numbers are in the right order"),
    Example("frozen_lake", 0.21, "goes down or right without looking", ("--with", "frozen_lake")),
    Example("werewolves", 0.25, "the untrained werewolves"),
)


def run(*, quick: bool, runs: Runs = FRESH) -> Report:
    report = Report(
        "The examples that learn",
        f"`astuner run examples/NAME/NAME.yaml --backbone local`, seeds {', '.join(map(str, SEEDS))}: success on the "
        "held-out tasks before and at the end, with Wilson's 95 % interval. *Above* means that the whole interval at "
        "the end lies above what somebody gets who understands nothing.",
    )
    rows = []
    for example in EXAMPLES:
        arguments = (*example.command, *(("astuner.trainer_common.total_steps=2",) if quick else ()))
        folder = Runs(runs.folder / example.name if runs.folder else None, runs.jobs)
        tried = {AS_SHIPPED: Condition((), SEEDS[:1] if quick else SEEDS)}
        found = train_all(tried, arguments, 1, folder)[AS_SHIPPED]
        rows += [_row(example, run) for run in found]
    report.table(("example", "seed", "before", "at the end", "naive", "", "seconds"), rows)
    report.text("Naive: " + "; ".join(f"*{e.name}*, {e.how}: {e.naive:.0%}" for e in EXAMPLES) + ".")
    return report


def _row(example: Example, run: Trained) -> tuple[object, ...]:
    above = "above" if run.after.low > example.naive else "NOT ABOVE"
    return example.name, run.seed, run.before, run.after, f"{example.naive:.0%}", above, f"{run.seconds:.0f}"
