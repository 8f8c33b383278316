"""The tasks that all runs of both sides have, and why the others are left out.

Invariant: nothing is left out silently, and where the task sets differ, nothing at all unless the person agreed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from astuner.contracts.errors import DataError
from astuner_report.compare.measures import Measured, TaskNumbers


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """Which tasks are compared, by their keys in `Measured.tasks`."""

    tasks: tuple[str, ...]
    """Scored in every run, in the order of the first one."""
    only_a: tuple[TaskNumbers, ...]
    """Not in all runs of b."""
    only_b: tuple[TaskNumbers, ...]
    changed: tuple[str, ...]
    """Ids of tasks that are on both sides, and ask something else there."""
    unscored: Mapping[str, str]
    """Id of a task in all runs, without a scored episode in some -> how it ended in which."""


def pair(a: Sequence[Measured], b: Sequence[Measured], *, common: bool = False) -> Pairing:
    """Find the tasks of all runs.

    :param common: whether it is fine that the runs have other tasks too.
    :raises DataError: they have, and it is not; or there is nothing to compare.
    """
    runs = [*a, *b]
    shared = [key for key in a[0].tasks if all(key in run.tasks for run in runs)]
    only_a, only_b = _left_out(a, shared), _left_out(b, shared)
    unscored = {key: why for key in shared if (why := _unscored(key, runs))}
    pairing = Pairing(
        tasks=tuple(key for key in shared if key not in unscored),
        only_a=only_a,
        only_b=only_b,
        changed=tuple(sorted({t.task_id for t in only_a} & {t.task_id for t in only_b})),
        unscored={a[0].tasks[key].task_id: why for key, why in unscored.items()},
    )
    _check(pairing, a, b, common)
    return pairing


def _left_out(side: Sequence[Measured], shared: Sequence[str]) -> tuple[TaskNumbers, ...]:
    known = set(shared)
    return tuple({key: task for run in side for key, task in run.tasks.items() if key not in known}.values())


def _unscored(key: str, runs: Sequence[Measured]) -> str:
    return ", ".join(f"{run.tasks[key].ended} in {run.run.name}" for run in runs if not run.tasks[key].episodes)


def _check(pairing: Pairing, a: Sequence[Measured], b: Sequence[Measured], common: bool) -> None:
    of = f"{_sizes(a)} tasks on the side of {a[0].run.name}, {_sizes(b)} on that of {b[0].run.name}"
    if not pairing.tasks:
        raise DataError(f"there is nothing to compare: {of}, and no task is scored in all runs{_hint(pairing)}")
    if common or not (pairing.only_a or pairing.only_b):
        return
    together = len(pairing.tasks) + len(pairing.unscored)
    raise DataError(
        f"the runs have different tasks: {of}; {together} are in all of them{_hint(pairing)}; to compare those alone, "
        "add --common"
    )


def _sizes(side: Sequence[Measured]) -> str:
    sizes = sorted({len(run.tasks) for run in side})
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def _hint(pairing: Pairing) -> str:
    if {t.text for t in pairing.only_a} & {t.text for t in pairing.only_b}:
        return "; some ask the same under another id: --by text"
    if pairing.changed:
        some = ", ".join(pairing.changed[:3])
        return f"; {len(pairing.changed)} have the same id and ask something else, e.g. {some}"
    return ""
