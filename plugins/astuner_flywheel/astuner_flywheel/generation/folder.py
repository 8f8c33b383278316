"""The folder of a generation: proposals, accepted and rejected tasks, each recorded immediately.

``proposals.jsonl`` has a line per answered request, ``tasks.jsonl`` one per accepted task, and ``rejected.jsonl`` one
per rejected proposal with the reason. `Standing` reads the progress from them. Invariants: after a crash at any moment
the folder reflects exactly what was done, so nothing is lost or requested twice; two processes that read the same
folder get the same state; the jsonl reader and `task_of` read a line of the result as the same task, so both can use a
finished folder.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from astuner import LockTaken, Task, append_jsonl, check_unlocked, lock_file, read_jsonl
from astuner.contracts.errors import ConfigError, DataError, RunError
from astuner.contracts.rows import FieldMap
from astuner_flywheel.documents.document import MARK
from astuner_flywheel.generation import prompts
from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_flywheel.generation.material import Candidate, Material, Sample, Unit, candidate, locate, units
from astuner_flywheel.support import cut_torn_end, write_json

_LOCK = ".lock"
_COMMAND = "astuner data generate CONFIG"


class Folder:
    """Paths of a folder. Three of the files are journals, to which lines are only appended."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.about = self.path / MARK
        self.documents = self.path / "documents"
        self.proposals = self.path / "proposals.jsonl"
        self.tasks = self.path / "tasks.jsonl"
        self.rejected = self.path / "rejected.jsonl"
        self.train = self.path / "train.jsonl"
        self.validation = self.path / "validation.jsonl"
        self.report = self.path / "report.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process. The system releases the lock if the process ends.

        :raises RunError: Another process uses the folder.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            held = contextlib.ExitStack()
            held.enter_context(lock_file(self.path / _LOCK))
        except LockTaken as e:
            raise self._in_use(e) from None
        except OSError as e:
            raise ConfigError(f"cannot write to {self.path}: {e.strerror or e}; use another folder") from None
        with held:
            yield

    def check_free(self) -> None:
        """Check that `locked` would succeed now, without writing.

        :raises RunError: Another process uses the folder.
        """
        try:
            check_unlocked(self.path / _LOCK)
        except LockTaken as e:
            raise self._in_use(e) from None

    def _in_use(self, taken: LockTaken) -> RunError:
        return RunError(
            f"{self.path} is in use by another process (pid {taken.pid}) that generates tasks; wait for it, or use "
            "another folder"
        )

    def start_over(self) -> Path | None:
        """Move the contents to a subfolder ``earlier-…``, and return its path, or None if the folder was empty."""
        made = [self.about, self.documents, self.proposals, self.tasks, self.rejected, self.train, self.validation]
        there = [path for path in (*made, self.report) if path.exists()]  # only files of a generation
        if not there:
            return None
        stamp = time.strftime("earlier-%Y%m%d-%H%M%S")
        names = [stamp, *(f"{stamp}-{n}" for n in range(2, 1000))]
        earlier = next(p for name in names if not (p := self.path / name).exists())
        earlier.mkdir()
        for path in there:
            path.rename(earlier / path.name)
        return earlier

    def begin(self, fingerprint: Mapping[str, Any], again: str = _COMMAND) -> str:
        """Return the secret of the folder's prompts. A new folder is assigned to ``fingerprint``.

        :raises ConfigError: As `check`.
        """
        about = self.check(fingerprint, again)
        if about is None:
            about = {"fingerprint": dict(fingerprint), "secret": secrets.token_hex(16)}
            write_json(self.about, about, indent=1)
        for journal in (self.proposals, self.tasks, self.rejected):
            cut_torn_end(journal)
        return str(about["secret"])

    def check(self, fingerprint: Mapping[str, Any], again: str = _COMMAND) -> dict[str, Any] | None:
        """Return the folder's description if it matches ``fingerprint``, or None for a new folder.

        :param again: Command that the user entered.
        :raises ConfigError: The tasks were made from other material or settings. The message lists the changes.
        """
        about = self.read_about()
        if about is not None and (changes := changed(about["fingerprint"], fingerprint)):
            raise ConfigError(
                f"the tasks in {self.path} were made from other material or settings: {'; '.join(changes)}. Start over "
                f"with `{again} --fresh` (existing tasks move to a subfolder), or use another folder with --folder"
            )
        return about

    def read_about(self) -> dict[str, Any] | None:
        """Return the folder's description, or None for a new folder."""
        if not self.about.exists():
            return None
        try:
            about = json.loads(self.about.read_text(encoding="utf-8"))
            if isinstance(about["fingerprint"], dict) and isinstance(about["secret"], str):
                return dict(about)
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise DataError(f"{self.about} cannot be read; start over with --fresh, or use another folder")

    def read_report(self) -> dict[str, Any]:
        """Return the last report, or an empty one."""
        return dict(json.loads(self.report.read_text(encoding="utf-8"))) if self.report.exists() else {}


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between two fingerprints as clauses."""
    changes = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if name == "documents" and isinstance(old, dict) and isinstance(new, dict):
            changes += _changed_documents(old, new)
        elif name == "seeds":
            changes.append("the samples (seeds) have changed" if old and new else "seeds were added or removed")
        elif len(repr(old)) + len(repr(new)) < 200:
            changes.append(f"{name} changed from {old!r} to {new!r}")
        else:
            changes.append(f"{name} has changed")
    return changes


def _changed_documents(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return changed documents by content: a moved file has not changed."""
    gone, come = set(old.values()) - set(new.values()), set(new.values()) - set(old.values())
    by_name = {name for name in set(old) & set(new) if old[name] in gone and new[name] in come}
    lines = [f"{name} has changed" for name in sorted(by_name)]
    lines += [f"{name} was removed" for name, sha in sorted(old.items()) if sha in gone and name not in by_name]
    lines += [f"{name} was added" for name, sha in sorted(new.items()) if sha in come and name not in by_name]
    return lines


def task_row(found: Candidate, *, model: str) -> dict[str, Any]:
    """Return the line of an accepted task. Its origin is in ``metadata.provenance``.

    The task has the system prompt of its samples if they share one.
    """
    chunk = found.unit.chunk
    provenance: dict[str, Any] = {
        "source": "seed" if chunk is None else "document",
        "document": None,
        "sha256": None,
        "span": None,
        "page": None,
        "seed_tasks": [sample.id for sample in found.unit.samples],
        "model": model,
        "prompt_version": prompts.VERSION,
    }
    metadata: dict[str, Any] = {"answer": found.answer, "provenance": provenance}
    if chunk is not None:
        place = locate(found.evidence, chunk.text)
        assert place is not None  # tasks without evidence are not accepted
        span = [chunk.start + place[0], chunk.start + place[1]]
        document = chunk.document
        provenance.update(document=document.path, sha256=document.sha256, span=span, page=document.page_of(span[0]))
        metadata["evidence"] = document.text[span[0] : span[1]]
    shown = found.unit.samples if chunk is None else ()
    same = all(sample.history == shown[0].history for sample in shown)
    return {
        "task_id": found.id,
        "main_query": found.question,
        **history(shown[0].history if shown and same else ()),
        "metadata": metadata,
        "unit": found.unit.id,
        "number": found.number,
        "passage": None if chunk is None else chunk.id,
        "index": found.unit.index,
    }


def sample_task(sample: Sample) -> Task:
    """Return a sample as a task (`use_seeds`)."""
    metadata = {"answer": sample.answer, "provenance": {"source": "sample", "seed_tasks": [sample.id]}}
    return Task(task_id=sample.id, main_query=sample.question, init_messages=sample.history, metadata=metadata)


def made_task(row: Mapping[str, Any]) -> Task:
    """Return the task in a line of ``tasks.jsonl``."""
    names = ("task_id", "main_query", "init_messages", "metadata")
    return Task(**{name: row[name] for name in names if name in row})


def task_of(row: Mapping[str, Any]) -> Task:
    """Return the task in a line of ``train.jsonl`` or ``validation.jsonl``."""
    return FieldMap().task(row, row["task_id"])


def history(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the optional history field of a line."""
    return {"init_messages": list(messages)} if messages else {}


class Standing:
    """Progress of a generation as recorded in its folder.

    :param folder: None for a new generation.
    """

    def __init__(self, config: DataGenerationConfig, material: Material, folder: Folder | None) -> None:
        self._tasks, self._folder = config.tasks, folder
        self._units = {unit.id: unit for unit in units(material, config)}
        self.accepted: dict[str, dict[str, Any]] = {}
        """Rows of ``tasks.jsonl`` by name."""
        self.rejected: Counter[str] = Counter()
        """Number of rejections by reason."""
        self.refused: dict[str, str] = {}
        """Reasons of requests for tasks that the helper model refused."""
        self.waiting: list[Candidate] = []
        """Undecided proposals in order."""
        self._decided: set[str] = set()
        self._asked: set[str] = set()
        if folder is None:
            return
        for row in read_jsonl(folder.tasks):
            self.accepted[row["task_id"]] = row
            self._decided.add(f"{row['unit']}#{row['number']}")
        for row in read_jsonl(folder.rejected):
            self._decided.add(f"{row['unit']}#{row['number']}")
            self.rejected[row["reason"]] += 1
        for row in read_jsonl(folder.proposals):
            self._take(row)

    @property
    def wanted(self) -> int:
        """Return the number of missing tasks."""
        return max(0, self._tasks - len(self.accepted))

    @property
    def answered(self) -> int:
        """Return the number of answered requests for tasks, of all processes that used the folder."""
        return len(self._asked)

    @property
    def unasked(self) -> list[Unit]:
        """Return requests for tasks that were never sent."""
        return [unit for unit in self._units.values() if unit.id not in self._asked and unit.id not in self.refused]

    @property
    def refused_units(self) -> list[Unit]:
        """Return requests for tasks that the helper model refused."""
        return [self._units[name] for name in self.refused]

    def __str__(self) -> str:
        """Return the progress in one line."""
        rejected = ", ".join(f"{count} {reason}" for reason, count in self.rejected.most_common(3))
        parts = [
            f"{len(self.accepted)} of {self.wanted + len(self.accepted)} tasks",
            f"{self.answered} requests for tasks answered",
            f"{len(self.waiting)} waiting",
            f"{sum(self.rejected.values())} rejected{f' ({rejected})' * bool(rejected)}",
        ]
        return " · ".join(parts)

    def propose(self, unit: Unit, tasks: list[dict[str, Any]], **refused: str) -> None:
        """Record that the helper model answered a request for tasks, or refused it with a reason."""
        assert self._folder is not None
        row = {"unit": unit.id, "tasks": tasks, **refused}
        append_jsonl(self._folder.proposals, row)
        self._take(row)

    def accept(self, found: Candidate, row: dict[str, Any]) -> None:
        """Record an accepted proposal."""
        assert self._folder is not None  # without a folder only a plan is made
        append_jsonl(self._folder.tasks, row)
        self.accepted[found.id] = row
        self._decided.add(found.place)

    def reject(self, found: Candidate, reason: str, detail: str) -> None:
        """Record a rejected proposal."""
        assert self._folder is not None
        texts = {name: getattr(found, name)[:5000] for name in ("question", "answer", "evidence")}
        row = {"task_id": found.id, "reason": reason, "detail": detail, **texts}
        append_jsonl(self._folder.rejected, {**row, "unit": found.unit.id, "number": found.number})
        self._decided.add(found.place)
        self.rejected[reason] += 1

    def throw_out(self, why: Callable[[Candidate], tuple[str, str] | None]) -> list[tuple[Candidate, str, str]]:
        """Reject faulty waiting proposals, and return them with reason and detail."""
        kept, gone = [], []
        for found in self.waiting:
            if (fault := why(found)) is not None:
                self.reject(found, *fault)
                gone.append((found, *fault))
            else:
                kept.append(found)
        self.waiting = kept
        return gone

    def _take(self, row: Mapping[str, Any]) -> None:
        """Read the result of one request for tasks."""
        unit = self._units.get(row["unit"])
        if unit is None:
            return  # belongs to a round that is no longer requested
        if "refused" in row:
            self.refused[unit.id] = row["refused"]
            return
        self.refused.pop(unit.id, None)
        self._asked.add(unit.id)
        for number, task in enumerate(row["tasks"]):
            found = candidate(unit, number, task["question"], task["answer"], task["evidence"])
            if found.place not in self._decided:
                self.waiting.append(found)
        self.waiting.sort(key=lambda found: (found.unit.index, found.number))
