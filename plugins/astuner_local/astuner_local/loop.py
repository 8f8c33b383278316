"""Training loop of the local backbone: roll out, assign credit, update, log, validate, save.

Every policy learns only from its own agents' samples.  Invariant: an engine is paused while its weights change, so all
generations of a step come from one version of its policy, and every sample is on-policy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner import PolicyModel
from astuner.contracts.errors import CheckpointError
from astuner.contracts.events import LogprobsComputed, Note, Progressed, Saving, StepEnded, TokenizersLoaded
from astuner_local.policy import LocalPolicy
from astuner_local.trainer.checkpoint import WHOLE, Part, checkpoint_path, is_complete, prune, save_checkpoint
from astuner_local.trainer.trainer import PolicyTrainer
from astuner_models.serving import make_codec

if TYPE_CHECKING:
    from astuner.contracts.run import Run


class TrainingLoop:
    """One run, from its current step to the end."""

    def __init__(self, run: Run, policies: Mapping[str, LocalPolicy]) -> None:
        self.training = run
        self.policies = policies
        codecs = {name: make_codec(run.config, p.loaded.tokenizer) for name, p in policies.items()}
        self.models = {name: PolicyModel(policies[name].engine, codec) for name, codec in codecs.items()}
        load = {name: partial(getattr, p.loaded, "tokenizer") for name, p in policies.items()}
        run.publish(TokenizersLoaded(load=load))
        if any(codec.template.drops_reasoning for codec in codecs.values()):
            text = (
                "the chat template drops earlier reasoning when the user speaks again; during training it stays in the "
                "prompt, so that an episode remains one sample: deploy with a template that keeps it"
            )
            run.publish(Note(text=text))
        self.common = run.config.astuner.trainer_common
        self.save_seconds = 0.0
        """Seconds spent on saving since the last step was logged."""
        self.saved = 0
        """Newest step in the resume folder."""
        self.state: Mapping[str, Any] = {}
        """The run's state after the last completed step; an interrupted step must not change it."""

    def run(self, done: int) -> None:
        """Run all steps after ``done``."""
        run = self.training
        self.saved, self.state = done, run.state()
        try:
            if done:
                self._after(done)  # complete what the previous run did not finish
            elif self.common.val_before_train:
                run.validate(self.models, 0)
            for step in range(done + 1, run.total_steps + 1):
                run.check_stop()
                self._step(step)
                done, self.state = step, run.state()
                self._after(step)
        except CheckpointError:
            raise
        except Exception:
            if done > self.saved:
                self._save(run.run_dir.resume, done, keep=1)
            raise

    def _after(self, step: int) -> None:
        """Save, validate and export if it is due and not done yet."""
        run = self.training
        if self.saved < step and run.is_due("resume", step):
            self._save(run.run_dir.resume, step, keep=1)
        if run.is_due("test", step):
            run.validate(self.models, step)
            self.state = run.state()  # includes the validation's failures
        checkpoints = run.run_dir.checkpoints
        if run.is_due("save", step) and not is_complete(checkpoint_path(checkpoints, step)):
            self._save(checkpoints, step, keep=self.common.max_checkpoints)

    def _step(self, step: int) -> None:
        run = self.training
        started = time.perf_counter()
        before = {name: p.engine.stats() for name, p in self.policies.items()}
        rollout = run.rollout(self.models, step)
        samples, metrics = run.credit(rollout, policy_version=step - 1)
        if self.common.algorithm.use_kl_in_reward:
            penalties: dict[tuple[str, str], float] = {}
            for name, trainer in trainers(self.policies).items():
                penalties |= trainer.kl_penalties([s for s in samples if s.policy == name])
            samples, metrics = run.credit(rollout, policy_version=step - 1, penalties=penalties)
        rolled_out = time.perf_counter()
        progress = partial(self._progress, step, "update")
        for name, trainer in trainers(self.policies).items():
            places = [i for i, s in enumerate(samples) if s.policy == name]
            with self.policies[name].engine.paused():
                metrics |= self._named(name, trainer.update([samples[i] for i in places], progress))
                self.policies[name].engine.weights_updated(step)
            found = {places[i]: mine for i, mine in trainer.before_update.items()}
            run.publish(LogprobsComputed(step=step, found=found))
        seconds = time.perf_counter() - started
        for name, policy in self.policies.items():
            stats = policy.engine.stats() - before[name]
            told = {"requests": stats.requests, "mean_batch": stats.mean_batch, "reused_share": stats.reused_share}
            metrics |= self._named(name, {f"engine/{what}": float(number) for what, number in told.items()})
        numbers = {
            **rollout.metrics,
            **metrics,
            "time/rollout": rollout.seconds,
            "time/train": time.perf_counter() - rolled_out,
            "time/step": seconds,
            "time/save": self.save_seconds,
            "throughput/tokens_per_s": rollout.metrics["tokens/generated"] / seconds,
        }
        run.publish(StepEnded(step=step, metrics=numbers))
        self.save_seconds = 0.0

    def _progress(self, step: int, phase: str, done: int, total: int) -> None:
        steps = self.training.total_steps
        self.training.publish(Progressed(step=step, total_steps=steps, what=phase, done=done, total=total))

    def _named(self, policy: str, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of one policy, prefixed with its name if there are several."""
        if len(self.policies) == 1:
            return dict(metrics)
        return {f"policy/{policy}/{name}": value for name, value in metrics.items()}

    def _save(self, folder: Path, step: int, keep: int | None) -> None:
        started = time.perf_counter()
        self.training.publish(Saving(step=step))
        parts = {
            place(self.policies, name): Part(trainer, self.policies[name].loaded.tokenizer)
            for name, trainer in trainers(self.policies).items()
        }
        save_checkpoint(folder, step=step, parts=parts, state=self.state)
        if folder == self.training.run_dir.resume:
            self.saved = step
            prune(folder, keep, step=step)
        else:
            prune(folder, keep, step=step, spare=self.training.run_dir.best)
        self.save_seconds += time.perf_counter() - started


def trainers(policies: Mapping[str, LocalPolicy]) -> dict[str, PolicyTrainer]:
    """Return the trainers of the policies that learn."""
    return {name: p.trainer for name, p in policies.items() if p.trainer is not None}


def place(policies: Mapping[str, LocalPolicy], name: str) -> str:
    """Return the subfolder of a policy in a checkpoint, or `WHOLE` if it is the only policy."""
    return name if len(policies) > 1 else WHOLE
