"""Run every example that shows learning with five seeds, including the default seed.

Each example runs as its README describes, in separate processes and run folders. The result is the state at the end of
a run, not its best checkpoint.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.report import Report
from benchmarks.trained import (
    AS_SHIPPED,
    FRESH,
    REPOSITORY,
    Command,
    Condition,
    Runs,
    Trained,
    bootstrap,
    draw,
    train_all,
    verdict,
)

EXAMPLES = REPOSITORY / "examples"
SEEDS = (0, 1, 2, 3, 4)
MATH_AGENT = EXAMPLES / "math_agent/math_agent.yaml"


@dataclass(frozen=True)
class Example:
    """Example with the success of an agent that does not understand its task."""

    name: str
    naive: float
    """Success of the naive agent on the held-out tasks."""
    how: str
    """Description of the naive agent."""
    options: Sequence[str] = ()
    beside: Path | None = None
    measured_by: Path | None = None
    shuffled: str = ""
    """Judge in `benchmarks.shuffled_judge`. If set, the example also runs with this judge and with learning rate 0, as
    controls that must not learn, and its folder gets the curves as a picture.
    """

    kind: Callable[[str], object] = str
    """Maps a task's query to a kind: tasks of a kind may be hard for the same reason. Default: every task is a kind."""

    def conditions(self, seeds: Sequence[int]) -> Mapping[str, Condition]:
        found = {AS_SHIPPED: Condition((), seeds)}
        if self.shuffled:
            judge = f"astuner.task_judge.judge={REPOSITORY / 'benchmarks/shuffled_judge.py'}->{self.shuffled}"
            found["shuffled rewards"] = Condition((judge,), seeds[:1], learns=False)
            found["learning rate 0"] = Condition(("astuner.trainer_common.optim.lr=0",), seeds[:1], learns=False)
        return found

    def command(self, *overrides: str) -> Command:
        file = EXAMPLES / f"{self.name}/{self.name}.yaml"
        arguments = (str(file), *self.options, "--backbone", "local", *overrides)
        return Command(arguments, 100, self.beside, self.measured_by)


TESTED = ("astuner.task_reader.jsonl.validation.file_path=data/test.jsonl", "astuner.data.max_validation_tasks=null")
"""Overrides that evaluate the test tasks, because the recipe was chosen by validation tasks."""
MEASURED = (
    Example("math_agent", 0.25, "the operation is drawn at random, and the numbers are in the right order"),
    Example("frozen_lake", 0.21, "goes down or right without looking", ("--with", "frozen_lake")),
    Example("werewolves", 0.39, "the untrained werewolves, against the same village"),
    Example(
        "feedback",
        0.25,
        "as in math_agent, whose held-out tasks and agent are used: no user has asked these questions",
        ("--with", "feedback"),
        EXAMPLES / "feedback/users.py",
        MATH_AGENT,
    ),
    Example("learning_to_ask", 0.12, "never asks", TESTED, shuffled="ShuffledTable"),
    Example(
        "countdown",
        0.21,
        "the three fixed expressions that reach most training targets, whatever the target",
        TESTED,
        shuffled="ShuffledCountdown",
        kind=lambda query: frozenset(query.split()[:4]),  # the numbers
    ),
    Example(
        "search_documents",
        0.25,
        "searches correctly, and answers with any of the four numbers",
        TESTED,
        shuffled="ShuffledSearch",
        kind=lambda query: " ".join(re.findall(r"[A-Z]\w+", query)[1:]),  # the village or person; not `How`
    ),
)
SCRIPTED = ("rubrics", "flywheel")
"""Examples with several runs each, whose scripts compare them with their control arms."""


def run(*, quick: bool, runs: Runs = FRESH, tasks: Sequence[str] = (), seeds: int | None = None) -> Report:
    """Run the examples and report success before and after.

    :param tasks: Examples to run. Default: all.
    :param seeds: Run only the first ``seeds`` seeds.
    """
    names = [*(example.name for example in MEASURED), *SCRIPTED]
    if unknown := {*tasks} - {*names}:
        raise SystemExit(f"unknown example: {', '.join(sorted(unknown))}. Available: {', '.join(names)}")
    measured = [example for example in MEASURED if not tasks or example.name in tasks]
    chosen = SEEDS[: 1 if quick else seeds]
    report = Report(
        "The examples that learn",
        f"`astuner run examples/NAME/NAME.yaml --backbone local`, seeds {', '.join(map(str, chosen))}: success on "
        "the held-out tasks before and at the end, with Wilson's 95 % interval. *Above* means that the complete "
        "interval at the end lies above the *naive* success.",
    )
    rows, with_controls = [], {}
    for example in measured:
        command = example.command(*(("astuner.trainer_common.total_steps=2",) if quick else ()))
        folder = Runs(runs.folder / example.name if runs.folder else None, runs.jobs)
        found = train_all(example.conditions(chosen), command, folder)
        rows += [_row(example, condition, run) for condition, trained in found.items() for run in trained]
        if example.shuffled:
            report.pictures[f"../examples/{example.name}/curve.png"] = partial(draw, found)
            with_controls[example] = found
    report.table(("example", "seed", "before", "at the end", "naive", "", "seconds"), rows)
    report.text("Naive: " + "; ".join(f"*{e.name}*, {e.how}: {e.naive:.0%}" for e in measured) + ".")
    for example, found in with_controls.items():
        change = partial(bootstrap, kind=example.kind)
        verdict(report, found, example.conditions(chosen), f"Verdict: {example.name}", change)
    for name in SCRIPTED:
        if not tasks or name in tasks:
            report.heading(name)
            report.text(_scripted(name, chosen, runs.folder, quick=quick))
    return report


def _row(example: Example, condition: str, run: Trained) -> tuple[object, ...]:
    name, found = example.name, "above" if run.after.low > example.naive else "NOT ABOVE"
    if condition != AS_SHIPPED:
        name, found = f"{name}, {condition}", "LEARNED" if run.after.low > run.before.high else "did not learn"
    return name, run.seed, run.before, run.after, f"{example.naive:.0%}", found, f"{run.seconds:.0f}"


def _scripted(name: str, seeds: Sequence[int], kept: Path | None, *, quick: bool) -> str:
    """Run an example's script and return its report; the script keeps its stages, so it can resume in a kept folder."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = (kept.resolve() if kept else Path(temporary)) / name
        command = [sys.executable, str(EXAMPLES / name / f"{name}.py"), "--folder", str(folder)]
        command += ["--seeds", *map(str, seeds), *(("--quick",) if quick else ())]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return (folder / "results.md").read_text(encoding="utf-8").strip()
