"""The books of one run: numbers, conversations, failures, and what a person is told.

The run folder's own files must be written: when that fails, the run ends.  A tracker beside them may fail or hang: it
has a thread of its own (`astuner.runs.sink_threads`), is reported once, and left out.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import MissingDependency
from astuner.contracts.log_sink import LogSink
from astuner.contracts.types import Episode, Sample
from astuner.rollout.certificate import Certificate
from astuner.rollout.ledger import FailureLedger
from astuner.rollout.transcript import transcript
from astuner.runs.run_dir import RunDir
from astuner.runs.sink_threads import SinkThread
from astuner.support.json_lines import append_jsonl, write_jsonl
from astuner_helpers import HelperMeter
from astuner_record.episode_log import EpisodeLogWriter, keep_tokenizers
from astuner_report.run_report.energy import EnergyMeter

if TYPE_CHECKING:
    from astuner.config import Config
    from astuner_report.sentinel import Alarm


class Books:
    """Everything a run writes down, apart from weights."""

    def __init__(self, config: Config, run_dir: RunDir, sinks: Sequence[LogSink] = (), *, total_steps: int) -> None:
        """:param total_steps: of the whole run."""
        self._total_steps = total_steps
        self.run_dir = run_dir
        self.ledger = FailureLedger(run_dir.failures)
        self.certificate = Certificate()
        self.energy = EnergyMeter()
        self.helpers = HelperMeter(config)
        self._save_episodes = config.astuner.trainer_common.save_episodes
        self._save_tokens = config.astuner.trainer_common.save_tokens
        self._log: EpisodeLogWriter | None = None
        self._credit: dict[int, Sequence[Sample]] = {}
        """Step -> its samples, until its numbers are logged: some backbones credit a step twice."""
        self._trainer_logprobs: dict[int, dict[int, Any]] = {}
        """Step -> place among its samples -> float32 [trained tokens]."""
        self._remarks: deque[str] = deque()
        """What sinks have to say."""
        for sink in sinks:
            sink.remark = self._remarks.append
        self._sinks: list[LogSink | SinkThread] = [s if s.essential or s.direct else SinkThread(s) for s in sinks]
        self._tell("open", run_dir.path, config.experiment_name, config.as_dict())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of a step or of a validation; the certificate is written with them."""
        self.write_certificate()
        self._write_credit(step)
        self._tell("step", step, {**metrics, **self.energy.since_last(), **self.helpers.since_last()})

    def write_certificate(self) -> None:
        """Write ``certificate.json``, once there is anything to say in it."""
        if self.certificate.agents:
            self.run_dir.write_json(self.run_dir.certificate, self.certificate.as_dict())

    def note(self, text: str) -> None:
        """Something a person should read."""
        self._tell("note", text)

    def alarm(self, alarm: Alarm) -> None:
        """The sentinel has something to say."""
        append_jsonl(self.run_dir.alarms, alarm.as_dict())
        if alarm.is_said:
            self.note(str(alarm))

    def episode(self, step: int, episode: Episode) -> None:
        """One episode has ended."""
        self.ledger.episode(step, episode)
        if (log := self._episode_log()) is not None:
            log.episode(step, episode)
        self._tell("episode", step, episode)

    def credited(self, step: int, samples: Sequence[Sample]) -> None:
        """A step's samples have their advantages; said again, it replaces what was said of the step before."""
        self.certificate.credited(step, samples)
        self._credit[step] = samples

    def trainer_logprobs(self, step: int, found: Mapping[int, Any]) -> None:
        """What the trainer computed for samples of a step: log-probabilities under the weights before its update.

        They are of the trained tokens in their order, of the distribution at the sampling temperature, as those that
        the rollout recorded; so exp(theirs - recorded) is a token's importance ratio when the update begins.  A trainer
        reports what it computes anyway: under a `rollout_is` correction its own pass over all samples that it trains,
        otherwise the first optimizer step's, so samples of later ones are missing, and so are those without a gradient.

        :param found: place of a sample in what `credited` was told -> float32 [trained tokens], a numpy array.
        """
        if self._save_tokens:
            self._trainer_logprobs.setdefault(step, {}).update(found)

    def tokenizers(self, load: Mapping[str, Callable[[], Any]]) -> None:
        """Write each policy's tokenizer beside the log, for those who turn its ids into text.

        :param load: policy -> its Hugging Face tokenizer, asked for only where it was not written before.
        """
        if self._episode_log() is not None:
            keep_tokenizers(self.run_dir.episodes, load)

    def settle(self, step: int) -> None:
        """Have everything up to ``step`` in the log; before its state is saved, which a resumed run goes on from.

        :raises OSError: the log cannot be written, and that was not raised before.
        """
        if self._log is not None and not self._log.failed:
            self._write_credit(step)
            self._log.flush()

    def progress(self, step: int, done: int, total: int, what: str) -> None:
        """``done`` of ``total`` episodes have ended."""
        self._tell("progress", step, self._total_steps, done, total, what)

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
        """Everything is written when this returns, apart from what a tracker did not take in time.

        :raises OSError: the episode log could not be written, and that was not raised before.
        """
        try:
            if self._log is not None:
                self._write_credit(max(self._credit, default=0))
                self._log.close()
        finally:
            for sink in list(self._sinks):
                if isinstance(sink, SinkThread):
                    sink.tell("close", ())
                    sink.drain()
                    self._leave_out(sink, sink.failure())
            self._sinks = [s for s in self._sinks if not isinstance(s, SinkThread)]
            self._pass_on_remarks()
            self._tell("close")

    def _episode_log(self) -> EpisodeLogWriter | None:
        """The log of episodes with their tokens, if there is to be one."""
        if self._log is None and self._save_tokens:
            try:
                self._log = EpisodeLogWriter(self.run_dir.episodes, self.note)
            except MissingDependency as e:
                self._save_tokens = False
                self.note(f"episodes are written without their tokens: {e}")
        return self._log

    def _write_credit(self, step: int) -> None:
        """Log what was credited up to ``step``."""
        for known in sorted(s for s in self._credit if s <= step):
            samples, logprobs = self._credit.pop(known), self._trainer_logprobs.pop(known, {})
            if self._log is not None:
                self._log.credit(known, samples, logprobs)

    def _tell(self, name: str, *arguments: Any) -> None:
        """Have every sink's method ``name`` called."""
        if name != "note":  # which is how remarks are passed on
            self._pass_on_remarks()
        for sink in list(self._sinks):
            if isinstance(sink, SinkThread):
                self._leave_out(sink, sink.failure())
                if getattr(type(sink.sink), name) is not getattr(LogSink, name):  # else it does not want to know
                    sink.tell(name, arguments)
                continue
            try:
                getattr(sink, name)(*arguments)
            except Exception as e:
                if sink.essential:
                    raise
                self._leave_out(sink, f"{type(e).__name__}: {e}")

    def _pass_on_remarks(self) -> None:
        while self._remarks:
            self.note(self._remarks.popleft())

    def _leave_out(self, sink: LogSink | SinkThread, why: str) -> None:
        """Say that a sink failed, if there is a reason, and tell it nothing more."""
        if not why or sink not in self._sinks:
            return
        self._sinks.remove(sink)
        name = type(sink.sink if isinstance(sink, SinkThread) else sink).__name__
        self.note(f"the log sink {name} failed and is left out from now on: {why}")
