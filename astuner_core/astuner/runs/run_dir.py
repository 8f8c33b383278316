"""The run folder: one path per kind of data, one process at a time, no data lost on a crash.

::

    launcher_record/<experiment>/
      resolved.yaml        complete config as it ran, without secrets
      metrics.jsonl        one line per step and per validation
      progress.json        current phase, elapsed and remaining time
      run.log              plan, notes and warnings, with times
      failures.jsonl       episodes that were not scored, with reasons
      episodes/            readable conversations (step_000012.jsonl, validation_000012.jsonl); the episode log with
                           every token (episodes.sqlite, tokenizer/tokenizer.json); endings of validations
                           (validated.jsonl); validation results per task (validated_000012.json)
      checkpoints/         step-000050/ …, for transformers: the newest ones and the best validated one
      resume/              newest step, to resume from
      alarms.jsonl         alarms of the sentinel
      certificate.json     exactness of continued turns, and the use of every token
      tasks.json           whether the validation tasks are held out
      task_digests.json    digest of every task, to recognize the tasks when a run resumes
      origin.json          command, machine and versions
      report.html  report.md  reward_curve.png  reward_curve.svg  summary.json
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from astuner.contracts.errors import ConfigError, RunError
from astuner.contracts.validation import (
    Best,
    Figures,
    Results,
    TaskResult,
    best_of,
    best_step,
    read_results,
    results_row,
)
from astuner.support.json_lines import read_jsonl, write_jsonl
from astuner.support.locks import LockTaken, lock_file

_CHECKPOINT = re.compile(r"step-\d+")


class RunDir:
    """Paths of a run folder, and its atomic operations."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.metrics = self.path / "metrics.jsonl"
        self.log = self.path / "run.log"
        self.progress = self.path / "progress.json"
        self.failures = self.path / "failures.jsonl"
        self.alarms = self.path / "alarms.jsonl"
        self.episodes = self.path / "episodes"
        self.validated = self.episodes / "validated.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.resume = self.path / "resume"
        self._folders = (self.path, self.episodes, self.checkpoints, self.resume)
        self.curve = self.path / "reward_curve.png"
        self.curve_svg = self.path / "reward_curve.svg"
        self.tasks = self.path / "tasks.json"
        self.task_digests = self.path / "task_digests.json"
        self.origin = self.path / "origin.json"
        self.report_html = self.path / "report.html"
        self.report_md = self.path / "report.md"
        self.certificate = self.path / "certificate.json"
        self.summary = self.path / "summary.json"
        self.resolved = self.path / "resolved.yaml"

    def check_usable(self) -> None:
        """Check that a run could write here, without writing.

        :raises ConfigError: The path is a file, or the folder cannot be created.
        """
        there = next(p for p in (self.path, *self.path.parents) if p.exists())
        if not there.is_dir():
            raise self._unusable(f"{there} is a file")
        for folder in {there, self.path.parent if self.path == there else there}:  # the lock is next to the folder
            if not os.access(folder, os.W_OK | os.X_OK):
                raise self._unusable(f"{folder} cannot be written to")

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError(
            f"the run folder {self.path} cannot be used: {why}. Choose another folder with --run-dir DIR, or start "
            "astuner in a folder that you can write to"
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process; the operating system releases the lock if the process dies.

        :raises RunError: Another process has locked it.
        :raises ConfigError: The folder cannot be created.
        """
        self.check_usable()
        lock = self.path.with_name(f".{self.path.name}.lock")  # outside the folder, which may be moved
        with ExitStack() as held:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(lock_file(lock))
            except OSError as e:
                raise self._unusable(str(e)) from None
            except LockTaken as e:
                raise RunError(
                    f"{self.path} is in use by another run (pid {e.pid}). "
                    "Wait for it, stop it with `astuner kill`, or choose another astuner.experiment_name=…"
                ) from None
            yield

    def start(self, *, keep: bool = True) -> Path | None:
        """Create an empty folder. An earlier run is renamed and its new path returned, or deleted (``keep=False``)."""
        moved = None
        if not keep and self.path.exists():
            shutil.rmtree(self.path)
        elif self.path.exists() and any(self.path.iterdir()):
            stamp = f"{self.path.name}.{time.strftime('%Y%m%d-%H%M%S')}"
            names = itertools.chain([stamp], (f"{stamp}-{n}" for n in itertools.count(2)))
            moved = next(p for name in names if not (p := self.path.with_name(name)).exists())
            self.path.rename(moved)
        for folder in self._folders:
            folder.mkdir(parents=True, exist_ok=True)
        return moved

    def is_whole(self) -> bool:
        """Return whether all folders that `start` created exist. A late write may recreate some, but not all."""
        return all(folder.is_dir() for folder in self._folders)

    def rewind(self, step: int) -> None:
        """Remove entries after ``step``, or of an unfinished validation.

        A resumed run then continues its curve without gaps, and no failure counts twice.
        """
        for half in self.path.glob(".*.tmp"):  # left by a killed process
            half.unlink()
        ended = {row["step"] for row in self.read_metrics() if "val/success" in row}
        for path in (self.metrics, self.failures, self.alarms, self.validated):
            if path.exists():
                kept = [row for row in read_jsonl(path) if row.get("step", step) <= step]
                kept = [row for row in kept if row.get("step") in ended or str(row.get("episode_id"))[0] != "v"]
                temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
                write_jsonl(temporary, kept)
                temporary.replace(path)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the rows of ``metrics.jsonl``."""
        return read_jsonl(self.metrics)

    @property
    def models(self) -> list[Path]:
        """Complete checkpoints, oldest first. A checkpoint being written has another name."""
        return sorted(p for p in self.checkpoints.glob("step-*") if _CHECKPOINT.fullmatch(p.name))

    @property
    def best(self) -> Path | None:
        """Kept checkpoint with the best validation, the newest of equals; None if no validated step is kept.

        Checkpoints are compared by success, then by reward. The result is computed from metrics and kept checkpoints,
        so it stays correct when a run resumes from an earlier step.
        """
        best = self.best_validation()
        return None if best is None else self.checkpoint(best.step)

    def best_validation(self) -> Best | None:
        """Return the details of `best`: a comparison on the tasks that the validations of all kept checkpoints scored.

        For an older run without results per task, each validation counts with its own tasks.
        """
        measured = {row["step"]: row for row in self.read_metrics() if row.get("val/success") is not None}
        kept = [step for step in sorted(measured) if self.checkpoint(step) in self.models]
        found = {step: results for step in kept if (results := self.task_results(step))}
        if len(found) == len(kept):
            return best_of(found)
        own = {step: _own_figures(measured[step]) for step in kept}
        return Best(best_step(own), None, own)

    def task_results(self, step: int) -> dict[str, TaskResult]:
        """Return the result of each task in the validation of a step; empty if the file is missing or damaged."""
        try:
            return read_results(json.loads(self._task_results(step).read_text(encoding="utf-8"))["tasks"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}

    def write_task_results(self, step: int, results: Results) -> None:
        """Write the result of each task in the validation of a step, replacing earlier results of that step."""
        text = json.dumps({"step": step, "tasks": results_row(results)}, separators=(",", ":"))
        self.write_atomically(self._task_results(step), text + "\n")

    def _task_results(self, step: int) -> Path:
        return self.episodes / f"validated_{step:06d}.json"

    def checkpoint(self, step: int) -> Path:
        """Return the path of a step's checkpoint, which may not exist."""
        return self.checkpoints / f"step-{step:06d}"

    def write_json(self, path: Path, value: Mapping[str, Any]) -> None:
        self.write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    @staticmethod
    def write_atomically(path: Path, text: str) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)  # in a shared folder it may be a link
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def _own_figures(row: Mapping[str, Any]) -> Figures:
    return Figures(row["val/success"], row.get("val/reward/mean") or 0.0)


def debug_folder(folder: Path) -> Path:
    """Return the folder of a try-out, which never touches the training run's folder."""
    return folder.with_name(f"{folder.name}.debug")
