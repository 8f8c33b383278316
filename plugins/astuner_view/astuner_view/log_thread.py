"""The episode log of one run, and the thread that it is read in: SQLite's connections are of one thread each.

The log is opened when somebody asks, and again when another run has its name.  A run without a log answers too: with
None, and `why`.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from astuner.contracts.errors import DataError
from astuner_record.episode_log import EpisodeLog
from astuner_record.episode_log.store import DATABASE
from astuner_view.runs import about

T = TypeVar("T")
_AT_ONCE = 10_000
"""Episodes of a log that is looked at as a whole when it is opened; a longer one is when a question fails."""


class LogReader:
    """The log, for whoever stays in one thread."""

    def __init__(self, run: Path, *, check: bool = False) -> None:
        """:param check: look at the whole log, however long it is, and read of a damaged one what is whole."""
        self._run, self._check = run, check
        self._log: EpisodeLog | None = None
        self._opened: tuple[object, ...] = ()
        self.why = ""
        """Why there is no log; empty when there is one."""

    def fresh(self) -> EpisodeLog | None:
        """The log as it is now; None, and `why`, where there is none to read."""
        if self._log is not None and self._look() != self._opened:  # another run has this name now
            self.close()
        try:
            if self._log is None:
                self._log = EpisodeLog(self._run, check=self._check or counted(self._run) <= _AT_ONCE)
                self._opened = self._look()
        except (DataError, sqlite3.Error) as e:
            self.why = str(e)
            return None
        self.why = ""
        return self._log

    def answer(self, question: Callable[[LogReader], T]) -> T:
        """What ``question`` finds; in what is whole, where it fails because the log is damaged."""
        try:
            return question(self)
        except Exception:  # anything may come of a damaged row
            if self._check:
                raise
            self.close()
            self._check = True
            return question(self)

    def problems(self) -> list[str]:
        """What is wrong with the log, as of the last question."""
        return [self.why] if self._log is None and self.why else list(self._log.problems if self._log else ())

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _look(self) -> tuple[object, ...]:
        """Which run and database these are."""
        return about(self._run)[:2], about(self._run / "episodes" / DATABASE)[:2]


class LogThread:
    """The same for an event loop: questions are answered one after another in a thread of their own."""

    def __init__(self, run: Path) -> None:
        self._reader = LogReader(run)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="astuner-view")

    async def ask(self, question: Callable[[LogReader], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._reader.answer, question)

    def close(self) -> None:
        """Let go of the log once the questions that were asked are answered."""
        self._pool.submit(self._reader.close)
        self._pool.shutdown(wait=False)


def counted(run: Path) -> int:
    """How many episodes the log of a run has, for a list of runs; it is opened only when it has changed."""
    return _counted(run, *map(about, log_files(run)))


def log_files(run: Path) -> tuple[Path, Path]:
    """What changes with the log of a run."""
    return run / "episodes" / DATABASE, run / "episodes" / f"{DATABASE}-wal"


@lru_cache(maxsize=1024)
def _counted(run: Path, *_about: object) -> int:
    try:
        with EpisodeLog(run, check=False) as log:
            return log.count()
    except Exception:  # there is none, or it is damaged in some way: the page of the run says so
        return 0


def count(reader: LogReader) -> int:
    """How many episodes a log has; 0 where there is none."""
    log = reader.fresh()
    return 0 if log is None else log.count()
