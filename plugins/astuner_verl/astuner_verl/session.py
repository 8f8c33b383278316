"""A training run on VERL: VERL's trainer drives the loop and calls this session through its extension points.

VERL's trainer runs in this process (its workers and servers are Ray actors), so the run itself answers its requests
(`astuner.contracts.run.Run`), and exceptions of ASTuner end the trainer's loop.  The order within a step:

    submitted (tickets) -> collect (groups, rows) -> credit (advantages) -> [VERL: update, saved, weights] -> validate

Invariant: the run's state includes all changes of a step before the step's weights are saved.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls

from astuner import StepRollout
from astuner.contracts.errors import RunError
from astuner.contracts.events import LogprobsComputed, Note, Saving, StepEnded, TokenizersLoaded
from astuner.contracts.run import Run
from astuner.contracts.types import DEFAULT_POLICY, Sample
from astuner_ray import checkpoints, step_states
from astuner_ray.fleet import Fleet
from astuner_ray.redirect import Redirect
from astuner_ray.training.before_update import Mailbox
from astuner_ray.training.updates import VERL_ACTOR, Updates, translate
from astuner_verl import rows
from astuner_verl.loss import make_loss
from astuner_verl.native import Native

if TYPE_CHECKING:
    from verl.workers.rollout.llm_server import LLMServerClient

NAMES: Mapping[str, str] = {
    **VERL_ACTOR,
    "actor/reward_kl_penalty": "kl/in_reward",
    "timing_s/update_actor": "time/update",
    "timing_s/update_weights": "time/sync_weights",
}
"""VERL's metric name -> ASTuner's name."""
SAVING = "timing_s/save_checkpoint"
"""VERL's metric for the seconds of saving, which it counts as part of the step."""
_UPDATE = ("timing_s/old_log_prob", "timing_s/ref", "timing_s/adv", "timing_s/update_actor")

_current: Session | None = None


def current() -> Session:
    """Return the session of this process.

    :raises RunError: There is none, because VERL was not started by ASTuner.
    """
    if _current is None:
        raise RunError(
            "verl uses ASTuner's settings, but was not started by `astuner run`; start it with `astuner run`"
        )
    return _current


@dataclass
class _Step:
    """State of the current step."""

    rollout: StepRollout
    samples: Sequence[Sample]
    """Row -> its sample."""
    places: Sequence[int]
    """Row -> index of its sample among all samples of the step."""
    metrics: dict[str, float]


class Session:
    """Session that answers VERL's trainer."""

    def __init__(self, run: Run, composed: Native, redirect: Redirect, *, done: int = 0) -> None:
        """:param done: Training steps that a resumed run has completed."""
        self.training = run
        self.native, self._common = composed.config, composed.common
        self.redirect = redirect
        self.saved_step = done
        self._state = run.state()
        """The run's state after the last completed step; an interrupted step must not change it."""
        self._whole: int | None = None
        """While episodes run: the step of VERL's current weights, which can be saved; None during an update."""
        self._step: _Step | None = None
        self._tickets: list[str] = []
        """Tickets in VERL's queue: one for each group that VERL has requested and not received."""
        self._ahead = self.native.trainer.v1.trainer_mode != "sync"
        """Whether groups run during weight updates."""
        self._settings = run.config.astuner
        self._updates = Updates(self._settings.trainer_common, total_steps=run.total_steps)
        self._trainer: Any = None
        self._mailbox: Any = None
        """A `Mailbox` for log-probabilities that workers send to the episode log; None without an episode log."""
        self._fleet: Fleet | None = None
        folder = run.run_dir.path / "verl"
        self._numbers = _MetricsFile(folder / f"metrics-{done:06d}.jsonl")
        self._save = 0.0
        """Seconds of saving after the previous step."""

    def run(self, make_fleet: Callable[[LLMServerClient], Fleet]) -> None:
        """Train to the end.

        :param make_fleet: Creates a `Fleet` from VERL's client of the rollout servers.
        :raises Interrupted: The user stopped the run; completed work is saved.
        """
        global _current
        self._numbers.path.parent.mkdir(parents=True, exist_ok=True)
        os.environ["VERL_FILE_LOGGER_PATH"] = str(self._numbers.path)
        _current = self
        try:
            with self.redirect.theirs():
                self._run(make_fleet)
            self._log_finished()
        finally:
            _current = None
            del os.environ["VERL_FILE_LOGGER_PATH"]

    def _run(self, make_fleet: Callable[[LLMServerClient], Fleet]) -> None:
        from astuner_verl.handlers import EpisodeManager  # also registers the advantages

        # VERL 0.9.1 calls `logger.info(…, flush=True)` if the trainer's GPUs only train, which raises an error
        logging.getLogger("verl.trainer.ppo.v1.trainer_separate_async").setLevel(logging.WARNING)
        rows.check_free()
        tq.init(self.native.transfer_queue)
        try:
            self._trainer = get_trainer_cls(self.native.trainer.v1.trainer_mode)(config=self.native)
            self._trainer.init()
            rows.forget()
            self.training.publish(TokenizersLoaded(load={DEFAULT_POLICY: lambda: self._trainer.tokenizer}))
            common, send = self._common, None
            if common.save_tokens:
                self._mailbox = mailbox = ray.remote(Mailbox).options(num_cpus=0).remote()
                send = lambda step, found: ray.get(mailbox.put.remote(step, found))  # noqa: E731  # in a worker
            self._trainer.actor_rollout_wg.set_loss_fn(make_loss(common, send))
            self._fleet = make_fleet(self._trainer.get_llm_client())
            self._fit(EpisodeManager())
        finally:
            try:
                if self._fleet is not None:
                    with self.redirect.ours():
                        self.training.prefetch(self._fleet, 0)
                    self._fleet.close()
            finally:
                tq.close()

    def _fit(self, manager: Any) -> None:
        try:
            self._trainer.fit(manager)
        except Exception:
            if self._whole is not None and self._whole > self.saved_step:
                try:
                    self._save_finished(self._whole)
                except Exception as e:  # report it, but raise the error that ended the run
                    with self.redirect.ours():
                        text = f"step {self._whole} could not be saved: {type(e).__name__}: {e}"
                        self.training.publish(Note(text=text))
            raise

    def _save_finished(self, step: int) -> None:
        """Save the weights of the last completed step after an interruption while episodes run."""
        self._trainer.on_step_begin()  # make the rollout servers release the trainer's memory, as before an update:
        self._trainer.on_sample_end()  # `separate_async` does so at the start of a step, other modes after sampling
        self._trainer.global_steps = step
        self._trainer._save_checkpoint()  # VERL has no public method for this

    # --- requests from VERL -----------------------------------------------------------------------------------

    def submitted(self, tickets: Sequence[str], *, validate: bool) -> None:
        """Register VERL's request for more groups; in the synchronous mode they start when it samples them."""
        if validate:
            tq.kv_clear(keys=list(tickets), partition_id="val")
            return
        self._tickets += tickets
        if self._ahead:
            self.training.prefetch(self._fleet_(), len(self._tickets))

    def collect(self, step: int) -> KVBatchMeta:
        """Return the rows of training step ``step`` (from 1)."""
        used = self._settings.data.train_batch_size  # remaining tickets belong to groups that VERL requests again
        tq.kv_clear(keys=self._tickets[:used], partition_id="train")
        del self._tickets[:used]
        with self.redirect.ours():
            self._log_finished()
            run = self.training
            self._state, self._whole = run.state(), step - 1
            run.check_stop()
            rollout = run.rollout(self._fleet_(), step)
            self._whole = None
            samples, metrics = run.credit(rollout, policy_version=step - 1)
        drops = self._updates.drops_zero_advantage
        places = [i for i, s in enumerate(samples) if s.advantage or not drops]
        kept = [samples[i] for i in places]
        self._step = _Step(rollout=rollout, samples=kept, places=places, metrics=dict(metrics))
        outputs = [rows.as_output(s) for s in kept] or [rows.nothing(self._trainer.tokenizer.eos_token_id, step - 1)]
        steps = self._deal_out(len(outputs))
        self._step.metrics.update(self._updates.metrics(step, kept, steps))
        weights = [s.token_weight * steps for s in kept] or [0.0]
        return rows.publish(outputs, partition="train", step=step, token_weights=weights)

    def credit(self, token_rewards: Mapping[int, float]) -> dict[int, float]:
        """Return the advantage of each row.

        :param token_rewards: Row -> sum of its token-level rewards, minus the KL penalty if `use_kl_in_reward` is set.
        """
        assert self._step is not None  # VERL has sampled before
        samples, algorithm = self._step.samples, self._settings.trainer_common.algorithm
        if not algorithm.use_kl_in_reward:
            return {row: s.advantage for row, s in enumerate(samples)} or dict.fromkeys(token_rewards, 0.0)
        penalties: dict[tuple[str, str], float] = {}
        for row, s in enumerate(samples):
            key = (s.episode_id, s.agent)
            penalties[key] = penalties.get(key, 0.0) + s.reward - token_rewards[row]
        with self.redirect.ours():
            samples, metrics = self.training.credit(
                self._step.rollout, policy_version=self._trainer.global_steps - 1, penalties=penalties
            )
        self._step = replace(self._step, samples=samples, metrics={**self._step.metrics, **metrics})
        return {row: s.advantage for row, s in enumerate(samples)} or dict.fromkeys(token_rewards, 0.0)

    def validate(self, step: int) -> KVBatchMeta:
        """Validate after ``step``; VERL receives one row with the mean reward, and the run logs the metrics."""
        with self.redirect.ours():
            self._state, self._whole = self.training.state(), step
            evaluation = self.training.validate(self._fleet_(), step)
            self._whole = None
        assert evaluation is not None  # without validation tasks, VERL's validation is disabled
        row = rows.nothing(self._trainer.tokenizer.eos_token_id, step)
        row.reward_score = evaluation.reward
        return rows.publish([row], partition="val", step=step, token_weights=[0.0])

    def saved(self, step: int, state: Path, *, written: bool) -> None:
        """Add the run's state to VERL's saved ``step``, and publish the checkpoint.

        :param written: Whether VERL has finished writing; with ``async_save`` it continues in the background.
        """
        with self.redirect.ours():
            run = self.training
            ours = self._state if self._whole is not None else run.state()
            unlogged = self._step_metrics() if self._step is not None else {}
            self._take_logprobs()
            run.publish(Saving(step=step))
            checkpoints.publish(
                state,
                run.run_dir.checkpoints,
                keep=self._settings.trainer_common.max_checkpoints,
            )
            books = {"state": ours, "unlogged": unlogged}
            step_states.complete(state, books, written=written)
            self.saved_step = step

    # --- private ----------------------------------------------------------------------------------------------

    def _fleet_(self) -> Fleet:
        assert self._fleet is not None  # created before VERL's loop starts
        return self._fleet

    def _deal_out(self, rows: int) -> int:
        """Make VERL split ``rows`` into `mini_batch_num` optimizer steps; return the resulting number of steps.

        VERL pads a batch with empty rows to complete mini-batches of ``ppo_mini_batch_size * rollout.n`` rows, which
        must be a multiple of the data-parallel size.
        """
        native = self.native
        n: int = native.actor_rollout_ref.rollout.n
        gpus = native.trainer.nnodes * native.trainer.n_gpus_per_node
        parallel = gpus // native.actor_rollout_ref.actor.ulysses_sequence_parallel_size
        size = -(-rows // (self._settings.trainer_common.mini_batch_num * n))
        while size * n % parallel:
            size += 1
        native.actor_rollout_ref.actor.ppo_mini_batch_size = size
        return -(-rows // (size * n))

    def _step_metrics(self) -> dict[str, float]:
        assert self._step is not None
        rollout = self._step.rollout
        return {**rollout.metrics, **self._step.metrics, "time/rollout": rollout.seconds}

    def _log_finished(self) -> None:
        """Publish the step whose metrics VERL has written."""
        for step, numbers in self._numbers.new():
            if self._step is None or self._step.rollout.step != step:
                continue  # the validation before the first step
            metrics = {**self._step_metrics(), **translate(numbers, NAMES), **_times(numbers), "time/save": self._save}
            self._save = float(numbers.get(SAVING, 0.0))
            if metrics.get("time/step"):
                metrics["throughput/tokens_per_s"] = metrics["tokens/generated"] / metrics["time/step"]
            self._take_logprobs()
            self.training.publish(StepEnded(step=step, metrics=metrics))

    def _take_logprobs(self) -> None:
        """Publish log-probabilities that workers have sent for the current step."""
        if self._step is not None and self._mailbox is not None:
            found = ray.get(self._mailbox.take.remote(step := self._step.rollout.step))
            places = self._step.places
            by_place = {places[row]: mine for row, mine in found.items()}
            self.training.publish(LogprobsComputed(step=step, found=by_place))


def _times(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step and of its update, counted as on every backbone."""
    found = {"time/train": sum(float(numbers[name]) for name in _UPDATE if name in numbers)}
    if "timing_s/step" in numbers:
        found["time/step"] = float(numbers["timing_s/step"]) - float(numbers.get(SAVING, 0.0))
    return found


class _MetricsFile:
    """File with all metrics, written by VERL's ``file`` logger and read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def new(self) -> list[tuple[int, dict[str, Any]]]:
        """Return (step, metrics) of every line written since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._read)
            lines = file.read().split(b"\n")
        whole = lines[:-1]  # the last element is empty, or an incomplete line
        self._read += sum(len(line) + 1 for line in whole)
        rows = [json.loads(line) for line in whole]
        return [(int(row["step"]), row["data"]) for row in rows]
