"""A training run on Trinity: its actors roll out and train, and send requests to the run's process through a mailbox.

The `Run` draws, selects, credits, logs and validates, as on every backbone.  The order of a step in every
synchronization style; neighboring steps may overlap:

    draws -> (episode, group)* -> credit -> [Trinity: queue, update, weights] -> trained -> saved

Invariant: a step's saved state is the state when its batch was credited, regardless of later draws, so a run that
resumes from it draws the same tasks as the first run would have.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from astuner import Draw, Ending, EpisodeRunner, Group
from astuner.contracts.errors import RunError
from astuner.contracts.events import EpisodeEnded, LogprobsComputed, Note, Saving, StepEnded
from astuner.contracts.run import Run
from astuner.contracts.types import Episode, Sample, Split
from astuner_ray import step_states
from astuner_ray.training.before_update import Found
from astuner_ray.training.updates import VERL_ACTOR, Updates, translate

NAMES = {
    **VERL_ACTOR,
    "time/update_actor": "time/update",
    "time/sync_weight": "time/sync_weights",
    "time/train_step": "time/train",
}
"""Trinity's metric name of a train step -> ASTuner's name."""
OF_TRAINER = frozenset({"at", "trainer_logprobs", "step_trained", "is_save_due", "saved"})
"""Requests of `astuner_trinity.stages.RunTrainer` and messages of its workers (`astuner_trinity.algorithm`)."""

Drawn = tuple[int, list[Draw], int]
"""A step, its draws, and the number of attempts at each."""


class Request(NamedTuple):
    """A request in transit."""

    method: str
    """Name of a method of `Session`."""
    arguments: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Objects that a runner needs to run episodes."""

    runner: EpisodeRunner
    environ: dict[str, str]
    """Variables that agents and judges need, e.g. the address of the environment service."""
    model: str
    """Folder or Hugging Face name of the model."""
    max_model_len: int
    max_parallel: int
    """Episodes that run concurrently in this runner."""
    helper_names: Sequence[object] = ()
    """Names of the auxiliary models."""


@dataclass(frozen=True)
class Credited:
    """Credit of one sample."""

    advantage: float
    token_weight: float
    place: int = 0
    """Index of the sample in its step."""


class Session:
    """Answers requests of Trinity's actors, sent through `astuner_trinity.mailbox`; each request names a method.

    A method that returns an awaitable does not block other requests.
    """

    def __init__(
        self,
        run: Run,
        parts: Parts,
        *,
        job: Path,
        done: int = 0,
        max_staleness: int | None = None,
        cuts_stragglers: bool = False,
    ) -> None:
        """Prepare the session.

        :param job: Folder of Trinity's checkpoints.
        :param done: Completed steps of a resumed run.
        :param max_staleness: Most versions by which the weights of a step's rollouts may lag behind the trained ones;
            None: limited by Trinity's queue and batches in flight.
        :param cuts_stragglers: Whether Trinity may train a step without its slowest groups; they are drawn again.
        """
        self.training = run
        self.done = done
        """Last step that was trained."""
        self.saved_step = done
        self.doing: dict[str, tuple[str, float]] = {}
        """Actor -> its activity and the time since when (`time.monotonic`)."""
        self._parts = parts
        self._job = job
        self._max_staleness = max_staleness
        self._cuts_stragglers = cuts_stragglers
        self._drawn = done
        self._out: dict[int, set[str]] = {}
        """Drawn step -> its unfinished groups."""
        self._resumable: dict[int, dict[str, Any]] = {}
        """Credited step -> state for resuming from it."""
        self._logged: dict[int, dict[str, float]] = {}
        """Credited step -> its metrics so far."""
        self._stepped = 0.0
        """Time when the last step ended, or the first one started."""
        self._save_seconds = 0.0
        """Seconds spent on saving since then."""
        self._credited = done
        self._weights = done
        """Version of the weights in the rollout engines."""
        self._newer = asyncio.Condition()
        self._validated = done - 1  # `Run.is_due` decides about this step
        self._measured: set[str] = set()
        """Unfinished groups of the current validation."""
        self._heard = time.monotonic()
        self._settings = run.config.astuner
        self._updates = Updates(self._settings.trainer_common, total_steps=run.total_steps)

    def answer(self, request: Request) -> Any:
        """Return the reply to a request, or an awaitable of it."""
        self.hear()
        return getattr(self, request.method)(*request.arguments)

    def hear(self) -> None:
        """Record a sign of life of Trinity."""
        self._heard = time.monotonic()

    @property
    def trained(self) -> bool:
        """Whether any training is not saved."""
        return self.done > self.saved_step

    @property
    def silent_for(self) -> float:
        """Seconds since the last sign of life of Trinity."""
        return time.monotonic() - self._heard

    # ------------------------------------------------------------- the explorer

    async def next_draws(self) -> Drawn:
        """Return the next step's draws; empty if all were drawn."""
        self.training.check_stop()
        step = self._drawn + 1
        if step > self.training.total_steps:
            return step, [], 0
        if self._max_staleness is not None:
            oldest = step - 1 - self._max_staleness
            async with self._newer:
                await self._newer.wait_for(lambda: self._weights >= oldest)
        self._drawn = step
        self._stepped = self._stepped or time.perf_counter()
        draws = self.training.draw(step)
        self._out[step] = {group_id for group_id, _ in draws}
        return step, draws, self._settings.rollout.num_repeat

    async def weights_taken(self, version: int) -> None:
        """Record that the rollout engines have the weights of a step."""
        async with self._newer:
            self._weights = version
            self._newer.notify_all()

    def at(self, who: str, doing: str) -> None:
        """Record the activity of ``who``, the explorer or the trainer."""
        self.doing[who] = doing, time.monotonic()

    def failed(self, what: str) -> None:
        """Raise an error that Trinity only writes to a log file."""
        raise RunError(what)

    def noted(self, text: str) -> None:
        """Publish a note for the user."""
        self.training.publish(Note(text=text))

    def rolled_out(self, step: int) -> None:
        """Check a step whose groups have all ended according to Trinity."""
        if step > self._credited:
            raise RunError(self._lost(f"step {step}: its groups"))

    def is_validation_due(self, version: int) -> bool:
        """Return whether to measure the weights of a step: a measurement was due since the last one."""
        common, run = self._settings.trainer_common, self.training
        if not run.validation_tasks or version <= self._validated:
            return False
        if version == 0:
            return common.val_before_train
        return any(run.is_due("test", step) for step in range(max(self._validated, 0) + 1, version + 1))

    def begin_validation(self, step: int) -> Drawn:
        """Return the draws that measure the weights of a step."""
        draws = self.training.draw(step, Split.VALIDATION)
        self._validated, self._measured = step, {group_id for group_id, _ in draws}
        return step, draws, self._settings.rollout.val_kwargs.num_repeat

    def validated(self, step: int, group: Group) -> None:
        """Record a group of a validation that has ended."""
        if group.group_id in self._measured:
            self._measured.remove(group.group_id)
            self.training.end(step, group)

    def end_validation(self) -> None:
        """Check a validation whose groups have all ended according to Trinity."""
        if missing := len(self._measured):
            wanted = len(self.training.validation_tasks)
            raise RunError(self._lost(f"validation after step {self._validated}: {missing} of {wanted} tasks"))
        if self.done == self._drawn:
            self._stepped = 0.0  # no other work was done meanwhile

    def _lost(self, what: str) -> str:
        return (
            f"{what} did not return from Trinity's workflow runners: one of them died or exceeded "
            f"trinity.explorer.max_timeout; see {self._job / 'log'}"
        )

    # -------------------------------------------------------------- the runners

    def get_parts(self) -> Parts:
        """Return the objects that a runner needs to run episodes."""
        return self._parts

    def episode_over(self, step: int, episode: Episode) -> None:
        """Record an episode that has ended."""
        self.training.publish(EpisodeEnded(step=step, episode=episode))

    def group_over(self, step: int, group: Group) -> Ending:
        """Return whether a group is trained on, or its replacement."""
        if step <= self._credited:
            return Ending(kept=False)  # its batch was closed before
        ending = self.training.end(step, group)
        self._out[step].discard(group.group_id)
        if ending.instead is not None:
            self._out[step].add(ending.instead[0])
        return ending

    # ------------------------------------------------------------- the pipeline

    def credit(self, step: int, groups: Sequence[str]) -> dict[tuple[str, int], Credited]:
        """Return the credit by episode and sample number, for samples of these groups that have a gradient."""
        run = self.training
        if not self._cuts_stragglers and (lost := len(self._out[step])):
            raise RunError(self._lost(f"step {step}: {lost} of its groups"))
        del self._out[step]
        rollout = run.take(step, groups)
        samples, metrics = run.credit(rollout, policy_version=step - 1)
        drops, steps = self._updates.drops_zero_advantage, self._settings.trainer_common.mini_batch_num
        kept: list[Sample] = []
        found: dict[tuple[str, int], Credited] = {}
        numbers: Counter[str] = Counter()
        for place, sample in enumerate(samples):
            if sample.advantage or not drops:
                kept.append(sample)
                # each optimizer step of the batch is a sum over a part of it
                credited = Credited(sample.advantage, sample.token_weight * steps, place)
                found[sample.episode_id, numbers[sample.episode_id]] = credited
            numbers[sample.episode_id] += 1
        self._credited = step
        self._logged[step] = {**rollout.metrics, **metrics, "time/rollout": rollout.seconds}
        self._logged[step] |= self._updates.metrics(step, kept, steps)
        self._resumable[step] = {"state": run.state()}
        return found

    # -------------------------------------------------------------- the trainer

    def trainer_logprobs(self, step: int, found: Found) -> None:
        """Publish log-probabilities from before the trainer's first optimizer step."""
        self.training.publish(LogprobsComputed(step=step, found=found))

    def step_trained(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record a trained step with Trinity's metrics."""
        self.done = step
        now = time.perf_counter()
        ours = {
            **self._logged.pop(step),
            **translate(numbers, NAMES),
            "queue/batches": float(self._credited - step),
            "time/step": now - self._stepped,
            "time/save": self._save_seconds,
        }
        self._stepped, self._save_seconds = now, 0.0
        ours["throughput/tokens_per_s"] = ours["tokens/generated"] / ours["time/step"]
        self.training.publish(StepEnded(step=step, metrics=ours))
        for earlier in [s for s in self._resumable if s < step]:
            del self._resumable[earlier]

    def is_save_due(self, step: int) -> bool:
        """Return whether to save the step."""
        return self.training.is_due("save", step)

    def saved(self, step: int, seconds: float) -> None:
        """Record a saved step and the seconds that it took."""
        self._save_seconds += seconds
        if step == self.saved_step:
            return
        self.training.publish(Saving(step=step))
        state = self._job / f"global_step_{step}"
        from astuner_ray import checkpoints  # imports torch

        keep = self._settings.trainer_common.max_checkpoints
        checkpoints.publish(state, self.training.run_dir.checkpoints, keep=keep)
        step_states.complete(state, self._resumable[step])
        self.saved_step = step
