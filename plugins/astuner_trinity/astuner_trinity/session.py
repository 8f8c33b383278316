"""One training run on Trinity: its actors roll out and train, and ask the run's own process by a mailbox.

What is drawn, kept, credited, logged and validated the `Run` says, as on every backbone.  The order of a
step, whatever the synchronisation style, in which those of neighbouring steps overlap:

    draws -> (episode, group)* -> credit -> [Trinity: queue, update, weights] -> trained -> saved

Invariant: a step's state is as it was when its batch was credited, whatever later steps have drawn meanwhile, so a run
that is continued from it draws what the first one would have drawn.
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
"""Trinity's name of a number of a train step -> ours."""
OF_TRAINER = frozenset({"at", "trainer_logprobs", "step_trained", "is_save_due", "saved"})
"""What `astuner_trinity.stages.RunTrainer` asks, and its workers (`astuner_trinity.algorithm`) tell."""

Drawn = tuple[int, list[Draw], int]
"""A step, its draws, and the attempts at each."""


class Request(NamedTuple):
    """What is asked, as it travels."""

    method: str
    """Of `Session`."""
    arguments: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a runner needs to run episodes."""

    runner: EpisodeRunner
    environ: dict[str, str]
    """Variables that agents and judges need, e.g. where the environment service listens."""
    model: str
    """The model's folder, or its Hugging Face name."""
    max_model_len: int
    max_parallel: int
    """Episodes at once in this runner."""
    helper_names: Sequence[object] = ()
    """Of the auxiliary models."""


@dataclass(frozen=True)
class Credited:
    """What the run says about one sample."""

    advantage: float
    token_weight: float
    place: int = 0
    """Of the sample, among those of its step."""


class Session:
    """Answers what Trinity's actors ask and tell by `astuner_trinity.mailbox`: each is a method below the lines.

    One that returns an awaitable makes no other request wait.
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
        """:param job: the folder of Trinity's checkpoints.
        :param done: steps that a run which is being continued has behind it.
        :param max_staleness: of how many versions the weights that a step is drawn with may be behind those that it
            trains; None: as many as Trinity's queue and batches in flight allow.
        :param cuts_stragglers: whether Trinity may train a step without its slowest groups; they are drawn again.
        """
        self.training = run
        self.done = done
        """The last step that was trained."""
        self.saved_step = done
        self.doing: dict[str, tuple[str, float]] = {}
        """Who -> what it does, since when (`time.monotonic`)."""
        self._parts = parts
        self._job = job
        self._max_staleness = max_staleness
        self._cuts_stragglers = cuts_stragglers
        self._drawn = done
        self._out: dict[int, set[str]] = {}
        """Drawn step -> its groups that have not come back."""
        self._resumable: dict[int, dict[str, Any]] = {}
        """Credited step -> the state that a run continued from it needs."""
        self._logged: dict[int, dict[str, float]] = {}
        """Credited step -> its numbers so far."""
        self._stepped = 0.0
        """When the last step ended, or the first one began."""
        self._save_seconds = 0.0
        """Spent on saving since then."""
        self._credited = done
        self._weights = done
        """The version in the rollout engines."""
        self._newer = asyncio.Condition()
        self._validated = done - 1  # `Run.is_due` knows whether this one was
        self._measured: set[str] = set()
        """The groups of the validation under way that have not come back."""
        self._heard = time.monotonic()
        self._settings = run.config.astuner
        self._updates = Updates(self._settings.trainer_common, total_steps=run.total_steps)

    def answer(self, request: Request) -> Any:
        """The reply to what was asked, or an awaitable of it."""
        self.hear()
        return getattr(self, request.method)(*request.arguments)

    def hear(self) -> None:
        """Something was heard of Trinity."""
        self._heard = time.monotonic()

    @property
    def trained(self) -> bool:
        """Whether anything was trained that is not saved."""
        return self.done > self.saved_step

    @property
    def silent_for(self) -> float:
        """Seconds since anything was heard of Trinity."""
        return time.monotonic() - self._heard

    # ------------------------------------------------------------- the explorer

    async def next_draws(self) -> Drawn:
        """The next step's draws; none when all were drawn."""
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
        """The rollout engines have the weights of a step."""
        async with self._newer:
            self._weights = version
            self._newer.notify_all()

    def at(self, who: str, doing: str) -> None:
        """``who``, the explorer or the trainer, is doing something else."""
        self.doing[who] = doing, time.monotonic()

    def failed(self, what: str) -> None:
        """Something failed that Trinity only writes into a log file."""
        raise RunError(what)

    def noted(self, text: str) -> None:
        """Something a person should read."""
        self.training.publish(Note(text=text))

    def rolled_out(self, step: int) -> None:
        """All groups of a step have ended, as Trinity sees it."""
        if step > self._credited:
            raise RunError(self._lost(f"step {step}: its groups"))

    def is_validation_due(self, version: int) -> bool:
        """Whether the weights of a step are to be measured: one since the last measurement was to be."""
        common, run = self._settings.trainer_common, self.training
        if not run.validation_tasks or version <= self._validated:
            return False
        if version == 0:
            return common.val_before_train
        return any(run.is_due("test", step) for step in range(max(self._validated, 0) + 1, version + 1))

    def begin_validation(self, step: int) -> Drawn:
        """The draws that measure the weights of a step."""
        draws = self.training.draw(step, Split.VALIDATION)
        self._validated, self._measured = step, {group_id for group_id, _ in draws}
        return step, draws, self._settings.rollout.val_kwargs.num_repeat

    def validated(self, step: int, group: Group) -> None:
        """A group of a validation has ended."""
        if group.group_id in self._measured:
            self._measured.remove(group.group_id)
            self.training.end(step, group)

    def end_validation(self) -> None:
        """All groups of the validation have ended, as Trinity sees it."""
        if missing := len(self._measured):
            wanted = len(self.training.validation_tasks)
            raise RunError(self._lost(f"validation after step {self._validated}: {missing} of {wanted} tasks"))
        if self.done == self._drawn:
            self._stepped = 0.0  # nothing else was done meanwhile

    def _lost(self, what: str) -> str:
        return (
            f"{what} did not come back from Trinity's workflow runners: one of them died, or took longer than "
            f"trinity.explorer.max_timeout; see {self._job / 'log'}"
        )

    # -------------------------------------------------------------- the runners

    def get_parts(self) -> Parts:
        """What a runner needs to run episodes."""
        return self._parts

    def episode_over(self, step: int, episode: Episode) -> None:
        """An episode has ended."""
        self.training.publish(EpisodeEnded(step=step, episode=episode))

    def group_over(self, step: int, group: Group) -> Ending:
        """Whether a group is trained on, or what to run in its place."""
        if step <= self._credited:
            return Ending(kept=False)  # its batch was closed without it
        ending = self.training.end(step, group)
        self._out[step].discard(group.group_id)
        if ending.instead is not None:
            self._out[step].add(ending.instead[0])
        return ending

    # ------------------------------------------------------------- the pipeline

    def credit(self, step: int, groups: Sequence[str]) -> dict[tuple[str, int], Credited]:
        """(Episode, number of its sample) -> credit, of those samples of these groups that have a gradient."""
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
                # each optimizer step that the batch is cut into is a sum over a part of it
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
        """What the trainer computed before its first optimizer step."""
        self.training.publish(LogprobsComputed(step=step, found=found))

    def step_trained(self, step: int, numbers: Mapping[str, float]) -> None:
        """A step is trained; Trinity's numbers of it."""
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
        """Whether the step is to be saved."""
        return self.training.is_due("save", step)

    def saved(self, step: int, seconds: float) -> None:
        """A step was saved, and how long that took."""
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
