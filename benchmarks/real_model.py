"""Check that a real language model learns on unseen tasks, and that controls without a learning signal do not.

SmolLM2-135M on three examples, each started as its README describes, but evaluated on its test tasks: the recipes were
chosen by the validation tasks.  Runs that are neither requested nor in the folder of runs appear as not run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from astuner_local.tiny.problems import WORDINGS
from benchmarks.report import Report
from benchmarks.trained import (
    AS_SHIPPED,
    DRAWS,
    FRESH,
    REPOSITORY,
    Command,
    Condition,
    Runs,
    Trained,
    bootstrap,
    is_kept,
    train_all,
)

SEEDS = (310, 311, 312)
"""Seeds of the benchmark. The recipes were chosen with the examples' seed, which is not among them."""
LEAST_HELD_OUT = 256
NOT_RUN = "not run"


@dataclass(frozen=True)
class Task:
    """One example."""

    name: str
    shuffled: str
    """Judge in `benchmarks.shuffled_judge`."""
    still: bool = False
    """Also run with learning rate 0, as a control: any change is noise of the measurement."""

    @property
    def wordings(self) -> Sequence[str]:
        """Return the templates of the test tasks' texts."""
        kept = REPOSITORY / f"examples/{self.name}/wordings.yaml"
        if not kept.exists():
            return [text for _, text in WORDINGS]  # the word problems', from the package that makes them
        of_label = yaml.safe_load(kept.read_text(encoding="utf-8"))["test"]
        return [text for texts in of_label.values() for text in texts]

    @property
    def conditions(self) -> Mapping[str, Condition]:
        judge = f"{REPOSITORY / 'benchmarks/shuffled_judge.py'}->{self.shuffled}"
        found = {
            AS_SHIPPED: Condition((), SEEDS),
            "shuffled rewards": Condition((f"astuner.task_judge.judge={judge}",), SEEDS, learns=False),
        }
        if self.still:
            found["learning rate 0"] = Condition(("astuner.trainer_common.optim.lr=0",), SEEDS[:1], learns=False)
        return found

    def command(self, *more: str) -> Command:
        """:param more: settings for every run."""
        held_out = (
            "astuner.task_reader.jsonl.validation.file_path=data/test.jsonl",
            "astuner.data.max_validation_tasks=null",
            "astuner.trainer_common.test_freq=1000000",  # before, after the warm start, and at the end
            "astuner.trainer_common.save_freq=1000000",
        )
        experiment = str(REPOSITORY / f"examples/{self.name}/{self.name}.yaml")
        return Command((experiment, "--backbone", "local", *held_out, *more), LEAST_HELD_OUT)


TASKS = (
    Task("ticket_triage", "ShuffledLabel"),
    Task("shop_lookup", "ShuffledLookup"),
    Task("word_problems", "ShuffledNumber", still=True),
)


def run(
    *,
    quick: bool,
    runs: Runs = FRESH,
    tasks: Sequence[str] = (),
    seeds: int | None = None,
    settings: Sequence[str] = (),
) -> Report:
    """Run the tasks and report success before and after.

    :param tasks: Tasks to run, or ``none``. Default: all. Other tasks show the results in the folder of runs.
    :param seeds: Run only the first ``seeds`` seeds.
    :param settings: Overrides for every run, such as the model's path.
    """
    names = [task.name for task in TASKS]
    if unknown := {*tasks} - {*names, "none"}:
        raise SystemExit(f"unknown task: {', '.join(sorted(unknown))}. Available: {', '.join(names)}, or none")
    chosen = SEEDS[: 1 if quick else seeds]
    more = (*settings, *(("astuner.data.train_batch_size=2", "astuner.rollout.num_repeat=2") if quick else ()))
    report = Report(
        "A real language model, before and after",
        "`astuner run examples/TASK/TASK.yaml --backbone local`: SmolLM2-135M, each run in a separate process with "
        f"a fresh run folder. Success on {LEAST_HELD_OUT} test tasks that no recipe was chosen by (their wordings, "
        "things or numbers are in no training task), one greedy answer each, with Wilson's 95 % interval: *before*, "
        "after the *warm start* if the recipe has one, and *after* GRPO. Missing runs are marked.",
    )
    for task in TASKS:
        found = _runs_of(task, chosen, runs, task.command(*more), asked=not tasks or task.name in tasks)
        report.heading(task.name)
        _table(report, task, chosen, found)
        if not quick:
            _verdict(report, task, found)
    report.text(
        "*Shuffled rewards*: in training each episode gets the verdict of another, randomly chosen episode "
        "(`benchmarks/shuffled_judge.py`). *Learning rate 0*: GRPO runs, but the weights do not change; the warm "
        "start has a separate rate. A change is success after minus success before, task by task; *learned* means "
        "that the interval of GRPO's change lies above 0. Tasks share wordings and seeds share tasks, so the "
        f"intervals come from a bootstrap that draws complete seeds and complete wordings ({DRAWS:,} draws; 50 "
        "wordings of tickets, 12 of the shop, 8 of the word problems). They cover other seeds on other wordings, as "
        "far as three seeds allow."
    )
    return report


def _runs_of(
    task: Task, seeds: Sequence[int], runs: Runs, command: Command, *, asked: bool
) -> dict[str, list[Trained]]:
    """Return all kept runs, and the requested ones, which are started if missing."""
    mine = Runs(runs.folder / task.name if runs.folder else None, runs.jobs)
    conditions = {
        name: Condition(c.overrides, [s for s in seeds if s in c.seeds and (asked or is_kept(mine, name, s))], c.learns)
        for name, c in task.conditions.items()
    }
    return train_all(conditions, command, mine)


def _table(report: Report, task: Task, seeds: Sequence[int], found: Mapping[str, Sequence[Trained]]) -> None:
    rows: list[tuple[object, ...]] = []
    for name, condition in task.conditions.items():
        by_seed = {run.seed: run for run in found[name]}
        for seed in condition.seeds:
            run = by_seed.get(seed)
            if run is None:
                if seed in seeds:
                    rows.append((name, seed, *[NOT_RUN] * 5))
                continue
            warm = run.validations[1] if len(run.validations) > 2 else "none"
            minutes = f"{run.seconds / 60:.0f}"
            rows.append((name, seed, run.before, warm, run.after, run.after.step, minutes))
    report.table(("run", "seed", "before", "warm start", "after", "steps", "minutes"), rows)


def _verdict(report: Report, task: Task, found: Mapping[str, Sequence[Trained]]) -> None:
    """Report the change in each phase, and whether GRPO learned in the runs that should learn and only there."""
    rows: list[tuple[object, ...]] = []
    for name, condition in task.conditions.items():
        if not found[name]:
            rows.append((name, *[NOT_RUN] * 4))
            continue
        every, by_grpo = _change(task, found[name], 0), _change(task, found[name], -2)
        learned = by_grpo[1] > 0
        told = "as it should" if learned == condition.learns else "NOT AS IT SHOULD"
        rows.append((name, _said(every), _said(by_grpo), "learned" if learned else "did not learn", told))
    report.table(("run", "change, all phases, 95 %", "of it by GRPO", "verdict", ""), rows)


def _change(task: Task, runs: Sequence[Trained], start: int) -> tuple[float, float, float]:
    wordings = [re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(text))) for text in task.wordings]

    def wording(query: str) -> int:
        [found] = (n for n, text in enumerate(wordings) if text.fullmatch(query))
        return found

    return bootstrap(runs, wording, start)


def _said(change: tuple[float, float, float]) -> str:
    return f"{change[0]:+.1%} [{change[1]:+.1%}, {change[2]:+.1%}]"
