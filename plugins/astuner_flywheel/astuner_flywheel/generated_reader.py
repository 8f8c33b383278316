"""Task reader ``data_generation``: tasks that a helper model makes from documents and samples, made when first read.

A finished folder is read as it is, and asks nobody; an unfinished one is finished first.  Invariant: both splits come
from one finished folder, whose fingerprint is that of the documents and samples as they are now.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from astuner import Task, TaskReader
from astuner.config import Config
from astuner.contracts.building import BuildContext
from astuner.contracts.types import Split
from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_flywheel.generation.entry import Generation
from astuner_flywheel.generation.folder import Journal
from astuner_flywheel.generation.result import progress_line, summary
from astuner_flywheel.generation.rows import task_of
from astuner_flywheel.generation.standing import Standing

_EVERY = 10.0


class GeneratedTaskReader(TaskReader):
    """Reads the generated tasks, and has them made where they are not there yet.

    :param experiment: the whole config, for its helper models and its folder.
    :param dry_run: nobody is to be asked: only a finished folder is read.
    """

    config: DataGenerationConfig

    def __init__(self, config: DataGenerationConfig, experiment: Config, *, dry_run: bool = False) -> None:
        super().__init__(config)
        self._dry_run = dry_run
        self._generation = Generation(experiment, say=_say, progress=_Spoken(), tell=_say)
        self._report: dict[str, Any] | None = None
        self.skipped: dict[str, str] = {}
        """Documents that could not be read -> why (`on_bad_document: skip`)."""

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> GeneratedTaskReader:
        return cls(section, context.config, dry_run=context.dry_run)

    def read(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of ``split``, after making them if need be.

        :raises astuner.contracts.errors.AstunerError: as `Generation.run`, or of a dry run as `Generation.finished`.
        """
        if self._report is None:
            self._report = self._generation.finished() if self._dry_run else self._generation.run()
            self.skipped.update(self._report["material"]["skipped"])
            _say(summary(self._report, self._generation.folder))
        folder = self._generation.folder
        path = folder.train if split is Split.TRAIN else folder.validation
        yield from map(task_of, Journal(path).rows())


class _Spoken:
    """Progress as a line every few seconds: a run has one log, and many readers."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, standing: Standing) -> None:
        if time.monotonic() - self._last >= _EVERY:
            self._last = time.monotonic()
            _say(progress_line(standing))


def _say(text: str) -> None:
    print(f"data generation: {text}", file=sys.stderr, flush=True)
