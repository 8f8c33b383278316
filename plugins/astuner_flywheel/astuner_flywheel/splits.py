"""Split tasks into training and validation without leaks.

Near-duplicates form clusters (transitively), and each cluster is placed on one side. The side is drawn from hashes of
the tasks' contents, so the same tasks are split the same way in any order and on any machine. Invariant: no task is a
near-duplicate (by `NearDuplicates`) of a task on the other side, and every input task is in `train`, `validation` or
`dropped`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from astuner import Task
from astuner_flywheel.near import THRESHOLD, NearDuplicates


@dataclass(frozen=True, kw_only=True)
class Leak:
    """A task that would have been on the other side of its near-duplicate."""

    task_id: str
    like: str
    """Label of a task there that it nearly repeats, directly or transitively."""
    action: str
    """Action taken: ``moved to train``, ``moved to validation`` or ``dropped from train``."""


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Both sides of a split, and the actions that keep them apart."""

    train: tuple[Task, ...]
    validation: tuple[Task, ...]
    leaks: tuple[Leak, ...] = ()
    dropped: tuple[Task, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """Notes for users, for example that all tasks form one cluster."""

    def report(self) -> dict[str, Any]:
        """Return the number of tasks per side and all leaks as JSON."""
        return {
            "train": len(self.train),
            "validation": len(self.validation),
            "dropped": len(self.dropped),
            "leaks": [{"task_id": leak.task_id, "like": leak.like, "action": leak.action} for leak in self.leaks],
            "notes": list(self.notes),
        }


def asked(task: Task) -> str:
    """Return the user's messages of a task for comparison, without a shared system prompt."""
    said = [str(m.get("content", "")) for m in task.init_messages if m.get("role") == "user"]
    return "\n".join([*said, task.main_query]).strip() or json.dumps(list(task.init_messages), default=str)


def split(
    tasks: Sequence[Task],
    *,
    validation_share: float,
    seed: int = 0,
    threshold: float = THRESHOLD,
    numbers_tell_apart: bool = False,
    group: Callable[[Task], str] | None = None,
) -> Sides:
    """Draw a share of the tasks for validation. Near-duplicates stay together, and both sides keep their order.

    :param validation_share: Share of all tasks, at least 0 and below 1. Above 0, validation gets at least one task if
        two tasks differ.
    :param group: Return the group of a task. Tasks of one group stay together; "" means no group.
    :raises ValueError: The share is out of range.
    """
    if not 0 <= validation_share < 1:
        raise ValueError(f"the validation share must be at least 0 and below 1, not {validation_share}")
    wanted = round(validation_share * len(tasks))
    if validation_share and len(tasks) > 1:
        wanted = min(max(wanted, 1), len(tasks) - 1)
    texts = [asked(task) for task in tasks]
    groups = [group(task) for task in tasks] if group else []
    cluster_of, clusters = _clusters(texts, threshold, numbers_tell_apart, groups)
    draws = [hashlib.sha256(f"{seed}\n{text}".encode("utf-8", "backslashreplace")).hexdigest() for text in texts]
    order = sorted(range(len(tasks)), key=lambda i: (draws[i], i))
    drawn = set(order[:wanted])
    chosen = _fill(order, cluster_of, clusters, wanted)
    leaks = tuple(
        Leak(
            task_id=tasks[i].task_id,
            like=next(tasks[other].task_id for other in cluster if (other in drawn) != (i in drawn)),
            action="moved to validation" if i in chosen else "moved to train",
        )
        for cluster in clusters
        if drawn & set(cluster) and not drawn >= set(cluster)
        for i in cluster
        if (i in drawn) != (i in chosen)
    )
    notes = []
    if wanted and not chosen:
        alike = "near-duplicates of each other" + (" or belong together" if groups else "")
        notes.append(f"all {len(tasks)} tasks are {alike}, so validation is empty")
    elif wanted and not wanted / 2 <= len(chosen) <= wanted * 2:
        notes.append(f"validation has {len(chosen)} of {wanted} requested tasks, because near-duplicates stay together")
    return Sides(
        train=tuple(task for i, task in enumerate(tasks) if i not in chosen),
        validation=tuple(task for i, task in enumerate(tasks) if i in chosen),
        leaks=leaks,
        notes=tuple(notes),
    )


def separate(
    train: Iterable[Task],
    validation: Sequence[Task],
    *,
    threshold: float = THRESHOLD,
    numbers_tell_apart: bool = False,
) -> Sides:
    """Drop training tasks that nearly repeat a task of a given validation set."""
    known = NearDuplicates[str](threshold, numbers_tell_apart=numbers_tell_apart)
    for task in validation:
        known.keep(task.task_id, asked(task))
    kept, dropped, leaks = [], [], []
    for task in train:
        near = known.near(asked(task))
        if near:
            dropped.append(task)
            leaks.append(Leak(task_id=task.task_id, like=near[0][0], action="dropped from train"))
        else:
            kept.append(task)
    return Sides(train=tuple(kept), validation=tuple(validation), leaks=tuple(leaks), dropped=tuple(dropped))


def _clusters(
    texts: Sequence[str], threshold: float, numbers_tell_apart: bool, groups: Sequence[str] = ()
) -> tuple[list[int], list[list[int]]]:
    """Return the cluster of each text and the members of each cluster, both in the order of the texts."""
    from scipy.cluster.hierarchy import DisjointSet

    known = NearDuplicates[int](threshold, numbers_tell_apart=numbers_tell_apart)
    joined = DisjointSet(range(len(texts)))
    first: dict[str, int] = {}  # identical texts are compared once
    for i, text in enumerate(texts):
        if (same := first.setdefault(text, i)) != i:
            joined.merge(i, same)
            continue
        for near, _ in known.near(text):
            joined.merge(i, near)
        known.keep(i, text)
    member: dict[str, int] = {}
    for i, group in enumerate(groups):
        if group:
            joined.merge(i, member.setdefault(group, i))
    clusters = sorted(sorted(cluster) for cluster in joined.subsets())
    number_of = {i: number for number, cluster in enumerate(clusters) for i in cluster}
    return [number_of[i] for i in range(len(texts))], clusters


def _fill(order: Sequence[int], cluster_of: Sequence[int], clusters: Sequence[Sequence[int]], wanted: int) -> set[int]:
    """Return complete clusters in the drawn order while they fit, or the smallest cluster if none fits."""
    chosen: set[int] = set()
    if not wanted:
        return chosen
    for i in order:
        cluster = clusters[cluster_of[i]]
        if i not in chosen and len(chosen) + len(cluster) <= wanted:
            chosen.update(cluster)
    if not chosen and len(clusters) > 1:
        rank = {i: place for place, i in enumerate(order)}
        smallest: Sequence[int] = min(clusters, key=lambda cluster: (len(cluster), min(rank[i] for i in cluster)))
        chosen.update(smallest)
    return chosen
