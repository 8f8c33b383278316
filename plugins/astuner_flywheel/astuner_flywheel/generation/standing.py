"""How far a generation is: what was asked, what is accepted, rejected and refused, and what waits to be decided.

It is read from a folder's journals, and whatever is added is in them first.  Invariant: two processes that read the
same folder find the same, and nothing here asks anybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_flywheel.generation.folder import Folder
from astuner_flywheel.generation.material import Material
from astuner_flywheel.generation.units import Candidate, Unit, candidate, units


class Standing:
    """What a folder says of a generation.

    :param folder: None for one that begins anew.
    """

    def __init__(self, config: DataGenerationConfig, material: Material, folder: Folder | None) -> None:
        self._tasks, self._folder = config.tasks, folder
        self._units = {unit.id: unit for unit in units(material, config)}
        self.accepted: dict[str, dict[str, Any]] = {}
        """Name -> row of ``tasks.jsonl``."""
        self.rejected: Counter[str] = Counter()
        """Reason -> how many."""
        self.refused: dict[str, str] = {}
        """Requests for tasks that the helper would not answer -> why."""
        self.waiting: list[Candidate] = []
        """Proposed and not decided, in order."""
        self._decided: set[tuple[str, int]] = set()
        self._asked: set[str] = set()
        if folder is None:
            return
        for row in folder.tasks.rows(but_a_torn_end=True):
            self.accepted[row["task_id"]] = row
            self._decided.add((row["unit"], row["number"]))
        for row in folder.rejected.rows(but_a_torn_end=True):
            self._decided.add((row["unit"], row["number"]))
            self.rejected[row["reason"]] += 1
        for row in folder.proposals.rows(but_a_torn_end=True):
            self._take(row)

    @property
    def wanted(self) -> int:
        """Tasks that are still missing."""
        return max(0, self._tasks - len(self.accepted))

    @property
    def answered(self) -> int:
        """Requests for tasks that were answered, in all processes that worked in the folder."""
        return len(self._asked)

    @property
    def possible(self) -> int:
        """Requests for tasks that the material and the rounds allow, asked or not."""
        return len(self._units)

    @property
    def unasked(self) -> list[Unit]:
        """Requests for tasks that were never made."""
        return [unit for unit in self._units.values() if unit.id not in self._asked and unit.id not in self.refused]

    @property
    def refused_units(self) -> list[Unit]:
        """Those that the helper would not answer."""
        return [self._units[name] for name in self.refused]

    def propose(self, unit: Unit, tasks: list[dict[str, Any]]) -> None:
        """The helper answered a request for tasks."""
        self._write({"unit": unit.id, "tasks": tasks})

    def refuse(self, unit: Unit, why: str) -> None:
        """The helper would not answer a request for tasks."""
        self._write({"unit": unit.id, "tasks": [], "refused": why[:500]})

    def accept(self, found: Candidate, row: dict[str, Any]) -> None:
        """A proposal is a task."""
        assert self._folder is not None  # of one that begins anew only its plan is made
        self._folder.tasks.append(row)
        self.accepted[found.id] = row
        self._decided.add(found.place)

    def reject(self, found: Candidate, reason: str, detail: str) -> None:
        """A proposal is none."""
        assert self._folder is not None
        self._folder.rejected.append(
            {
                "task_id": found.id,
                "reason": reason,
                "detail": detail,
                "question": found.question[:5000],
                "answer": found.answer[:5000],
                "evidence": found.evidence[:5000],
                "unit": found.unit.id,
                "number": found.number,
            }
        )
        self._decided.add(found.place)
        self.rejected[reason] += 1

    def throw_out(self, why: Callable[[Candidate], tuple[str, str] | None]) -> list[tuple[Candidate, str, str]]:
        """Reject what waits and has a fault; those, each with the reason and the detail."""
        kept, gone = [], []
        for found in self.waiting:
            if (fault := why(found)) is not None:
                self.reject(found, *fault)
                gone.append((found, *fault))
            else:
                kept.append(found)
        self.waiting = kept
        return gone

    def _write(self, row: dict[str, Any]) -> None:
        assert self._folder is not None
        self._folder.proposals.append(row)
        self._take(row)

    def _take(self, row: Mapping[str, Any]) -> None:
        """What became of one request for tasks."""
        unit = self._units.get(row["unit"])
        if unit is None:
            return  # of a round that is not wanted any more
        if "refused" in row:
            self.refused[unit.id] = row["refused"]
            return
        self.refused.pop(unit.id, None)
        self._asked.add(unit.id)
        for number, task in enumerate(row["tasks"]):
            found = candidate(unit, number, task["question"], task["answer"], task["evidence"])
            if found.place not in self._decided:
                self.waiting.append(found)
        self.waiting.sort(key=lambda found: found.order)
