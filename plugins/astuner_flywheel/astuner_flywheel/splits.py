"""Training and validation tasks that do not leak into each other.

Near-duplicates are gathered into clusters (everything that is near something that is near …) and a cluster goes to one
side as a whole.  Which side is drawn from hashes of the tasks' contents, so the same tasks are split the same way in
any order and on any machine.  Invariant: no task of one side is a near-duplicate (by `NearDuplicates`) of one of the
other, and every task that came in is in `train`, in `validation` or in `dropped`.
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
    """One task that would have stood on the other side of its near-duplicate."""

    task_id: str
    like: str
    """The label of a task there that it nearly repeats, itself or through others."""
    action: str
    """What was done: ``moved to train``, ``moved to validation`` or ``dropped from train``."""


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The two sides, and what was done to keep them apart."""

    train: tuple[Task, ...]
    validation: tuple[Task, ...]
    leaks: tuple[Leak, ...] = ()
    dropped: tuple[Task, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """What the person should know, e.g. that everything was one cluster."""

    def report(self) -> dict[str, Any]:
        """As JSON: how many on each side, and each leak."""
        return {
            "train": len(self.train),
            "validation": len(self.validation),
            "dropped": len(self.dropped),
            "leaks": [{"task_id": leak.task_id, "like": leak.like, "action": leak.action} for leak in self.leaks],
            "notes": list(self.notes),
        }


def asked(task: Task) -> str:
    """What a task asks, as it is compared: what the user said. A system prompt that all share would make all alike."""
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
    """Draw a share of the tasks for validation, near-duplicates together; both sides keep the order of ``tasks``.

    :param validation_share: from 0 to below 1, of all tasks; above 0, validation gets one task at least where there are
        two that differ.
    :param group: tasks of the same group stay together too, however different they are; "" is no group.
    :raises ValueError: the share is out of its range.
    """
    if not 0 <= validation_share < 1:
        raise ValueError(f"the share of validation tasks must be from 0 to below 1, not {validation_share}")
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
        notes.append(f"all {len(tasks)} tasks are {alike}: none is left for validation")
    elif wanted and not wanted / 2 <= len(chosen) <= wanted * 2:
        notes.append(f"validation has {len(chosen)} of the {wanted} tasks asked for: near-duplicates stay together")
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
    """Drop the training tasks that nearly repeat a validation task, where the validation set is given and stays."""
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
    """Which cluster each text is in, and the members of each, both in the order of the texts."""
    from scipy.cluster.hierarchy import DisjointSet

    known = NearDuplicates[int](threshold, numbers_tell_apart=numbers_tell_apart)
    joined = DisjointSet(range(len(texts)))
    first: dict[str, int] = {}  # a text that is there a thousand times is compared once
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
    """Whole clusters in the drawn order, as long as they fit; where none fits, the smallest, if it is not all."""
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
