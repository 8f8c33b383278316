"""Before and after on the tasks that are not trained on: how much better, and whether that is more than chance."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from astuner.rollout.metrics import mean
from astuner_record.statistics import (
    Interval,
    PairedTable,
    bootstrap_interval,
    mcnemar_exact,
    paired_success_interval,
    sign_flip_test,
)
from astuner_report.sentinel.statistics import normal_tail, two_proportions

Tried = tuple[int, int]
"""Successes and scored attempts at one task."""
SIGNIFICANT = 0.05


def held_out(rows: Sequence[Mapping[str, Any]], episodes: Path) -> dict[str, Any] | None:
    """The first and the last validation, the best one, and what the first two differ by; None without a validation.

    :param rows: of ``metrics.jsonl``.
    :param episodes: the folder with ``validation_….jsonl``.
    """
    validated = [row for row in rows if "val/success" in row]
    if not validated:
        return None
    first, last = validated[0], validated[-1]
    best = max(validated, key=lambda row: row["val/success"])
    found: dict[str, Any] = {"validations": len(validated), "best": _measured(best), "after": _measured(last)}
    if first["step"] == 0 and last is not first:
        found |= {"before": _measured(first), "difference": _difference(first, last, episodes)}
    return found


def _measured(row: Mapping[str, Any]) -> dict[str, Any]:
    named = {
        "step": "step",
        "success": "val/success",
        "low": "val/success_ci_low",
        "high": "val/success_ci_high",
        "reward": "val/reward/mean",
        "tasks": "val/tasks",
        "unscored_tasks": "val/unscored_tasks",
        "failed_episodes": "val/failed_episodes",
    }
    return {ours: row.get(theirs) for ours, theirs in named.items()}


def _difference(first: Mapping[str, Any], last: Mapping[str, Any], episodes: Path) -> dict[str, Any]:
    before, after = (_tries(episodes / f"validation_{row['step']:06d}.jsonl") for row in (first, last))
    pairs = [(before[task], after[task]) for task in before if task in after]
    if pairs:
        return _paired(pairs)
    tasks = [round(row["val/tasks"]) for row in (first, last)]
    return _unpaired(first["val/success"], tasks[0], last["val/success"], tasks[1])


def _paired(pairs: Sequence[tuple[Tried, Tried]]) -> dict[str, Any]:
    once = all(tries == 1 for pair in pairs for _, tries in pair)
    differences = [after[0] / after[1] - before[0] / before[1] for before, after in pairs]
    if once:
        table = PairedTable.of([(bool(before[0]), bool(after[0])) for before, after in pairs])
        interval, p, test = paired_success_interval(table), mcnemar_exact(table), "McNemar's exact test"
        changed = {"became right": table.only_b, "became wrong": table.only_a}
    else:
        interval, p = bootstrap_interval(differences), sign_flip_test(differences)
        test = "sign-flip permutation test"
        changed = {"better": sum(d > 0 for d in differences), "worse": sum(d < 0 for d in differences)}
    return _said(mean(differences), interval, p, f"{test}, paired by task", len(pairs)) | {"changed": changed}


def _unpaired(p1: float, n1: int, p2: float, n2: int) -> dict[str, Any]:
    p = 2 * normal_tail(abs(two_proportions((p1 * n1, n1), (p2 * n2, n2))))
    half = 1.959964 * math.sqrt(p1 * (1 - p1) / max(n1, 1) + p2 * (1 - p2) / max(n2, 1))
    interval = Interval(max(-1.0, p2 - p1 - half), min(1.0, p2 - p1 + half))
    test = "two-proportion z-test (the episodes are not there to pair by task, so it is on the safe side)"
    return _said(p2 - p1, interval, p, test, min(n1, n2))


def _said(difference: float, interval: Interval, p: float, test: str, tasks: int) -> dict[str, Any]:
    return {
        "mean": difference,
        "low": interval.low,
        "high": interval.high,
        "p": p,
        "significant": p < SIGNIFICANT,
        "test": test,
        "tasks": tasks,
    }


def _tries(path: Path) -> dict[str, Tried]:
    """Number of the task -> what was tried; a validation of one step goes through the tasks in the order of another."""
    found: dict[str, Tried] = {}
    for row in _rows(path):
        if row.get("reward") is None:
            continue
        number = f"{row['group_id']}".rpartition("-")[2], f"{row['task_id']}"
        successes, tries = found.get("/".join(number), (0, 0))
        found["/".join(number)] = successes + bool(row["is_success"]), tries + 1
    return found


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):  # else a crash cut it off
                yield json.loads(line)
