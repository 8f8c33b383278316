"""Read the episode log of one run in its own thread, because SQLite connections are bound to a thread.

The log is opened on the first request, and again when another run replaces the folder. Without a log the reader returns
None and sets `why`.
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
"""Number of episodes up to which a log is checked completely when opened; a longer log is checked after a failure."""


class LogReader:
    """The episode log, for use in one thread."""

    def __init__(self, run: Path, *, check: bool = False) -> None:
        """Create a reader.

        :param check: check the complete log, whatever its length, and read the intact part of a damaged one.
        """
        self._run, self._check = run, check
        self._log: EpisodeLog | None = None
        self._opened: tuple[object, ...] = ()
        self.why = ""
        """Why the log cannot be read; empty if it can."""

    def fresh(self) -> EpisodeLog | None:
        """Return the current log, or None and set `why` if it cannot be read."""
        if self._log is not None and self._look() != self._opened:  # another run replaced this folder
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
        """Return the result of ``question``; if the log is damaged, ask again about its intact part."""
        try:
            return question(self)
        except Exception:  # a damaged row can raise anything
            if self._check:
                raise
            self.close()
            self._check = True
            return question(self)

    def problems(self) -> list[str]:
        """Return the problems of the log, as of the last question. A run without a log has none."""
        if self._log is not None:
            return [*self._log.problems]
        exists = any(any((self._run / "episodes").glob(f"*.{kind}")) for kind in ("sqlite", "arrows"))
        return [self.why] if self.why and exists else []

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _look(self) -> tuple[object, ...]:
        """Return the identity of the run folder and its database."""
        return about(self._run)[:2], about(self._run / "episodes" / DATABASE)[:2]


class LogThread:
    """An asyncio interface of `LogReader` that answers questions one after another in its own thread."""

    def __init__(self, run: Path) -> None:
        self._reader = LogReader(run)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="astuner-view")

    async def ask(self, question: Callable[[LogReader], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._reader.answer, question)

    def close(self) -> None:
        """Close the log after the pending questions are answered."""
        self._pool.submit(self._reader.close)
        self._pool.shutdown(wait=False)


def counted(run: Path) -> int:
    """Return the number of episodes in a run's log; the log is opened only if it has changed."""
    return _counted(run, *map(about, log_files(run)))


def log_files(run: Path) -> tuple[Path, Path]:
    """Return the files that change with the log of a run."""
    return run / "episodes" / DATABASE, run / "episodes" / f"{DATABASE}-wal"


@lru_cache(maxsize=1024)
def _counted(run: Path, *_about: object) -> int:
    try:
        with EpisodeLog(run, check=False) as log:
            return log.count()
    except Exception:  # missing or damaged; the page of the run reports it
        return 0


def count(reader: LogReader) -> int:
    """Return the number of episodes in a log; 0 if it is missing."""
    log = reader.fresh()
    return 0 if log is None else log.count()
