"""Subscriber that writes the episode log: every episode with its tokens and credit.

The subscriber is essential. A run stops if its log cannot be written, because lost episodes cannot be recorded later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from astuner.contracts.events import (
    EpisodeEnded,
    Event,
    LogprobsComputed,
    Measured,
    Note,
    RunClosed,
    RunContext,
    RunResumed,
    SamplesCredited,
    Saving,
    Subscriber,
    TokenizersLoaded,
)
from astuner.contracts.types import Sample
from astuner_record.episode_log import EpisodeLogWriter, keep_tokenizers, rewind
from astuner_record.episode_log.salvage import mend


class Record(Subscriber):
    """Write ``episodes/`` of the run folder, if `trainer_common.save_tokens` is on."""

    essential = True

    def __init__(self, context: RunContext) -> None:
        self._folder = context.run_dir / "episodes"
        self._publish = context.publish
        self._save = bool(context.config.astuner.trainer_common.save_tokens)
        self._log = EpisodeLogWriter(self._folder)
        self._credit: dict[int, Sequence[Sample]] = {}
        """Step -> its samples, until its metrics are logged. Some backbones credit a step twice."""
        self._trainer_logprobs: dict[int, dict[int, Any]] = {}
        """Step -> index of a sample -> float32 [trained tokens]."""

    def handle(self, event: Event) -> None:
        """Write what the event reports to the log.

        :raises OSError: The log cannot be written, and this has not been raised before.
        """
        if isinstance(event, RunResumed):  # also without save_tokens: the existing log must match the resumed step
            for problem in dict.fromkeys((*mend(self._folder.parent), *rewind(self._folder, event.step))):
                self._publish(Note(text=problem))
        elif self._save:
            self._write(event)

    def _write(self, event: Event) -> None:
        if isinstance(event, EpisodeEnded):
            self._log.episode(event.step, event.episode)
        elif isinstance(event, SamplesCredited):
            self._credit[event.step] = event.samples
        elif isinstance(event, LogprobsComputed):
            self._trainer_logprobs.setdefault(event.step, {}).update(event.found)
        elif isinstance(event, TokenizersLoaded):
            keep_tokenizers(self._folder, event.load)
        elif isinstance(event, (Measured, Saving)):
            self._write_credit(event.step)
        elif isinstance(event, RunClosed):
            try:
                self._write_credit(max(self._credit, default=0))
            finally:
                self._log.close()

    def _write_credit(self, step: int) -> None:
        """Log the credit of all steps up to ``step``."""
        for known in sorted(s for s in self._credit if s <= step):
            samples: Sequence[Sample] = self._credit.pop(known)
            logprobs: Mapping[int, Any] = self._trainer_logprobs.pop(known, {})
            if not self._log.failed:
                self._log.credit(known, samples, logprobs)
