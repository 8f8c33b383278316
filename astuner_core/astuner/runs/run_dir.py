"""The run folder: one place per kind of thing, one process at a time, nothing lost on a crash.

::

    launcher_record/<experiment>/
      resolved.yaml        the whole config as it ran, secrets removed
      metrics.jsonl        one line per step and per validation
      run.log              plan, notes and warnings, with times
      failures.jsonl       every episode that was not scored, and why
      episodes/            readable conversations: step_000012.jsonl, validation_000012.jsonl; and the episode log,
                           with every token: episodes.sqlite, tokenizer/tokenizer.json; how validations ended:
                           validated.jsonl; and what each found of each task: validated_000012.json
      checkpoints/         step-000050/ … load with transformers: the newest ones, and the best validated one
      resume/              the newest step, to continue from
      alarms.jsonl         what the sentinel had to say
      certificate.json     how exactly turns went on, and what became of every token
      tasks.json           whether the validation tasks are held out
      task_digests.json    a digest of every task, by which a resumed run recognises them
      origin.json          what was typed where, on which machine, with which versions
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
    """Paths of a run folder, and the few operations that must be atomic."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.metrics = self.path / "metrics.jsonl"
        self.log = self.path / "run.log"
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
        """Whether a run could write here; writes nothing.

        :raises ConfigError: the folder is a file, or cannot be made.
        """
        there = next(p for p in (self.path, *self.path.parents) if p.exists())
        if not there.is_dir():
            raise self._unusable(f"{there} is a file")
        for folder in {there, self.path.parent if self.path == there else there}:  # its lock lies beside it
            if not os.access(folder, os.W_OK | os.X_OK):
                raise self._unusable(f"{folder} cannot be written to")

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError(
            f"the run folder {self.path} cannot be used: {why}; choose another place: --run-dir DIR, or start astuner "
            "in a folder of yours"
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; released by the system if it dies.

        :raises RunError: another process is running in it.
        :raises ConfigError: it cannot be made.
        """
        self.check_usable()
        lock = self.path.with_name(f".{self.path.name}.lock")  # beside the folder: the folder itself may be moved away
        with ExitStack() as held:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(lock_file(lock))
            except OSError as e:
                raise self._unusable(str(e)) from None
            except LockTaken as e:
                raise RunError(
                    f"{self.path} is in use by another run (pid {e.pid}); "
                    "wait for it, stop it with `astuner kill`, or choose astuner.experiment_name=…"
                ) from None
            yield

    def start(self, *, keep: bool = True) -> Path | None:
        """Make an empty folder; an earlier run's gets another name, which is returned, or (keep=False) is removed."""
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
        """Whether every folder that `start` made exists. A late write may make the run folder again, but not all."""
        return all(folder.is_dir() for folder in self._folders)

    def rewind(self, step: int) -> None:
        """Forget what was written after ``step``, or of a validation that did not end, so that a resumed run's curve
        joins and no failure counts twice."""
        for half in self.path.glob(".*.tmp"):  # of a process that was killed
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
        """The rows of ``metrics.jsonl``."""
        return read_jsonl(self.metrics)

    @property
    def models(self) -> list[Path]:
        """Complete checkpoints, the oldest first; one that is being written has another name."""
        return sorted(p for p in self.checkpoints.glob("step-*") if _CHECKPOINT.fullmatch(p.name))

    @property
    def best(self) -> Path | None:
        """The checkpoint that did best in the validation of its step, the newest of equals; None: no such step is kept.

        By success, then by reward. It follows from what was measured and what is kept, so nothing has to be updated
        when a run is resumed from an earlier step.
        """
        best = self.best_validation()
        return None if best is None else self.checkpoint(best.step)

    def best_validation(self) -> Best | None:
        """Return how `best` was found: compared on the tasks that the validations of all kept checkpoints scored.

        Where an older run left no results of tasks, each validation counts with its own tasks.
        """
        measured = {row["step"]: row for row in self.read_metrics() if row.get("val/success") is not None}
        kept = [step for step in sorted(measured) if self.checkpoint(step) in self.models]
        found = {step: results for step in kept if (results := self.task_results(step))}
        if len(found) == len(kept):
            return best_of(found)
        own = {step: _own_figures(measured[step]) for step in kept}
        return Best(best_step(own), None, own)

    def task_results(self, step: int) -> dict[str, TaskResult]:
        """Return what the validation of a step found of each task; empty where that is not there or damaged."""
        try:
            return read_results(json.loads(self._task_results(step).read_text(encoding="utf-8"))["tasks"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}

    def write_task_results(self, step: int, results: Results) -> None:
        """Keep what the validation of a step found of each task, in place of what an earlier one of it found."""
        text = json.dumps({"step": step, "tasks": results_row(results)}, separators=(",", ":"))
        self.write_atomically(self._task_results(step), text + "\n")

    def _task_results(self, step: int) -> Path:
        return self.episodes / f"validated_{step:06d}.json"

    def checkpoint(self, step: int) -> Path:
        """Return where the checkpoint of a step is, if there is one."""
        return self.checkpoints / f"step-{step:06d}"

    def write_json(self, path: Path, value: Mapping[str, Any]) -> None:
        self.write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    @staticmethod
    def write_atomically(path: Path, text: str) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)  # in a folder of somebody else it may be a link
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def _own_figures(row: Mapping[str, Any]) -> Figures:
    return Figures(row["val/success"], row.get("val/reward/mean") or 0.0)


def debug_folder(folder: Path) -> Path:
    """Where a trial without training writes, so that it never touches the training run's folder."""
    return folder.with_name(f"{folder.name}.debug")
