"""Changes between the validations of a run: success by slice, tasks won and lost, and episodes worth reading.

Results, queries and metadata come from the episode log, so they are available for runs of older versions, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from astuner.contracts.errors import DataError
from astuner.contracts.statistics import mean, percent, wilson_interval
from astuner.contracts.types import Split
from astuner.contracts.validation import TaskResult
from astuner_record.episode_log import EpisodeLog
from astuner_record.paired import LEVEL, PairedDifference, success_test
from astuner_report.compare import Measured, changed_tasks, measured, view_command
from astuner_report.slices import Slices, choose_slices, value_of

MAX_LISTED = 20
"""Tasks won, and tasks lost, that are listed for a pair of validations."""
_INFORMATIVE = 3
_FREQUENT = 0.1
"""Share of failed training episodes from which on one of them is informative."""


def changes(
    log: EpisodeLog | None, run: Path, held_out: Mapping[str, Any] | None, slices: Slices | None
) -> dict[str, Any]:
    """Return success by slice (``slices``) and the tasks won and lost between validations (``won_and_lost``).

    :param log: episode log of the run; None if it cannot be read.
    :param held_out: first, best and last validation.
    :param slices: slices of the run; None for a run of an older version, which had none: choose them.
    """
    nothing: dict[str, Any] = {"slices": [], "won_and_lost": []}
    if log is None or held_out is None:
        return nothing
    steps = {name: int(held_out[at]["step"]) for name, at in _VALIDATIONS.items() if held_out.get(at)}
    try:
        at_step = {
            step: measured(run, log, split=Split.VALIDATION, step=step, by="place") for step in {*steps.values()}
        }
    except DataError:  # the log does not contain all of these validations
        return nothing
    at = {name: at_step[step] for name, step in steps.items()}
    pairs = [("first", "last"), ("best", "last")]
    compared = dict.fromkeys((steps[a], steps[b]) for a, b in pairs if a in steps and steps[a] != steps[b])
    return {
        "slices": _slices(at, _values(log, at["last"]), slices),
        "won_and_lost": [_won_and_lost(at_step[a], at_step[b]) for a, b in compared],
    }


_VALIDATIONS = {"first": "before", "best": "best", "last": "after"}
"""Validation -> its name in ``held_out``."""


# -------------------------------------------------------------------------------------------------------- won and lost


def _won_and_lost(a: Measured, b: Measured) -> dict[str, Any]:
    """Return the tasks that the later validation ``b`` solves and ``a`` does not, and the opposite."""
    tasks = [key for key, task in a.tasks.items() if task.result and key in b.tasks and b.tasks[key].result]
    flips = changed_tasks([a], [b], tasks)
    won = [flip for flip in flips if flip["success_b"] > flip["success_a"]]
    lost = [flip for flip in flips if flip["success_b"] < flip["success_a"]]
    return {
        "from": a.step,
        "to": b.step,
        "won": len(won),
        "lost": len(lost),
        "won_tasks": won[:MAX_LISTED],
        "lost_tasks": lost[:MAX_LISTED],
        "command": f"astuner diff {b.run} {b.run} --step-a {a.step} --step-b {b.step}",
    }


# -------------------------------------------------------------------------------------------------------------- slices


def _values(log: EpisodeLog, last: Measured) -> dict[str, Mapping[str, Any]]:
    """Return the metadata of each task by its key."""
    metadata: dict[str, Mapping[str, Any]] = {}
    by_group: dict[str, Mapping[str, Any]] = {}
    key_of = {name: key for key, task in last.tasks.items() for name in task.episodes}
    for listed in log.list([f"split={Split.VALIDATION.value}", f"step={last.step}"]):
        if (key := key_of.get(listed.episode_id)) is not None and key not in metadata:
            if listed.group_id not in by_group:
                by_group[listed.group_id] = log.task(listed)[1]["metadata"]
            metadata[key] = by_group[listed.group_id]
    return metadata


def _slices(
    at: Mapping[str, Measured], metadata: Mapping[str, Mapping[str, Any]], slices: Slices | None
) -> list[dict[str, Any]]:
    """Return the success of each slice in the first, best and last validation, and its change from first to last."""
    chosen = choose_slices(None, [], [*metadata.values()]) if slices is None else slices
    rows: list[dict[str, Any]] = []
    tests: list[PairedDifference] = []
    for field, names in chosen.items():
        of_value: dict[str | None, list[str]] = {}
        for key, of_task in metadata.items():
            of_value.setdefault(value_of(of_task, field), []).append(key)
        for value, name in names.items():
            keys = of_value.get(value, [])
            results = {which: _results(validation, keys) for which, validation in at.items()}
            row: dict[str, Any] = {"field": field, "value": value, "metric": name, "tasks": len(keys)}
            row |= {which: _success(validation, results[which]) for which, validation in at.items()}
            if keys:
                rows.append(row)
            if shared := [key for key in results.get("first", ()) if key in results["last"]]:
                test = success_test([(results["first"][key], results["last"][key]) for key in shared])
                row |= {"change": test.mean, "low": test.interval.low, "high": test.interval.high}
                row["p_fell"] = _fell(test)
                tests.append(test)
    rose = "first" in at and _overall(at["last"]) >= _overall(at["first"])
    number = _comparisons(tests)
    for row in rows:
        if "p_fell" in row:
            row["p_fell"] = min(1.0, row["p_fell"] * number)
            row["fell"] = rose and row["p_fell"] < LEVEL
            row["finding"] = _finding(row, number) if row["fell"] else ""
    return rows


def _results(validation: Measured, keys: Sequence[str]) -> dict[str, TaskResult]:
    return {
        key: result for key in keys if key in validation.tasks and (result := validation.tasks[key].result) is not None
    }


def _success(validation: Measured, results: Mapping[str, TaskResult]) -> dict[str, Any] | None:
    """Return the success over tasks with Wilson's interval, which is conservative for several attempts at a task."""
    if not results:
        return None
    shares = [result.success for result in results.values()]
    low, high = wilson_interval(sum(shares), len(shares))
    solved = round(sum(shares)) if all(share in (0.0, 1.0) for share in shares) else None
    counts = {"tasks": len(shares), "solved": solved}
    return {"step": validation.step, "success": mean(shares), "low": low, "high": high, **counts}


def _overall(validation: Measured) -> float:
    return mean([task.result.success for task in validation.tasks.values() if task.result])


def _fell(test: PairedDifference) -> float:
    """Return the one-sided p-value that success fell."""
    return test.p / 2 if test.mean < 0 else 1.0


def _comparisons(tests: Sequence[PairedDifference]) -> int:
    """Return the number of tests to correct for.

    Slices in which so few tasks changed that no outcome could be significant do not count (Tarone, Biometrics 46 (1990)
    515-522): with d changed tasks, the one-sided p-value is at least 1 / 2^d.
    """
    least = [0.5 ** sum(test.changed.values()) for test in tests]
    return next((k for k in range(1, len(least)) if sum(p < LEVEL / k for p in least) <= k), len(least))


def _finding(row: Mapping[str, Any], number: int) -> str:
    first, last = (_counted(row[name]) for name in ("first", "last"))
    corrected = f", corrected for {number} slices" if number > 1 else ""
    return f"{row['field']}={row['value']} fell from {first} to {last} (p = {row['p_fell']:.2g}{corrected})"


def _counted(success: Mapping[str, Any]) -> str:
    if success["solved"] is None:
        return percent(success["success"], 1)
    return f"{success['solved']}/{success['tasks']}"


# ---------------------------------------------------------------------------------------------------- what to read next


def informative_episodes(
    log: EpisodeLog | None,
    run: Path,
    won_and_lost: Sequence[Mapping[str, Any]],
    failed: Sequence[Mapping[str, Any]],
    training: int,
) -> list[dict[str, str]]:
    """Return up to three episodes that explain the run most, each with a reason and the command that shows it.

    These are a lost and a won validation task, and a training episode: one of the most frequent failure if many failed,
    otherwise the one with the largest advantage.

    :param failed: rows of ``failures.jsonl``.
    :param training: number of training episodes.
    """
    if log is None:
        return []
    chosen: dict[str, dict[str, str]] = {}
    try:
        for candidate in _candidates(log, run, won_and_lost, failed, training):
            chosen.setdefault(candidate["episode"], candidate)
            if len(chosen) == _INFORMATIVE:
                break
    except DataError:  # the log lacks an episode
        pass
    return list(chosen.values())


def _candidates(
    log: EpisodeLog,
    run: Path,
    won_and_lost: Sequence[Mapping[str, Any]],
    failed: Sequence[Mapping[str, Any]],
    training: int,
) -> Iterator[dict[str, str]]:
    for kind in ("lost", "won"):
        for pair in won_and_lost:
            for task in pair[f"{kind}_tasks"][:1]:
                yield _flip(kind, task, pair)
                break
            else:
                continue
            break
    of_training = [row for row in failed if str(row.get("episode_id") or "v")[0] != "v"]
    if of_training and len(of_training) >= _FREQUENT * max(training, 1):
        yield _failure(log, run, of_training)
    if (strongest := log.strongest()) is not None:
        episode, credit = strongest
        reason = f"training episode with the largest advantage ({credit.advantage:+.2g}, reward {credit.reward:.3g})"
        yield _episode(run, episode, reason)
    for row in log.steps(Split.TRAIN.value)[-1:]:
        where = [f"split={Split.TRAIN.value}", f"step={row['step']}", "reward!=none"]
        for which, descending in (("lowest", False), ("highest", True)):
            for listed in log.list(where, order="reward", descending=descending, limit=1):
                yield _episode(run, listed.episode_id, f"{which} reward of step {row['step']} ({listed.reward:.3g})")
    for listed in log.list([f"split={Split.VALIDATION.value}"], descending=True, limit=_INFORMATIVE):
        yield _episode(run, listed.episode_id, f"validation task {listed.task_id} at step {listed.step}")


def _flip(kind: str, task: Mapping[str, Any], pair: Mapping[str, Any]) -> dict[str, str]:
    before, after = percent(task["success_a"]), percent(task["success_b"])
    change = f"success {before} at step {pair['from']}, {after} at step {pair['to']}"
    reason = f"validation task {task['task_id']} was {kind}: {change}"
    return {"episode": task["episodes_b"][0], "reason": reason, "command": task["command"]}


def _failure(log: EpisodeLog, run: Path, failed: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the newest episode of the most frequent failure."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in failed:
        kinds.setdefault(str(row.get("stop_reason")), []).append(row)
    kind, rows = max(kinds.items(), key=lambda item: len(item[1]))
    name = log.find(str(rows[-1]["episode_id"])).episode_id
    error = " ".join(str(rows[-1].get("error") or "").split())[:80]
    return _episode(run, name, f"{kind} is the most frequent failure ({len(rows):,} episodes): {error}".rstrip(": "))


def _episode(run: Path, episode: str, reason: str) -> dict[str, str]:
    return {"episode": episode, "reason": reason, "command": view_command(run, episode)}
