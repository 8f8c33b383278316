"""The books of one run: numbers, conversations, failures, and what a person is told.

The run folder's own files must be written: when that fails, the run ends.  A tracker beside them may fail: it is
reported once and left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from astuner.json_lines import write_jsonl
from astuner.log_sink import LogSink
from astuner.rollout.certificate import Certificate
from astuner.rollout.ledger import FailureLedger
from astuner.rollout.transcript import transcript
from astuner.run_dir import RunDir
from astuner.types import Episode

if TYPE_CHECKING:
    from astuner.config import Config


class Books:
    """Everything a run writes down, apart from weights."""

    def __init__(self, config: Config, run_dir: RunDir, sinks: Sequence[LogSink] = (), *, total_steps: int) -> None:
        """:param total_steps: of the whole run."""
        self._total_steps = total_steps
        self.run_dir = run_dir
        self.ledger = FailureLedger(run_dir.failures)
        self.certificate = Certificate()
        self._save_episodes = config.astuner.trainer_common.save_episodes
        self._sinks = list(sinks)
        name, settings = config.experiment_name, config.as_dict()
        self._tell(lambda sink: sink.open(run_dir.path, name, settings))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of a step or of a validation; the certificate is written with them."""
        self.write_certificate()
        self._tell(lambda sink: sink.step(step, metrics))

    def write_certificate(self) -> None:
        """Write ``certificate.json``, once there is anything to say in it."""
        if self.certificate.agents:
            self.run_dir.write_json(self.run_dir.certificate, self.certificate.as_dict())

    def note(self, text: str) -> None:
        """Something a person should read."""
        self._tell(lambda sink: sink.note(text))

    def episode(self, step: int, episode: Episode) -> None:
        """One episode has ended."""
        self.ledger.episode(step, episode)
        self._tell(lambda sink: sink.episode(step, episode))

    def progress(self, step: int, done: int, total: int, what: str) -> None:
        """``done`` of ``total`` episodes have ended."""
        self._tell(lambda sink: sink.progress(step, self._total_steps, done, total, what))

    def listener(self, step: int, total: int, what: str) -> Callable[[Episode], None]:
        """What to tell each of ``total`` episodes to: it is entered, and how many have ended is said."""
        done = itertools.count(1)

        def ended(episode: Episode) -> None:
            self.episode(step, episode)
            self.progress(step, next(done), total, what)

        return ended

    def conversations(self, name: str, episodes: Sequence[Episode], *, all_of_them: bool = False) -> None:
        """Write episodes in readable form: all, or as many as `trainer_common.save_episodes` says."""
        limit = None if all_of_them or self._save_episodes == -1 else self._save_episodes
        if chosen := episodes[:limit]:
            write_jsonl(self.run_dir.episodes / name, map(transcript, chosen))

    def skipped(self, skipped: Mapping[str, str]) -> None:
        """Lines of the data that cannot be read, and that the person chose to skip."""
        if not skipped:
            return
        self.ledger.skipped_data(skipped)
        place, reason = next(iter(skipped.items()))
        self.note(
            f"{len(skipped)} lines of the data cannot be read and are skipped (data.on_bad_line: skip), the first: "
            f"{place}: {reason}; all are in {self.run_dir.failures}"
        )

    def close(self) -> None:
        self._tell(lambda sink: sink.close())

    def _tell(self, tell: Callable[[LogSink], None]) -> None:
        for sink in list(self._sinks):
            try:
                tell(sink)
            except Exception as e:
                if sink.essential:
                    raise
                self._sinks.remove(sink)
                self.note(
                    f"the log sink {type(sink).__name__} failed and is left out from now on: {type(e).__name__}: {e}"
                )
