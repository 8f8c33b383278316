"""The task reader ``tracing``: what users asked a deployed agent, as tasks for the policy.

The policy answers anew.  Invariant: what another model answered is at most part of a prompt or of the metadata, and no
token of it is ever trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner import Task, TaskReader
from astuner.contracts.building import BuildContext
from astuner.contracts.types import Split
from astuner_flywheel.traces.pipeline import Prepared, prepare
from astuner_flywheel.traces.settings import TracingConfig

if TYPE_CHECKING:
    from astuner_helpers import HelperModels


class TracingTaskReader(TaskReader):
    """Reads the sources once, whichever split is asked for first.

    :param base_dir: what relative paths start from; None is the working directory.
    :param helper_models: for the filters that ask one.
    """

    config: TracingConfig

    def __init__(
        self, config: TracingConfig, base_dir: Path | None = None, helper_models: HelperModels | None = None
    ) -> None:
        super().__init__(config)
        self._base_dir = base_dir or Path()
        self._helper_models = helper_models
        self._prepared: Prepared | None = None
        self.skipped: Mapping[str, str] = {}
        """What could not be read: where it came up first, and why."""

    @property
    def report(self) -> dict[str, Any]:
        """What was read, left out and held out; reads the sources if that was not done yet."""
        return self._read().report

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> TracingTaskReader:
        return cls(section, context.base_dir, context.helper_models)

    def read(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of ``split``, oldest conversation first.

        :raises astuner.contracts.errors.DataError: a source cannot be read, or no task is left.
        :raises astuner_helpers.HelperFailed: a helper model gives no verdict.
        """
        prepared = self._read()
        yield from prepared.train if split is Split.TRAIN else prepared.validation

    def _read(self) -> Prepared:
        if self._prepared is None:
            self._prepared = prepare(self.config, self._base_dir, self._helper_models)
            self.skipped = self._prepared.skipped
        return self._prepared
