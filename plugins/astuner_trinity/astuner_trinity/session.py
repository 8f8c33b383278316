"""One training run on Trinity: its actors roll out and train, and ask the run's own process by a mailbox.

What is drawn, kept, credited, logged and validated the `Run` says, as on every backbone.  The order of a
step, whatever the synchronisation style, in which those of neighbouring steps overlap:

    draws -> (episode, group)* -> credit -> [Trinity: queue, update, weights] -> trained -> saved

Invariant: a step's books are as they were when its batch was credited, whatever later steps have drawn meanwhile, so a
run that is continued from it draws what the first one would have drawn.
"""

from __future__ import annotations

import asyncio
import time
from functools import singledispatchmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner import Ending, StepRollout
from astuner.contracts.errors import RunError
from astuner.contracts.events import EpisodeEnded, LogprobsComputed, Saving, StepEnded
from astuner.contracts.run import Run
from astuner.contracts.types import Sample, Split
from astuner_ray import step_states
from astuner_ray.native.numbers import translate
from astuner_ray.training.updates import Updates
from astuner_trinity import requests
from astuner_trinity.experiences import Credited
from astuner_trinity.metrics import NAMES
from astuner_trinity.taskset import Drawn
from astuner_trinity.workflow import Parts

if TYPE_CHECKING:
    pass


class Session:
    """Answers what Trinity's actors ask."""

    def __init__(
        self,
        run: Run,
        parts: Parts,
        *,
        job: Path,
        done: int = 0,
        updates: int = 0,
        max_staleness: int | None = None,
        cuts_stragglers: bool = False,
    ) -> None:
        """:param job: the folder of Trinity's checkpoints.
        :param done: steps that a run which is being continued has behind it.
        :param updates: optimizer steps among them.
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
        self._books: dict[int, dict[str, Any]] = {}
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
        self._updates = Updates(self._settings.trainer_common, done=updates, total_steps=run.total_steps)

    def answer(self, request: requests.Request[Any]) -> Any:
        """The reply to what was asked, or an awaitable of it."""
        self.hear()
        return self._answer(request)

    @singledispatchmethod
    def _answer(self, request: requests.Request[Any]) -> Any:
        raise TypeError(f"nobody answers {request!r}")

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

    @_answer.register(requests.NextDraws)
    async def _on_draws(self, request: requests.NextDraws) -> Drawn:
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

    @_answer.register(requests.WeightsTaken)
    async def _on_weights(self, request: requests.WeightsTaken) -> None:
        async with self._newer:
            self._weights = request.version
            self._newer.notify_all()

    @_answer.register(requests.At)
    def _on_at(self, request: requests.At) -> None:
        self.doing[request.who] = request.doing, time.monotonic()

    @_answer.register(requests.Failed)
    def _on_failed(self, request: requests.Failed) -> None:
        raise RunError(request.what)

    @_answer.register(requests.RolledOut)
    def _on_rolled_out(self, request: requests.RolledOut) -> None:
        if request.step > self._credited:
            raise RunError(self._lost(f"step {request.step}: its groups"))

    @_answer.register(requests.IsValidationDue)
    def _on_is_validation_due(self, request: requests.IsValidationDue) -> bool:
        common, run, version = self._settings.trainer_common, self.training, request.version
        if not run.validation_tasks or version <= self._validated:
            return False
        if version == 0:
            return common.val_before_train
        return any(run.is_due("test", step) for step in range(max(self._validated, 0) + 1, version + 1))

    @_answer.register(requests.BeginValidation)
    def _on_validation(self, request: requests.BeginValidation) -> Drawn:
        step, draws = request.step, self.training.draw(request.step, Split.VALIDATION)
        self._validated, self._measured = step, {group_id for group_id, _ in draws}
        return step, draws, self._settings.rollout.val_kwargs.num_repeat

    @_answer.register(requests.Validated)
    def _on_validated(self, request: requests.Validated) -> None:
        if request.group.group_id in self._measured:
            self._measured.remove(request.group.group_id)
            self.training.end(request.step, request.group)

    @_answer.register(requests.EndValidation)
    def _on_validation_ended(self, request: requests.EndValidation) -> None:
        if missing := len(self._measured):
            wanted = len(self.training.validation_tasks)
            raise RunError(self._lost(f"validation after step {self._validated}: {missing} of {wanted} tasks"))
        if self.done == self._drawn:
            self._stepped = 0.0  # nothing else was done meanwhile

    def _lost(self, what: str) -> str:
        return (
            f"{what} did not come back from Trinity's workflow runners: one of them died, or took longer than "
            f"trinity.explorer.max_timeout; see {self._job / 'log'}, and continue with --resume"
        )

    # -------------------------------------------------------------- the runners

    @_answer.register(requests.GetParts)
    def _on_parts(self, request: requests.GetParts) -> Parts:
        return self._parts

    @_answer.register(requests.EpisodeOver)
    def _on_episode(self, request: requests.EpisodeOver) -> None:
        self.training.publish(EpisodeEnded(step=request.step, episode=request.episode))

    @_answer.register(requests.GroupOver)
    def _on_group(self, request: requests.GroupOver) -> Ending:
        step, group = request.step, request.group
        if step <= self._credited:
            return Ending(kept=False)  # its batch was closed without it
        ending = self.training.end(step, group)
        self._out[step].discard(group.group_id)
        if ending.instead is not None:
            self._out[step].add(ending.instead[0])
        return ending

    # ------------------------------------------------------------- the pipeline

    @_answer.register(requests.GetCredit)
    def _on_credit(self, request: requests.GetCredit) -> dict[tuple[str, int], Credited]:
        step, run = request.step, self.training
        if not self._cuts_stragglers and (lost := len(self._out[step])):
            raise RunError(self._lost(f"step {step}: {lost} of its groups"))
        del self._out[step]
        rollout = run.take(step, request.groups)
        samples, metrics = run.credit(rollout, policy_version=step - 1)
        kept = [s for s in samples if s.advantage] if self._updates.drops_zero_advantage else samples
        steps = self._settings.trainer_common.mini_batch_num
        numbers = {**rollout.metrics, **metrics, "time/rollout": rollout.seconds}
        self._credited = step
        self._logged[step] = numbers | self._updates.take(kept, steps)
        self._books[step] = {"state": run.state(), "updates": self._updates.done}
        return _credit(rollout, samples, kept, scale=steps)

    # -------------------------------------------------------------- the trainer

    @_answer.register(requests.TrainerLogprobs)
    def _on_trainer_logprobs(self, request: requests.TrainerLogprobs) -> None:
        self.training.publish(LogprobsComputed(step=request.step, found=request.found))

    @_answer.register(requests.Trained)
    def _on_trained(self, request: requests.Trained) -> None:
        step, theirs = request.step, request.numbers
        self.done = step
        now = time.perf_counter()
        numbers = {
            **self._logged.pop(step),
            **translate(theirs, NAMES),
            "queue/batches": float(self._credited - step),
            "time/step": now - self._stepped,
            "time/save": self._save_seconds,
        }
        self._stepped, self._save_seconds = now, 0.0
        numbers["throughput/tokens_per_s"] = numbers["tokens/generated"] / numbers["time/step"]
        self.training.publish(StepEnded(step=step, metrics=numbers))
        for earlier in [s for s in self._books if s < step]:
            del self._books[earlier]

    @_answer.register(requests.IsSaveDue)
    def _on_is_save_due(self, request: requests.IsSaveDue) -> bool:
        return self.training.is_due("save", request.step)

    @_answer.register(requests.Saved)
    def _on_saved(self, request: requests.Saved) -> None:
        step, seconds = request.step, request.seconds
        self._save_seconds += seconds
        if step == self.saved_step:
            return
        self.training.publish(Saving(step=step))
        state = self._job / f"global_step_{step}"
        step_states.publish(
            state / "actor" / "huggingface",
            self.training.run_dir.checkpoints,
            step,
            keep=self._settings.trainer_common.max_checkpoints,
        )
        step_states.complete(state, self._books[step])
        self.saved_step = step


def _credit(
    rollout: StepRollout, samples: list[Sample], kept: list[Sample], *, scale: int
) -> dict[tuple[str, int], Credited]:
    """:param scale: optimizer steps that the batch is cut into; each is a sum over a part of it."""
    numbers: dict[str, int] = {}
    wanted = {id(s) for s in kept}
    found = {}
    for place, sample in enumerate(samples):
        number = numbers.setdefault(sample.episode_id, 0)
        numbers[sample.episode_id] += 1
        if id(sample) in wanted:
            found[sample.episode_id, number] = Credited(sample.advantage, sample.token_weight * scale, place)
    return found
