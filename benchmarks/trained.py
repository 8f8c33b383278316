"""Start complete training runs from the command line and check whether they learned.

Each run is an ``astuner run`` in a separate process with a fresh run folder; all results are read from the files of the
run.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Report

REPOSITORY = Path(__file__).resolve().parent.parent
AS_SHIPPED = "as shipped"
"""Name of the condition without changes."""
DRAWS = 10_000
"""Number of bootstrap draws."""


@dataclass(frozen=True)
class Validation:
    """Success on held-out tasks, with Wilson's 95 % interval."""

    step: int
    success: float
    low: float
    high: float
    tasks: int

    def __str__(self) -> str:
        return f"{self.success:.1%} [{self.low:.1%}, {self.high:.1%}]"


@dataclass(frozen=True)
class Trained:
    """One finished run."""

    seed: int
    validations: Sequence[Validation]
    rewards: Sequence[float]
    """Mean training reward of each step."""
    seconds: float
    """Duration of the command, including the start of Python and validations; for an interrupted run, of its steps."""
    rows: Sequence[Mapping[str, Any]]
    """Rows of the run's ``metrics.jsonl``."""
    episodes: Mapping[int, Sequence[Mapping[str, Any]]]
    """Step -> episodes of its validation, in the order of the tasks; empty for a run with external evaluation."""

    @property
    def before(self) -> Validation:
        return self.validations[0]

    @property
    def after(self) -> Validation:
        return self.validations[-1]


@dataclass(frozen=True)
class Command:
    """An ``astuner run`` command, and how its runs are evaluated."""

    arguments: Sequence[str]
    least_held_out: int = 1
    """Minimum number of held-out tasks."""
    beside: Path | None = None
    """Program that runs alongside the command, such as simulated users of the model."""
    measured_by: Path | None = None
    """Experiment whose held-out tasks evaluate the run, if the run itself has no validation."""


@dataclass(frozen=True)
class Condition:
    """Changes of a command, and the seeds to run."""

    overrides: Sequence[str]
    seeds: Sequence[int]
    learns: bool = True
    """True if runs of this condition should learn."""


@dataclass(frozen=True)
class Runs:
    """Folder of the runs, and how many run concurrently."""

    folder: Path | None = None
    """Folder in which finished runs are read instead of repeated; None keeps no runs."""
    jobs: int = 1


FRESH = Runs()
"""Start every run, one after another, and keep none."""


def train(seed: int, command: Command, folder: Path, overrides: Sequence[str] = ()) -> Trained:
    """Train with a seed in ``folder`` and return the result; read a finished run without repeating it.

    :raises RuntimeError: The run failed, or has no usable validation before training.
    """
    took = folder / "seconds.json"
    if not took.exists():
        arguments = ["run", *command.arguments, *overrides, "--seed", str(seed)]  # resumes an interrupted run
        folder.parent.mkdir(parents=True, exist_ok=True)
        started, cut_off = time.perf_counter(), folder.exists()
        home = folder.with_name(f"{folder.name}.home")  # access files, of this run alone
        with _beside(command.beside, home):
            run_astuner([*arguments, "--run-dir", str(folder)], home)
        seconds = _working(_rows(folder)) if cut_off else time.perf_counter() - started
        took.write_text(json.dumps({"seconds": seconds}))
        if command.measured_by is None:  # the weights are not needed anymore, and a real model's take gigabytes
            for weights in ("checkpoints", "resume"):
                if (folder / weights).exists():  # a run may have saved no checkpoint to resume from
                    shutil.rmtree(folder / weights)
    rows = _rows(folder)
    if command.measured_by is None:
        validations = [_validation(row) for row in rows if "val/success" in row]
    else:
        validations = _evaluated(command.measured_by, folder, max(row["step"] for row in rows))
    if validations[0].tasks < command.least_held_out or validations[0].step != 0:
        raise RuntimeError(
            f"the first validation was {validations[0]} at step {validations[0].step}: not a valid baseline"
        )
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    kept = folder / "episodes"
    episodes = {int(path.stem.rpartition("_")[2]): _lines(path) for path in sorted(kept.glob("validation_*.jsonl"))}
    return Trained(seed, validations, rewards, json.loads(took.read_text())["seconds"], rows, episodes)


def _rows(folder: Path) -> list[dict[str, Any]]:
    return _lines(folder / "metrics.jsonl")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _working(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds in steps and validations."""
    return sum(row.get("time/step", 0.0) + row.get("time/validation", 0.0) for row in rows)


def is_kept(runs: Runs, name: str, seed: int) -> bool:
    """Return whether the run of a condition has finished."""
    return runs.folder is not None and (run_folder(runs.folder, name, seed) / "seconds.json").exists()


def run_folder(root: Path, name: str, seed: int) -> Path:
    """Return the folder of a condition's run."""
    return root / name.replace(" ", "-") / str(seed)


def run_astuner(arguments: Sequence[str], home: Path) -> str:
    """Run a command and return its output."""
    command = [sys.executable, "-m", "astuner", *arguments]
    environ = {**os.environ, "ASTUNER_HOME": str(home)}
    done = subprocess.run(command, cwd=home.parent, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


@contextmanager
def _beside(program: Path | None, home: Path) -> Iterator[None]:
    """Run a Python program during the block."""
    if program is None:
        yield
        return
    environ = {**os.environ, "ASTUNER_HOME": str(home)}
    process = subprocess.Popen([sys.executable, str(program)], env=environ, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _evaluated(experiment: Path, folder: Path, steps: int) -> list[Validation]:
    """Return the results of ``astuner eval`` on an experiment's held-out tasks, for the base and the latest model."""
    kept = folder / "evaluated.json"
    if not kept.exists():
        asked = ["eval", str(experiment), "--backbone", "local", "--run-dir", str(folder), "--json", "--checkpoint"]
        found = [json.loads(run_astuner([*asked, which], folder)) for which in ("base", "latest")]
        kept.write_text(json.dumps(found))
    return [
        Validation(step, said["success"], said["ci_low"], said["ci_high"], said["tasks"])
        for step, said in zip((0, steps), json.loads(kept.read_text()), strict=True)
    ]


def train_all(conditions: Mapping[str, Condition], command: Command, runs: Runs = FRESH) -> dict[str, list[Trained]]:
    """Run every seed under every condition; return the runs by condition, in the order of its seeds."""
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(runs.jobs) as pool:
        root = runs.folder.resolve() if runs.folder else Path(temporary)

        def one(name: str, condition: Condition, seed: int) -> Trained:
            print(f"{name}, seed {seed}: started or resumed", file=sys.stderr)
            run = train(seed, command, run_folder(root, name, seed), condition.overrides)
            print(f"{name}, seed {seed}: {run.before} -> {run.after}, {run.seconds:.0f} s", file=sys.stderr)
            return run

        begun = {n: [pool.submit(one, n, c, seed) for seed in c.seeds] for n, c in conditions.items()}
        return {name: [run.result() for run in waiting] for name, waiting in begun.items()}


def table(report: Report, found: Mapping[str, Sequence[Trained]]) -> None:
    """Add a row for each run."""
    report.table(
        ("run", "seed", "before", "after", "steps", "seconds"),
        [
            (condition, r.seed, r.before, r.after, r.after.step, f"{r.seconds:.0f}")
            for condition, runs in found.items()
            for r in runs
        ],
    )


def verdict(
    report: Report,
    found: Mapping[str, Sequence[Trained]],
    conditions: Mapping[str, Condition],
    title: str = "Verdict",
    change_of: Callable[[Sequence[Trained]], tuple[float, float, float]] | None = None,
) -> None:
    """Add a row for each condition: whether it learned, and whether it should have.

    :param change_of: Function that computes the change. Default: `pooled_change`.
    """
    report.heading(title)
    rows = []
    for condition, runs in found.items():
        change, low, high = (change_of or pooled_change)(runs)
        learned = low > 0
        rows.append(
            (
                condition,
                f"{change:+.1%} [{low:+.1%}, {high:+.1%}]",
                "learned" if learned else "did not learn",
                "as it should" if learned == conditions[condition].learns else "NOT AS IT SHOULD",
            )
        )
    report.table(("run", "change over all seeds, 95 %", "verdict", ""), rows)


def pooled_change(runs: Sequence[Trained], start: int = 0) -> tuple[float, float, float]:
    """Return success after minus before over all runs, with a 95 % interval (normal approximation of two proportions).

    :param start: Index of the validation before the change.
    """

    def pooled(validations: Sequence[Validation]) -> tuple[float, float]:
        n = sum(v.tasks for v in validations)
        p = sum(v.success * v.tasks for v in validations) / n
        return p, p * (1 - p) / n

    (p0, variance0), (p1, variance1) = pooled([r.validations[start] for r in runs]), pooled([r.after for r in runs])
    half = 1.959964 * math.sqrt(variance0 + variance1)
    return p1 - p0, p1 - p0 - half, p1 - p0 + half


def bootstrap(runs: Sequence[Trained], kind: Callable[[str], object], start: int = 0) -> tuple[float, float, float]:
    """Success after less before, with a 95 % percentile interval: seeds and kinds of tasks are drawn with replacement.

    Source: Owen, The pigeonhole bootstrap, Annals of Applied Statistics 1 (2007) 386-411, kinds in place of tasks.

    :param kind: of a task, by its query: tasks of a kind may share what makes them hard.
    :param start: which validation is before.
    """
    import numpy as np

    kinds: dict[object, int] = {}
    gains, sizes = np.zeros((len(runs), len(runs[0].episodes[0]))), np.zeros(len(runs[0].episodes[0]))
    for i, run in enumerate(runs):
        before, after = (run.episodes[v.step] for v in (run.validations[start], run.after))
        for old, new in zip(before, after, strict=True):
            if old["task_id"] != new["task_id"]:
                raise RuntimeError(f"seed {run.seed}: validations in different orders")
            place = kinds.setdefault(kind(old["query"]), len(kinds))
            gains[i, place] += bool(new["is_success"]) - bool(old["is_success"])
            sizes[place] += i == 0
    gains, sizes = gains[:, : len(kinds)], sizes[: len(kinds)]
    rng, means = np.random.default_rng(0), []
    for _ in range(DRAWS):
        seeds, drawn = (rng.integers(n, size=n) for n in gains.shape)
        means.append(gains[seeds][:, drawn].sum() / (len(seeds) * sizes[drawn].sum()))
    low, high = np.quantile(means, (0.025, 0.975))
    return gains.sum() / (len(runs) * sizes.sum()), low, high


def draw(found: Mapping[str, Sequence[Trained]], path: Path) -> None:
    """Draw training rewards on the left and all validations on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for number, (condition, runs) in enumerate(found.items()):
        colour = f"C{number}"
        for place, run in enumerate(runs):
            label = condition if place == 0 else None
            left.plot(range(1, len(run.rewards) + 1), _smooth(run.rewards), color=colour, label=label, lw=1.2)
            success = [v.success for v in run.validations]
            spread = [[v.success - v.low for v in run.validations], [v.high - v.success for v in run.validations]]
            steps = [v.step + 0.7 * (number - 1) + 0.25 * (place - 1) for v in run.validations]  # side by side
            right.errorbar(steps, success, yerr=spread, color=colour, marker="o", ms=3, capsize=2, lw=0.8)
    left.set(xlabel="step", ylabel="success", title="training reward (mean of 10 steps)", ylim=(0, 1))
    right.set(xlabel="step", title="held-out success, 95 %")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _validation(row: Mapping[str, Any]) -> Validation:
    return Validation(
        row["step"], row["val/success"], row["val/success_ci_low"], row["val/success_ci_high"], int(row["val/tasks"])
    )


def _smooth(values: Sequence[float], width: int = 10) -> list[float]:
    """Return the moving average of each value and up to ``width - 1`` previous values."""
    return [sum(part) / len(part) for part in (values[max(0, i - width + 1) : i + 1] for i in range(len(values)))]
