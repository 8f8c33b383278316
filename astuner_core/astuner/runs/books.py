"""The books of one run: its folder's own files, and the events by which everybody else hears of it.

The run folder's own files must be written: when that fails, the run ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from astuner.contracts.events import (
    EpisodeEnded,
    LogprobsComputed,
    Measured,
    Note,
    Progressed,
    RunContext,
    RunEnded,
    RunResumed,
    RunStarted,
    SamplesCredited,
    Saving,
    StepEnded,
    Subscriber,
    Summary,
    TokenizersLoaded,
)
from astuner.contracts.types import Episode, Sample
from astuner.rollout.ledger import FailureLedger
from astuner.rollout.transcript import transcript
from astuner.runs.bus import Bus
from astuner.runs.run_dir import RunDir
from astuner.support.json_lines import write_jsonl

if TYPE_CHECKING:
    from astuner.config import Config


class Books:
    """Everything a run writes down, apart from weights."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        sinks: Sequence[Subscriber] = (),
        *,
        total_steps: int,
        policies: Sequence[str] = (),
        trains: bool = True,
    ) -> None:
        """
        :param sinks: to be told besides the subscribers that plugins have.
        :param total_steps: of the whole run.
        :param policies: those that train, where the run tells several apart.
        """
        self._total_steps = total_steps
        self.run_dir = run_dir
        self.ledger = FailureLedger(run_dir.failures)
        self.bus = Bus()
        self._save_episodes = config.astuner.trainer_common.save_episodes
        context = RunContext(
            config=config,
            run_dir=run_dir.path,
            policies=policies,
            trains=trains,
            publish=self.bus.publish,
            stop=self.bus.stop,
        )
        self.bus.subscribe(sinks)
        for kind in subscribers(config):
            self.bus.subscribe(kind.for_run(context))
        self.bus.publish(RunStarted(run_dir=run_dir.path, name=config.experiment_name, settings=config.as_dict()))

    def log(self, step: int, metrics: Mapping[str, float], kind: type[Measured] = StepEnded) -> None:
        """Numbers of a step or of a validation."""
        self.bus.publish(kind(step=step, metrics={**metrics, **self.bus.numbers()}))

    def note(self, text: str) -> None:
        """Something a person should read."""
        self.bus.publish(Note(text=text))

    def episode(self, step: int, episode: Episode) -> None:
        """One episode has ended."""
        self.ledger.episode(step, episode)
        self.bus.publish(EpisodeEnded(step=step, episode=episode))

    def credited(self, step: int, samples: Sequence[Sample]) -> None:
        """A step's samples have their advantages; said again, it replaces what was said of the step before."""
        self.bus.publish(SamplesCredited(step=step, samples=samples))

    def trainer_logprobs(self, step: int, found: Mapping[int, Any]) -> None:
        """What the trainer computed for samples of a step; see `astuner.contracts.events.LogprobsComputed`."""
        self.bus.publish(LogprobsComputed(step=step, found=found))

    def tokenizers(self, load: Mapping[str, Callable[[], Any]]) -> None:
        """:param load: policy -> its Hugging Face tokenizer, asked for only where it is needed."""
        self.bus.publish(TokenizersLoaded(load=load))

    def settle(self, step: int) -> None:
        """Have everything up to ``step`` on the disk; before its state is saved, which a resumed run goes on from.

        :raises OSError: something cannot be written.
        """
        self.bus.publish(Saving(step=step))

    def resumed(self, step: int, state: Mapping[str, Any]) -> None:
        """The run goes on after ``step``, where subscribers had this state; the folder forgets what came later."""
        self.run_dir.rewind(step)
        self.bus.go_on()
        self.bus.publish(RunResumed(step=step, state=state))

    def ended(self, error: BaseException | None = None) -> list[Summary]:
        """Nothing more will be trained: what subscribers have to say of it, unless ``error`` ended it."""
        self.bus.publish(RunEnded(endings=dict(self.ledger.counts), error=error))
        return [] if error is not None else self.bus.summaries()

    def progress(self, step: int, done: int, total: int, what: str) -> None:
        """``done`` of ``total`` episodes have ended."""
        self.bus.publish(Progressed(step=step, total_steps=self._total_steps, done=done, total=total, what=what))

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

        :raises OSError: something could not be written, and that was not raised before.
        """
        self.bus.close()


def subscribers(config: Config) -> list[type[Subscriber]]:
    """Those that plugins have beside every run."""
    offers = config.plugins.offers("subscriber")
    return [config.resolve("subscriber", f"{plugin.name}/{name}") for plugin, name, _ in offers]
