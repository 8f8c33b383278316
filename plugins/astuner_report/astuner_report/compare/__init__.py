"""Comparison of two sides on the same tasks, each one run or several seeds of it, for `astuner diff`.

Invariants: statistics are over tasks, never over episodes, because attempts at one task are not independent. A task is
identified by its ID and a hash of its first messages and query, so a data set with repeated IDs or reordered lines
never pairs two different questions. No task is left out silently; if the task sets differ, the user has to agree to
compare the common tasks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner import RunDir
from astuner.contracts.errors import ConfigError, DataError
from astuner.contracts.places import Tree
from astuner.contracts.rows import ID_FIELDS
from astuner.contracts.shell import shell_text
from astuner.contracts.statistics import mean
from astuner.contracts.types import Split, StopReason, counts_as_success
from astuner.contracts.validation import TaskResult
from astuner_record.episode_log import EpisodeLog
from astuner_record.episode_log.reader import Listed
from astuner_record.foreign import read_resolved
from astuner_record.paired import choose_measure
from astuner_record.statistics import (
    Interval,
    PairedTable,
    bootstrap_interval,
    crossed_bootstrap_intervals,
    mcnemar_exact,
    paired_success_interval,
    sign_flip_test,
)
from astuner_report.compare.yardsticks import doubted, yardsticks

if TYPE_CHECKING:
    from astuner_report.compare.anew import Anew

TESTED = ("success", "reward")
"""Measures that get a p-value; for the others the interval is sufficient."""
FLIPPED = 0.5
"""Difference in success from which on a task is listed as won or lost."""
UNINTERESTING = ("astuner.experiment_name", "astuner.experiment_dir")
"""Settings that always differ, because each run has its own folder."""
MEASURES: Mapping[str, Callable[[Listed], float]] = {
    "success": lambda episode: float(bool(episode.success)),
    "reward": lambda episode: episode.reward or 0.0,
    "turns": lambda episode: float(episode.turns),
    "response tokens": lambda episode: float(episode.tokens),
    "prompt tokens": lambda episode: float(episode.prompt_tokens),
    "cut off": lambda episode: float(StopReason(episode.stop_reason).is_limit),
}
"""Measures of a scored episode; ``cut off`` is 1 if a length or turn limit ended it."""


@dataclass(frozen=True, kw_only=True)
class TaskNumbers:
    """The results of one task."""

    task_id: str
    text: str
    """Hash of the task's messages and query."""
    metadata: str
    """Hash of the task's remaining data, including the reference answer."""
    query: str
    """The first 300 characters of the query."""
    episodes: tuple[str, ...]
    """IDs of the scored episodes."""
    means: Mapping[str, float]
    """Measure -> its mean over the scored episodes; empty without any."""
    result: TaskResult | None
    """Result of the scored episodes; None without any."""
    ended: str
    """How the task's first episode ended."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of one run."""

    run: Path
    split: Split
    step: int | None
    """None: all steps."""
    tasks: Mapping[str, TaskNumbers]
    """Task key (see `measure`) -> its results."""
    stop_reasons: Mapping[str, int]
    """Counts over all episodes."""
    problems: Sequence[str]
    """Damaged parts of the episode log, one sentence each; they are excluded."""


def measure(
    run: Path,
    *,
    split: Split = Split.VALIDATION,
    step: int | None = None,
    by: str = "task",
    anew: Anew | None = None,
) -> Measured:
    """Measure the episodes of a run in one step.

    :param step: the newest by default in validation, all of them in training.
    :param by: how tasks of two runs are matched: ``task``, ID and text; or ``text`` alone (for renamed files or
        reordered lines).
    :param anew: a judge whose verdicts replace the recorded ones.
    :raises DataError: the run has no episode log, or no such episode.
    """
    if not run.is_dir():
        raise DataError(f"{run} is not a run folder. Pass the `Run folder` that `astuner run` prints at the end")
    with EpisodeLog(run) as log:
        return measured(run, log, split=split, step=step, by=by, anew=anew)


def measured(
    run: Path,
    log: EpisodeLog,
    *,
    split: Split = Split.VALIDATION,
    step: int | None,
    by: str,
    anew: Anew | None = None,
) -> Measured:
    """Measure the episodes of a run whose log is open, as `measure` does.

    :param by: also ``place``: ID and place in the validation, for validations of one run, without reading the tasks.
    """
    of_split = f"split={split.value}"
    if step is None and split is Split.VALIDATION:
        step = next((e.step for e in log.list([of_split], descending=True, limit=1)), None)  # written last
    chosen = log.list([of_split] if step is None else [of_split, f"step={step}"])
    if not chosen:
        if steps := ", ".join(str(one["step"]) for one in log.steps(split.value)):
            raise DataError(f"{run} does not contain {split.value} episodes of step {step}. Available steps: {steps}")
        other = (Split.TRAIN if split is Split.VALIDATION else Split.VALIDATION).value
        instead = f", but {other} episodes: add --split {other}" if log.count([f"split={other}"]) else ""
        raise DataError(f"{run} does not contain {split.value} episodes{instead}")
    texts: dict[str, tuple[str, str]] = {}
    """Group -> hashes of its task's text and metadata, which the attempts of a group share."""
    for listed in chosen if by != "place" else ():
        if listed.group_id not in texts:
            query, task = log.task(listed)
            known = {name: value for name, value in task["metadata"].items() if name not in ID_FIELDS}
            texts[listed.group_id] = text_hash(query, task["init_messages"]), text_hash("", known)
    by_task: dict[str, list[Listed]] = {}
    for listed in chosen if anew is None else anew.verdicts(run, log, chosen):
        text = texts[listed.group_id][0] if by != "place" else listed.group_id.rpartition("-")[2]
        by_task.setdefault(text if by == "text" else f"{listed.task_id} {text}", []).append(listed)
    return Measured(
        run=run,
        split=split,
        step=step,
        tasks={
            key: _numbers(episodes, *texts.get(episodes[0].group_id, ("", ""))) for key, episodes in by_task.items()
        },
        stop_reasons=Counter(e.stop_reason for e in chosen),
        problems=log.problems,
    )


def text_hash(query: str, messages: object) -> str:
    """Return a 64-bit hash of a task's text; collisions within a data set are negligible."""
    said = json.dumps([query, messages], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(said.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _numbers(episodes: Sequence[Listed], text: str, metadata: str) -> TaskNumbers:
    scored = [e for e in episodes if e.reward is not None]
    return TaskNumbers(
        task_id=episodes[0].task_id,
        text=text,
        metadata=metadata,
        query=episodes[0].query,
        episodes=tuple(e.episode_id for e in scored),
        means={name: mean([of(e) for e in scored]) for name, of in MEASURES.items()} if scored else {},
        result=_result(scored) if scored else None,
        ended=episodes[0].stop_reason,
    )


def _result(scored: Sequence[Listed]) -> TaskResult:
    """Return the result of a task's scored episodes; success is stated if it does not follow from the reward."""
    return TaskResult(
        successes=sum(bool(e.success) for e in scored),
        scored=len(scored),
        stated=sum(bool(e.success) != counts_as_success(e.reward or 0.0) for e in scored),
        reward=mean([e.reward or 0.0 for e in scored]),
    )


def pair(
    a: Sequence[Measured], b: Sequence[Measured], *, common: bool = False
) -> tuple[Sequence[str], Mapping[str, Any]]:
    """Return the tasks of all runs that can be compared.

    :param common: whether the runs may also have other tasks.
    :returns: the keys in `Measured.tasks` that are scored in every run, in the order of the first run; and for
        ``--json`` the number of ``paired`` tasks, the IDs of tasks missing in some run, the IDs among them with
        different text on the two sides (``changed``), and the tasks without a scored episode in some run, with how they
        ended there.
    :raises DataError: the runs have other tasks and ``common`` is false, or no task can be compared.
    """
    runs = [*a, *b]
    shared = {key: None for key in a[0].tasks if all(key in run.tasks for run in runs)}  # in their order
    only_a, only_b = (
        list({key: task for run in side for key, task in run.tasks.items() if key not in shared}.values())
        for side in (a, b)
    )
    unscored = {key: why for key in shared if (why := _unscored(key, runs))}
    tasks = [key for key in shared if key not in unscored]
    ids_a, ids_b = [t.task_id for t in only_a], [t.task_id for t in only_b]
    changed, hint = sorted({*ids_a} & {*ids_b}), ""
    if {t.text for t in only_a} & {t.text for t in only_b}:
        hint = ". Some tasks have the same text but different IDs: add --by text"
    elif changed:
        hint = f". {len(changed)} tasks have the same ID but different text, e.g. {', '.join(changed[:3])}"
    of = f"{a[0].run.name} has {_sizes(a)}, {b[0].run.name} has {_sizes(b)}"
    if not tasks:
        raise DataError(f"The runs cannot be compared, because no task is scored in all of them ({of}){hint}")
    if not common and (only_a or only_b):
        raise DataError(
            f"The runs have different tasks ({of}, {len(shared)} in common){hint}. To compare the common tasks, add "
            "--common"
        )
    named = {a[0].tasks[key].task_id: why for key, why in unscored.items()}
    return tasks, {"paired": len(tasks), "only_a": ids_a, "only_b": ids_b, "changed": changed, "unscored": named}


def _unscored(key: str, runs: Sequence[Measured]) -> str:
    return ", ".join(f"{run.tasks[key].ended} in {run.run.name}" for run in runs if not run.tasks[key].episodes)


def _sizes(side: Sequence[Measured]) -> str:
    sizes = sorted({len(run.tasks) for run in side})
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


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
    anew: Anew | None = None,
) -> dict[str, Any]:
    """Compare the runs of ``b`` with those of ``a``; return everything that `astuner diff` prints, as for ``--json``.

    ``measure`` is the measure that decides, success or reward, and ``reason`` why it is not success; ``yardsticks`` are
    the differences in how the sides are measured; ``table`` is of success, and None unless every task has one episode
    on each side; ``won`` are the tasks that b solves and a does not, ``lost`` the opposite.

    :param a: run folders; several are seeds of the same experiment.
    :param step_a: step of all runs of ``a``; the newest validation by default.
    :param by: as for `measure`.
    :param common: compare the tasks that are in all runs, even if some have others.
    :param seed: seed of the random draws.
    :param anew: as for `measure`; the result reports what it ``judged``.
    :raises DataError: a run does not have such episodes, or the task sets differ.
    """
    if repeated := {run.resolve() for run in a} & {run.resolve() for run in b} if step_a == step_b else set():
        raise ConfigError(
            f"{min(repeated)} is on both sides. Pass two runs, or two steps of one run: --step-a N --step-b M"
        )
    settings_a, settings_b = [[_settings(run) for run in side] for side in (a, b)]
    of_a = [measure(run, split=split, step=step_a, by=by, anew=anew) for run in a]
    of_b = [measure(run, split=split, step=step_b, by=by, anew=anew) for run in b]
    said = None if anew is None else anew.said
    return compared(of_a, of_b, settings_a, settings_b, common=common, seed=seed, judged=said)


def compared(
    of_a: Sequence[Measured],
    of_b: Sequence[Measured],
    settings_a: Sequence[Mapping[str, Any]],
    settings_b: Sequence[Mapping[str, Any]],
    *,
    common: bool = False,
    seed: int = 0,
    judged: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compare measured runs, as `compare` does; the settings of each come from `settings_of`."""
    settings = _differences(settings_a, settings_b)
    split = of_a[0].split
    tasks, about_tasks = pair(of_a, of_b, common=common)
    table = None
    if len(of_a) == len(of_b) == 1 and all(len(run.tasks[k].episodes) == 1 for run in (*of_a, *of_b) for k in tasks):
        solved = [[run.tasks[key].means["success"] == 1 for key in tasks] for run in (*of_a, *of_b)]
        table = PairedTable.of(list(zip(*solved, strict=True)))
    flips = changed_tasks(of_a, of_b, tasks)
    changed = [of_a[0].tasks[key].task_id for key in tasks if len({r.tasks[key].metadata for r in (*of_a, *of_b)}) > 1]
    if judged is not None:  # one judge scored both sides
        settings_a, settings_b = (
            [_judged_by(judged["name"], run) for run in side] for side in (settings_a, settings_b)
        )
    measured_with = _differences(settings_a, settings_b)
    differing = yardsticks(settings_a, settings_b, measured_with, split, changed, about_tasks)
    values = {
        name: [[[run.tasks[key].means[name] for key in tasks] for run in side] for side in (of_a, of_b)]
        for name in MEASURES
    }
    crossed: Mapping[str, Interval] = {}
    if len(of_a) > 1 or len(of_b) > 1:
        every_a, every_b = zip(*values.values(), strict=True)
        crossed = dict(zip(values, crossed_bootstrap_intervals(every_b, every_a, seed=seed), strict=True))
    measures = {name: _difference(name, a, b, crossed.get(name), table, seed) for name, (a, b) in values.items()}
    doubted(measures, differing)
    results = ((x.tasks[key].result, y.tasks[key].result) for x in of_a for y in of_b for key in tasks)
    choice = choose_measure([(x, y) for x, y in results if x is not None and y is not None])
    return {
        "a": [_run(run) for run in of_a],
        "b": [_run(run) for run in of_b],
        "judged": judged,
        "yardsticks": differing,
        "settings": settings,
        "tasks": about_tasks,
        "measures": measures,
        "measure": choice.measure,
        "reason": choice.reason,
        "table": vars(table) if table else None,
        "won": [flip for flip in flips if flip["success_b"] > flip["success_a"]],
        "lost": [flip for flip in flips if flip["success_b"] < flip["success_a"]],
        "seed": seed,
        "problems": [f"{run.run}: {problem}" for run in (*of_a, *of_b) for problem in run.problems],
    }


def _run(run: Measured) -> dict[str, Any]:
    return {
        "run": str(run.run),
        "split": run.split.value,
        "step": run.step,
        "tasks": len(run.tasks),
        "episodes": sum(run.stop_reasons.values()),
        "stop_reasons": dict(run.stop_reasons),
    }


def _differences(of_a: Sequence[Mapping[str, Any]], of_b: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the keys that differ, in the order of the config, with each side's values; None if a run lacks the key."""
    keys = dict.fromkeys(key for run in (*of_a, *of_b) for key in run)
    found = []
    for key in keys:
        values_a, values_b = [_different([run.get(key) for run in side]) for side in (of_a, of_b)]
        if values_a != values_b and key not in UNINTERESTING:
            found.append({"key": key, "a": values_a, "b": values_b})
    return found


def _settings(run: Path) -> dict[str, Any]:
    """Return the settings of a run.

    :raises DataError: the run has no ``resolved.yaml``.
    """
    path = RunDir(run).resolved
    try:
        return settings_of(read_resolved(path) or {})
    except FileNotFoundError:
        raise DataError(f"{run} is not a run folder: {path.name} is missing") from None
    except (OSError, AttributeError) as e:
        raise DataError(f"Could not read {path}: {e}") from None


def settings_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the data of a ``resolved.yaml``, by their dotted keys."""
    settings = {name: value for name, value in data.items() if name != "resolved"}  # path of the source file
    return {".".join(map(str, key)): value for key, value in Tree(settings).leaves()}


def _judged_by(judge: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    own = ("astuner.task_judge.", "astuner.helper_models.")
    return {key: value for key, value in settings.items() if not key.startswith(own)} | {f"{own[0]}judge": judge}


def _different(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the distinct values in a fixed order; values may be lists."""
    unique: list[Any] = []
    for value in values:
        if value not in unique:
            unique.append(value)
    return tuple(sorted(unique, key=repr))


def _difference(
    name: str,
    values_a: Sequence[Sequence[float]],
    values_b: Sequence[Sequence[float]],
    crossed: Interval | None,
    table: PairedTable | None,
    seed: int,
) -> dict[str, Any]:
    """Return one measure of both sides, b - a with its 95 % interval and p-value, and the methods used.

    The p-value is None if the measure is not tested.

    :param crossed: the interval if a side has several runs.
    """
    mean_a, mean_b = [mean([mean(run) for run in side]) for side in (values_a, values_b)]
    p_value: float | None = None
    test = ""
    if crossed is not None:
        interval, by = crossed, "bootstrap over runs and tasks"
    else:
        each = [y - x for x, y in zip(values_a[0], values_b[0], strict=True)]
        if name == "success" and table is not None:
            interval, by = paired_success_interval(table), "Newcombe's paired score interval"
            p_value, test = mcnemar_exact(table), "McNemar's exact test"
        else:
            interval, by = bootstrap_interval(each, seed=seed), "bootstrap over tasks"
            if name in TESTED:
                p_value, test = sign_flip_test(each, seed=seed), "permutation test of signs"
    return {
        "a": mean_a,
        "b": mean_b,
        "difference": mean_b - mean_a,
        "ci_low": interval.low,
        "ci_high": interval.high,
        "ci_by": by,
        "p_value": p_value,
        "test": test,
    }


def changed_tasks(a: Sequence[Measured], b: Sequence[Measured], tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Return the tasks that one side solves and the other does not, the largest difference first.

    Episode IDs are prefixed with the name of their run if a side has several. ``command`` shows the first transcript of
    each side, next to each other.
    """
    found = []
    for key in tasks:
        of_a, of_b = [mean([run.tasks[key].means["success"] for run in side]) for side in (a, b)]
        if abs(of_b - of_a) >= FLIPPED:
            task = a[0].tasks[key]
            found.append(
                {
                    "key": key,
                    "task_id": task.task_id,
                    "query": task.query,
                    "success_a": of_a,
                    "success_b": of_b,
                    "episodes_a": _episodes(a, key),
                    "episodes_b": _episodes(b, key),
                    "command": _view_both(b[0].run, b[0].tasks[key].episodes[0], a[0].run, task.episodes[0]),
                }
            )
    return sorted(found, key=lambda flip: -abs(flip["success_b"] - flip["success_a"]))


def _episodes(side: Sequence[Measured], key: str) -> list[str]:
    several = len(side) > 1
    return [f"{run.run.name}/{name}" if several else name for run in side for name in run.tasks[key].episodes]


def view_command(run: Path, *episodes: str) -> str:
    """Return the command that shows an episode, or two next to each other."""
    return shell_text(["astuner", "view", str(run), *(word for name in episodes for word in ("--episode", name))])


def _view_both(run: Path, episode: str, other: Path, of_other: str) -> str:
    run, other = run.resolve(), other.resolve()
    if run == other:
        return view_command(run, episode, of_other)
    root = Path(os.path.commonpath([run.parent, other.parent]))
    names = (f"{run.relative_to(root)}/{episode}", f"{other.relative_to(root)}/{of_other}")
    return shell_text(["astuner", "view", "--root", str(root), *(w for name in names for w in ("--episode", name))])
