"""The folder of a generation: what was proposed, accepted and rejected, written down the moment it is known.

``proposals.jsonl`` has a line for every request that was answered, ``tasks.jsonl`` one for every accepted task,
``rejected.jsonl`` one for every other with the reason.  Invariant: after a crash at any moment the folder says exactly
what was done, so that nothing is lost and nothing that was answered is asked again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from astuner import RunDir
from astuner.contracts.errors import ConfigError, DataError, RunError
from astuner.support.json_lines import append_jsonl, write_jsonl
from astuner.support.locks import Taken, check_free, locked
from astuner_flywheel.documents.find import MARK

_MADE = (
    MARK, "proposals.jsonl", "tasks.jsonl", "rejected.jsonl", "train.jsonl", "validation.jsonl",
    "report.json", "documents",
)  # fmt: skip
"""What is in it; `start_over` moves these and nothing else."""
_LOCK = ".lock"
_COMMAND = "astuner data generate CONFIG"


class Folder:
    """Paths of a folder, and its journals."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.about = self.path / MARK
        self.documents = self.path / "documents"
        self.proposals = Journal(self.path / "proposals.jsonl")
        self.tasks = Journal(self.path / "tasks.jsonl")
        self.rejected = Journal(self.path / "rejected.jsonl")
        self.train = self.path / "train.jsonl"
        self.validation = self.path / "validation.jsonl"
        self.report = self.path / "report.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; released by the system if it dies.

        :raises RunError: another process is at work in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            held = contextlib.ExitStack()
            held.enter_context(locked(self.path / _LOCK))
        except Taken as e:
            raise self._in_use(e) from None
        except OSError as e:
            raise ConfigError(f"cannot write to {self.path}: {e.strerror or e}; choose another folder") from None
        with held:
            yield

    def check_free(self) -> None:
        """Whether `locked` would have the folder now; writes nothing.

        :raises RunError: another process is at work in it.
        """
        try:
            check_free(self.path / _LOCK)
        except Taken as e:
            raise self._in_use(e) from None

    def _in_use(self, taken: Taken) -> RunError:
        return RunError(
            f"{self.path} is in use by another process (pid {taken.pid}) that makes tasks; wait for it, or choose "
            "another folder"
        )

    def start_over(self) -> Path | None:
        """Move what is in the folder below ``earlier-…`` in it; where to, None when there was nothing."""
        there = [self.path / name for name in _MADE if (self.path / name).exists()]
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
        """The secret of the folder's prompts; a folder that has none yet becomes that of ``fingerprint``.

        :raises ConfigError: as `check`.
        """
        about = self.check(fingerprint, again)
        if about is None:
            about = {"fingerprint": dict(fingerprint), "secret": secrets.token_hex(16)}
            RunDir.write_atomically(self.about, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
        for journal in (self.proposals, self.tasks, self.rejected):
            journal.repair()
        return str(about["secret"])

    def check(self, fingerprint: Mapping[str, Any], again: str = _COMMAND) -> dict[str, Any] | None:
        """What the folder says about itself, if that is of ``fingerprint``; None for a new one.

        :param again: the command that a person typed.
        :raises ConfigError: it has tasks that were made from something else; says what has changed.
        """
        about = self.read_about()
        if about is not None and (changes := changed(about["fingerprint"], fingerprint)):
            raise ConfigError(
                f"the tasks in {self.path} were made from something else: {'; '.join(changes)}. Start over with "
                f"`{again} --fresh` (what is there is kept in a folder in it), or choose another folder with --folder"
            )
        return about

    def read_about(self) -> dict[str, Any] | None:
        """What the folder says about itself; None for a new one."""
        if not self.about.exists():
            return None
        try:
            about = json.loads(self.about.read_text(encoding="utf-8"))
            if isinstance(about["fingerprint"], dict) and isinstance(about["secret"], str):
                return dict(about)
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise DataError(f"{self.about} cannot be read; start over with --fresh, or choose another folder")

    def write_rows(self, path: Path, rows: list[dict[str, Any]]) -> None:
        """Write a file of rows as one: it is the old one or the new one, never a half."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        write_jsonl(temporary, rows)
        temporary.replace(path)

    def write_report(self, report: Mapping[str, Any]) -> None:
        RunDir.write_atomically(self.report, json.dumps(report, indent=2, ensure_ascii=False) + "\n")

    def read_report(self) -> dict[str, Any]:
        """The last report; empty while there is none."""
        return dict(json.loads(self.report.read_text(encoding="utf-8"))) if self.report.exists() else {}


class Journal:
    """A JSON Lines file that is only ever appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Mapping[str, Any]) -> None:
        """It is in the file when this returns."""
        append_jsonl(self.path, row)

    def rows(self, *, but_a_torn_end: bool = False) -> list[dict[str, Any]]:
        """Everything in it; lines end at \\n and nowhere else, whatever a model wrote.

        :param but_a_torn_end: leave out a last line that a crash cut short, as `repair` would.
        :raises DataError: a line was damaged; names it.
        """
        if not self.path.exists():
            return []
        found = []
        lines = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1] if but_a_torn_end else lines, start=1):
            if not line:
                continue
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("it is no object")
            except ValueError as e:
                raise DataError(
                    f"{self.path}:{number} is damaged ({e}); remove the line, or start over with --fresh"
                ) from None
            found.append(row)
        return found

    def repair(self) -> None:
        """Take off a last line that a crash cut short, so that the next one is not written behind its half."""
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            data = file.read()
            if data and not data.endswith(b"\n"):
                file.truncate(data.rfind(b"\n") + 1)


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is different between two fingerprints, as clauses."""
    changes = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if name == "documents" and isinstance(old, dict) and isinstance(new, dict):
            changes += _changed_documents(old, new)
        elif name == "seeds":
            changes.append("the samples (seeds) have changed" if old and new else "samples (seeds) came or went")
        elif len(repr(old)) + len(repr(new)) < 200:
            changes.append(f"{name} was {old!r} and is {new!r}")
        else:
            changes.append(f"{name} has changed")
    return changes


def _changed_documents(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """By content: a file that was only moved has not changed."""
    gone, come = set(old.values()) - set(new.values()), set(new.values()) - set(old.values())
    by_name = {name for name in set(old) & set(new) if old[name] in gone and new[name] in come}
    lines = [f"{name} has changed" for name in sorted(by_name)]
    lines += [f"{name} is gone" for name, sha in sorted(old.items()) if sha in gone and name not in by_name]
    lines += [f"{name} is new" for name, sha in sorted(new.items()) if sha in come and name not in by_name]
    return lines
