"""The `local` backbone: engine and trainer around one set of weights, in this process.

The engine reads the very tensors the trainer updates, so there is nothing to synchronise: a step is roll out,
pause the engine, update in place, bump the policy version.  Every generation of a step therefore comes from one
policy version, and every sample is on-policy.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from astuner.backbone import Backbone, Capabilities, Served
from astuner.errors import CheckpointError
from astuner.rollout.models import one_model
from astuner.serving import make_codec
from astuner_local.engine import EngineStats, LocalEngine
from astuner_local.memory import estimate, micro_batch_tokens
from astuner_local.modeling import Dimensions, LoadedModel, load_model
from astuner_local.settings import LocalSettings
from astuner_local.trainer.checkpoint import (
    checkpoint_path,
    latest_checkpoint,
    prune,
    read_checkpoint,
    restore,
    save_checkpoint,
)
from astuner_local.trainer.lora import wrap
from astuner_local.trainer.trainer import PolicyTrainer

if TYPE_CHECKING:
    from astuner.experiment import Experiment

SMALL_MODEL = 20_000_000
"""Parameters below which a second CPU thread costs more in waiting than it computes."""


@dataclass(frozen=True, kw_only=True)
class _Policy:
    """Weights with the engine that samples from them."""

    loaded: LoadedModel
    model: Any
    """The causal LM, wrapped by peft when LoRA is on."""
    engine: LocalEngine


class LocalBackbone(Backbone):
    """Trains on one machine, CPU or one GPU."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        honours=frozenset({"model", "rollout", "trainer_common"}),
        only={
            "rollout.tensor_model_parallel_size": (1,),
            "rollout.name": (None, "local"),
            "rollout.top_p": (1,),
            "rollout.top_k": (-1,),
            "rollout.multi_turn.expected_steps": (1,),
            "trainer_common.nnodes": (1,),
            "trainer_common.n_gpus_per_node": (None, 0, 1),
            "trainer_common.ulysses_sequence_parallel_size": (1,),
            "trainer_common.fsdp_config.param_offload": (False,),
            "trainer_common.fsdp_config.optimizer_offload": (False,),
        },
        instead={
            "rollout.top_p": "the trainer's log-probabilities are of the uncut distribution; lower rollout.temperature",
            "rollout.top_k": "the trainer's log-probabilities are of the uncut distribution; lower rollout.temperature",
            "rollout.tensor_model_parallel_size": "the local backbone has one device; for more, --backbone verl",
            "trainer_common.nnodes": "the local backbone is one process; for more, --backbone verl or trinity",
        },
    )

    @property
    def settings(self) -> LocalSettings:
        settings = self.config.backbone_section("local")
        return settings if isinstance(settings, LocalSettings) else LocalSettings()

    def plan(self) -> Mapping[str, str]:
        return estimate(self.config)

    def latest_state(self, folder: Path) -> Path | None:
        return latest_checkpoint(folder)

    @contextmanager
    def serve(self, model_path: str | None = None) -> Iterator[Served]:
        loaded = load_model(self.config.astuner.model, path=model_path or self.config.locate_model())
        with self._running(loaded, loaded.model, 0) as policy:
            yield Served(
                engine=policy.engine, tokenizer=loaded.tokenizer, name=model_path or self.config.astuner.model.path
            )

    def train(self, experiment: Experiment) -> None:
        a = self.config.astuner
        saved = read_checkpoint(experiment.resume_from) if experiment.resume_from else None
        done = saved.step if saved else 0
        loaded = load_model(a.model, path=self.config.locate_model())
        model = wrap(loaded.model, a.model.lora, seed=a.seed)
        with self._running(loaded, model, done) as policy:
            common = a.trainer_common
            dims = Dimensions.of(loaded.model.config)
            at_once = micro_batch_tokens(common, dims, loaded.dtype, loaded.device)
            trainer = PolicyTrainer(
                model,
                common.model_copy(update={"micro_batch_tokens": at_once}),
                temperature=a.rollout.temperature,
                device=loaded.device,
                reference_model=self._reference(model),
                total_optimizer_steps=experiment.total_steps * common.mini_batch_num * common.ppo_epochs,
                prefix_sharing=self.settings.prefix_sharing,
                seed=a.seed,
            )
            if saved is not None:
                restore(saved, trainer)
                experiment.restore(saved.state, done)
            with policy.engine.paused():
                policy.engine.weights_updated(done)
            _Loop(experiment, policy, trainer, make_codec(self.config, loaded.tokenizer)).run(done)

    def _reference(self, model: Any) -> Any:
        """The starting weights, for KL; LoRA's frozen base is its own reference."""
        a = self.config.astuner
        wanted = a.trainer_common.use_kl_loss or a.trainer_common.algorithm.use_kl_in_reward
        if not wanted or a.model.lora.rank:
            return None
        reference = load_model(a.model, path=self.config.locate_model()).model
        return reference.requires_grad_(False)

    @contextmanager
    def _running(self, loaded: LoadedModel, model: Any, done: int) -> Iterator[_Policy]:
        rollout = self.config.astuner.rollout
        small = sum(p.numel() for p in loaded.model.parameters()) < SMALL_MODEL
        before = torch.get_num_threads()
        torch.set_num_threads(self.settings.threads or (1 if small else before))
        torch.manual_seed(self.config.astuner.seed)
        engine = LocalEngine(
            model,
            tokenizer_eos_ids=loaded.eos_token_ids,
            max_model_len=rollout.max_model_len,
            max_num_seqs=rollout.max_num_seqs or rollout.max_env_worker,
            kv_token_budget=self.settings.kv_token_budget,
            seed=random.Random(f"{self.config.astuner.seed}/{done}").getrandbits(62),  # a resumed run draws new numbers
        )
        try:
            yield _Policy(loaded=loaded, model=model, engine=engine)
        finally:
            engine.close()
            torch.set_num_threads(before)


class _Loop:
    """Roll out, assign credit, update, log, validate, save; until the steps are done."""

    def __init__(self, experiment: Experiment, policy: _Policy, trainer: PolicyTrainer, codec: Any) -> None:
        self.experiment = experiment
        self.policy = policy
        self.trainer = trainer
        self.models = one_model(policy.engine, codec)
        if codec.template.drops_reasoning:
            experiment.note(
                "the chat template leaves earlier reasoning out once the user speaks again; in training it stays in "
                "the prompt, so that an episode remains one sample: deploy with a template that keeps it"
            )
        self.common = experiment.config.astuner.trainer_common
        self.save_seconds = 0.0
        """Spent on saving since the last step was logged."""
        self.saved = 0
        """The newest step in the resume folder."""
        self.state: Mapping[str, Any] = {}
        """The experiment's books as of the last finished step; a step cut short must not move them."""

    def run(self, done: int) -> None:
        experiment = self.experiment
        self.saved, self.state = done, experiment.state()
        try:
            if done:
                self._after(done)  # what the run that is being continued did not get to
            elif self.common.val_before_train:
                experiment.validate(self.models, 0)
            for step in experiment.steps(done):
                self._step(step)
                done, self.state = step, experiment.state()
                self._after(step)
        except CheckpointError:
            raise
        except Exception:
            if done > self.saved:
                self._save(experiment.run_dir.resume, done, keep=1)
            raise

    def _after(self, step: int) -> None:
        """Save, validate and export, as far as that is due and not done yet."""
        experiment = self.experiment
        if self.saved < step and experiment.is_due("resume", step):
            self._save(experiment.run_dir.resume, step, keep=1)
        if experiment.is_due("test", step) and not experiment.was_validated(step):
            experiment.validate(self.models, step)
            self.state = experiment.state()  # with the validation's failures in the ledger
        checkpoints = experiment.run_dir.checkpoints
        if experiment.is_due("save", step) and not checkpoint_path(checkpoints, step).exists():
            self._save(checkpoints, step, keep=self.common.max_checkpoints)

    def _step(self, step: int) -> None:
        experiment, engine = self.experiment, self.policy.engine
        started = time.perf_counter()
        before = engine.stats()
        rollout = experiment.rollout(self.models, step)
        samples, metrics = experiment.credit(rollout, policy_version=step - 1)
        if self.common.algorithm.use_kl_in_reward:
            samples, metrics = experiment.credit(
                rollout, policy_version=step - 1, penalties=self.trainer.kl_penalties(samples)
            )
        experiment.watch_learning(step, samples)
        rolled_out = time.perf_counter()
        with engine.paused():
            update = self.trainer.update(samples) if samples else {}
            engine.weights_updated(step)
        seconds = time.perf_counter() - started
        experiment.log(
            step,
            {
                **rollout.metrics,
                **metrics,
                **update,
                **_engine_metrics(engine.stats() - before),
                "time/rollout": rollout.seconds,
                "time/train": time.perf_counter() - rolled_out,
                "time/step": seconds,
                "time/save": self.save_seconds,
                "throughput/tokens_per_s": rollout.metrics["tokens/generated"] / seconds,
            },
        )
        self.save_seconds = 0.0

    def _save(self, folder: Path, step: int, keep: int | None) -> None:
        started = time.perf_counter()
        tokenizer = self.policy.loaded.tokenizer
        save_checkpoint(folder, step=step, trainer=self.trainer, tokenizer=tokenizer, state=self.state)
        prune(folder, keep)
        self.save_seconds += time.perf_counter() - started
        if folder == self.experiment.run_dir.resume:
            self.saved = step


def _engine_metrics(stats: EngineStats) -> dict[str, float]:
    return {
        "engine/requests": float(stats.requests),
        "engine/mean_batch": stats.mean_batch,
        "engine/reused_share": stats.reused_share,
    }
