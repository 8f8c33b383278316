"""Writes the log beside the run: a thread turns episodes into batches, so that rollouts do not wait for it.

What is queued is bounded in bytes; when it is full, the caller waits, for the log loses nothing.  What the thread
fails with, it keeps, and the caller's next call raises it: without its log the run does not go on.  The index is
derived, so that a failure of it is said once and forgotten.  An episode that ends when nothing was written for `LINGER`
seconds is written at once; more of them than that share a batch, since most of what one costs is the batch.  Invariant:
an episode is in the journal before the call that logs it returns, and stays there until its batch is the system's, so a
process that is killed loses no episode that was logged.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from astuner.contracts.errors import DataError
from astuner.contracts.types import Episode, Sample
from astuner_record.episode_log.columns import Columns
from astuner_record.episode_log.index import Index
from astuner_record.episode_log.journal import Journal, entry
from astuner_record.episode_log.rows import Row, credit_rows, episode_row
from astuner_record.episode_log.schema import CREDIT, TOKENS, file_name, next_number, pyarrow, schema

QUEUE_BYTES = 64 * 2**20
"""What may wait to be written, about."""
FILE_BYTES = 256 * 2**20
"""A file that is as large is followed by another one."""

LINGER = 1.0
"""Seconds from one batch to the next, unless there is enough for one earlier; what ends meanwhile shares it."""
BATCH = 64
"""Episodes in a batch at most."""
BATCH_BYTES = 4 * 2**20
"""What a batch may hold before it is written, about."""

CREDIT_BYTES = 2**20
"""What a batch of credit holds, about; whoever looks at one episode reads a whole one."""

UNINDEXED, UNINDEXED_BYTES = 6000, 16 * 2**20
"""Episodes, and bytes, that are left to whoever looks at the log, who has them in the index in less than a second;
beyond that the run does it."""


@dataclass(slots=True, kw_only=True)
class _Job:
    kind: str
    step: int
    rows: Callable[[], list[Row]]
    held: int
    """Bytes of memory, about."""
    entry: bytes = b""
    """Of the journal; empty for what does not go there."""


class EpisodeLogWriter:
    """The log of one process; its files are made when there is something to write."""

    def __init__(
        self,
        folder: Path,
        note: Callable[[str], None],
        *,
        queue_bytes: int = QUEUE_BYTES,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """
        :param folder: ``episodes/`` of the run folder.
        :param note: tells the person something; called in the thread of the caller of this object.
        :raises MissingDependency: pyarrow is not installed.
        """
        pyarrow()
        self._folder, self._tell = folder, note
        self._queue_bytes, self._file_bytes = queue_bytes, file_bytes
        self._jobs: deque[_Job] = deque()
        self._held = 0
        self._closing = False
        self._hurry = 0
        """How many callers wait for the thread."""
        self._waited = False
        self._error: BaseException | None = None
        self._raised = False
        self._notes: deque[str] = deque()
        self._next_batch = 0.0
        """When the next batch may begin though there is not enough for it, by the monotonic clock."""
        self._journal: Journal | None = None
        self._changed = threading.Condition()
        """Guards everything above."""
        self._thread: threading.Thread | None = None

    def episode(self, step: int, episode: Episode) -> None:
        """Log an episode that ended; waits while too much is queued.

        :raises OSError: the files cannot be written, as of an earlier call.
        """
        row = episode_row(step, episode, time.time())
        kept = entry(row)
        held = 4096 + 4 * len(kept)  # its prompts are tuples of pointers
        self._put(_Job(kind=TOKENS, step=step, rows=lambda: [row], held=held, entry=kept))

    def credit(self, step: int, samples: Sequence[Sample], trainer: Mapping[int, Any] | None = None) -> None:
        """Log what a step's samples were credited with; raises and waits as `episode`.

        :param trainer: place in ``samples`` -> the trainer's log-probabilities, float32 [trained tokens].
        """
        trainer = trainer or {}
        for places in _parts(samples, trainer):
            part = [samples[i] for i in places]
            theirs = {n: trainer[i] for n, i in enumerate(places) if i in trainer}
            held = sum(32 * len(s.input_ids) for s in part)
            self._put(_Job(kind=CREDIT, step=step, rows=partial(credit_rows, step, part, theirs), held=held))

    @property
    def failed(self) -> bool:
        """Whether the caller was told that the log cannot be written."""
        return self._raised

    def flush(self) -> None:
        """Wait until everything is written; raises as `episode`."""
        with self._changed:
            self._wait_until(lambda: not self._held)
        self._check()

    def close(self) -> None:
        """Write what is queued, and end the files; raises as `episode`, unless that was raised before."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._journal is not None:
            self._journal.close(remove=self._error is None)
        self._say()
        if self._error is not None and not self._raised:
            self._raised = True
            raise self._error

    def _put(self, job: _Job) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="astuner-episode-log", daemon=True)
                self._thread.start()
            if self._full(job):
                self._wait_until(lambda: not self._full(job))
                if not self._waited:
                    self._waited = True
                    self._notes.append(
                        f"episodes end faster than {self._folder} takes them, so the run waits for it now and then; "
                        "astuner.trainer_common.save_tokens=false leaves the tokens out"
                    )
            if self._error is None and self._is_kept(job):
                self._jobs.append(job)
                self._held += job.held
                if len(self._jobs) == 1 or self._is_enough():  # each time that the thread wakes costs as much as a turn
                    self._changed.notify_all()
        self._check()

    def _is_kept(self, job: _Job) -> bool:
        """Put an episode into the journal; False where that fails, and with it the log.  The caller holds the lock."""
        try:
            if job.entry and self._journal is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._journal = Journal(self._folder)
            if job.entry and self._journal is not None:
                self._journal.add(job.entry)
        except OSError as e:
            self._error = e
        return self._error is None

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Have the thread hurry until ``done``, or until it has failed; the caller holds the lock."""
        self._hurry += 1
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._error is not None or done())
        self._hurry -= 1

    def _check(self) -> None:
        """Say what is to be said, and raise what the thread failed with."""
        self._say()
        if self._error is not None:
            self._raised = True
            raise self._error

    def _full(self, job: _Job) -> bool:
        return self._held > 0 and self._held + job.held > self._queue_bytes  # a job larger than that goes alone

    def _say(self) -> None:
        while self._notes:
            self._tell(self._notes.popleft())

    # ------------------------------------------------------------- the thread

    def _work(self) -> None:
        files: _Files | None = None
        try:
            files = _Files(self._folder, self._file_bytes, self._notes.append)
            while jobs := self._next():
                files.write(jobs[0].kind, [row for job in jobs for row in job.rows()])
                with self._changed:
                    self._held -= sum(job.held for job in jobs)
                    if self._journal is not None and jobs[0].kind == TOKENS:
                        self._journal.keep([job.entry for job in self._jobs if job.entry])
                    self._changed.notify_all()
            files.close()
        except BaseException as e:  # whatever it is, the caller is to know
            with self._changed:
                self._error = e
                self._jobs.clear()
                self._changed.notify_all()
            if files is not None:
                files.abandon()

    def _next(self) -> list[_Job]:
        """What the next batch is made of: episodes of one step, or one credit; empty when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            self._changed.wait_for(self._is_enough, timeout=max(0.0, self._next_batch - time.monotonic()))
            self._next_batch = time.monotonic() + LINGER
            jobs: list[_Job] = []
            while self._jobs and (not jobs or _share_a_batch(jobs, self._jobs[0])):
                jobs.append(self._jobs.popleft())
            return jobs

    def _is_enough(self) -> bool:
        ends_a_step = bool(self._jobs) and self._jobs[-1].kind == CREDIT
        many = len(self._jobs) >= BATCH or self._held >= BATCH_BYTES
        return ends_a_step or many or self._closing or self._hurry > 0


def _share_a_batch(jobs: Sequence[_Job], job: _Job) -> bool:
    same = job.kind == TOKENS == jobs[0].kind and job.step == jobs[0].step
    return same and len(jobs) < BATCH and sum(j.held for j in jobs) + job.held <= BATCH_BYTES


def _parts(samples: Sequence[Sample], trainer: Mapping[int, Any]) -> Iterator[list[int]]:
    """The places of samples, in the parts of which each is a batch; all samples of an episode are in one."""
    episodes: dict[str, list[int]] = {}
    for place, sample in enumerate(samples):
        episodes.setdefault(sample.episode_id, []).append(place)
    part: list[int] = []
    size = 0
    for places in episodes.values():
        size += sum(100 + (trainer[i].nbytes if i in trainer else 0) for i in places)
        part += places
        if size >= CREDIT_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


class _Files:
    """The files of both kinds that this process writes, and the index; used by the thread alone."""

    def __init__(self, folder: Path, file_bytes: int, note: Callable[[str], None]) -> None:
        self._folder, self._file_bytes, self._note = folder, file_bytes, note
        self._open: dict[str, _File] = {}
        self._indexed = True
        """Whether the index can be written."""
        self._episodes = self._bytes = 0
        """In the files, and not in the index."""

    def write(self, kind: str, rows: list[Row]) -> None:
        if (file := self._open.get(kind)) is not None and file.size >= self._file_bytes:
            self._open.pop(kind).close()
        if kind not in self._open:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._open[kind] = _File(self._folder / file_name(kind, next_number(self._folder)), kind)
        file = self._open[kind]
        self._episodes += len(rows) if kind == TOKENS else 0
        self._bytes += file.write(rows)
        if self._episodes >= UNINDEXED or self._bytes >= UNINDEXED_BYTES:
            self._to_index()

    def close(self) -> None:
        for file in self._open.values():
            file.close()

    def abandon(self) -> None:
        """Close what can be closed, after a failure."""
        for file in self._open.values():
            file.abandon()

    def _to_index(self) -> None:
        self._episodes = self._bytes = 0
        if not self._indexed:
            return
        try:
            index = Index(self._folder)
            try:
                index.refresh()
            finally:
                index.close()
        except (sqlite3.Error, DataError) as e:
            self._indexed = False
            self._note(
                f"the index of {self._folder} cannot be written ({e}); nothing is lost, whoever reads the log "
                "makes it again"
            )


class _File:
    """A file that is being written, one flushed batch after another."""

    def __init__(self, path: Path, kind: str) -> None:
        pa, columns = pyarrow(), schema(kind)
        self._columns = Columns(columns)
        self._file: IO[bytes] = path.open("xb", buffering=1 << 20)
        # lz4 for the texts; threads would cost more than they save on buffers this small
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        self._stream: Any = pa.ipc.new_stream(self._file, columns, options=options)
        self.size = 0

    def write(self, rows: list[Row]) -> int:
        """Write a batch; how many bytes it took."""
        before = self.size
        self._stream.write_batch(self._columns.batch(rows))
        self._file.flush()
        self.size = self._file.tell()
        return self.size - before

    def close(self) -> None:
        self._stream.close()
        self._file.close()

    def abandon(self) -> None:
        import contextlib

        with contextlib.suppress(OSError):  # the disk that failed; what was flushed is there
            self._file.close()
