"""One rank of Trinity's own actor: see `tests.fsdp.actor`.

Everything between a sample and an optimizer step is what a run uses: the composed configuration, Trinity's check of it,
`experiences` and their way through Trinity's serialisation, Trinity's ``VERLTrainer.train_step`` with our algorithm and
loss, its FSDP2 worker.  Left out are Ray and Trinity's buffer.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import actor
import torch
from actor import PAD_TO

from astuner import RunDir, load_config
from astuner.config.schema import TrainerCommon
from astuner_trinity.facts import platform
from astuner_trinity.native import Facts, compose
from astuner_trinity_cpu import hooks


class Actor(actor.Actor):
    facts: Facts
    config: Any
    """Trinity's."""
    tokenizer: Any

    @classmethod
    def make(cls, experiment: Path, rank: int, world: int) -> Actor:
        hooks.setup()
        from transformers import AutoTokenizer
        from trinity.trainer.verl.config import build_verl_config
        from trinity.trainer.verl.workers import TrinityActorRolloutRefWorker

        own = experiment.with_name(f"{experiment.stem}-{world}-{rank}")  # ranks run at the same time
        facts = Facts.of(load_config(experiment), total_steps=9, run_dir=RunDir(own))
        config = compose(facts, platform().settings).load(own)
        worker = TrinityActorRolloutRefWorker(config=build_verl_config(config), role="actor_rollout")
        worker.init_model()
        made = cls(worker, rank, world)
        made.facts, made.config = facts, config
        made.tokenizer = AutoTokenizer.from_pretrained(experiment.parent / "model")
        return made

    def train(self, case: Mapping[str, Any]) -> dict[str, Any]:
        trainer = self.trainer(case)
        self.reset(case["settings"].optim.lr)
        whole = [*experiences_of(case["samples"]), *filling(len(case["samples"]))]
        share = self.share(whole)
        trainer.config.actor.ppo_mini_batch_size = len(whole)  # as `RunTrainer` does
        mine = self.logprobs(trainer, share)
        metrics = asyncio.run(trainer.train_step(share))
        names = {name.removeprefix("actor/"): float(v) for name, v in metrics.items() if name.startswith("actor/")}
        sent = dict(self.engine.get_per_tensor_param()[0]) if trainer.ref_in_actor else {}
        return {"logprobs": mine, "metrics": names, "gradients": self.gradients, "sent": sent}

    def share(self, experiences: Sequence[Any]) -> list[Any]:
        """This rank's part of a batch, after the way to the trainer."""
        from trinity.common.experience import Experience

        part = len(experiences) // self.world
        mine = list(experiences[self.rank * part : (self.rank + 1) * part])
        return Experience.deserialize_many(Experience.serialize_many(mine))

    def trainer(self, case: Mapping[str, Any]) -> Any:
        """Trinity's trainer, whose worker groups are this rank."""
        from trinity.algorithm import ALGORITHM_TYPE
        from trinity.trainer.verl.config import build_verl_config
        from trinity.trainer.verl.trainer import VERLTrainer

        config = self.config_with(case["settings"])
        trainer = VERLTrainer.__new__(VERLTrainer)
        trainer.logger = logging.getLogger("trinity")
        trainer.global_config, trainer.config = config, build_verl_config(config)
        trainer.algorithm_config = config.algorithm
        trainer.algorithm = ALGORITHM_TYPE.get(config.algorithm.algorithm_type)
        trainer.use_reference_policy, trainer.ref_in_actor = trainer.algorithm.use_reference, case["reference"] is None
        trainer.use_critic = trainer.algorithm.use_critic
        trainer.tokenizer = self.tokenizer
        trainer.empty_model, trainer.global_steps = None, 0
        trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: self.world)
        trainer.actor_rollout_wg = self.worker
        trainer._get_dp_size = lambda: 1  # the rank's own part is put into another order, but not dealt out again
        trainer.ref_policy_wg = SimpleNamespace(
            compute_ref_log_prob=lambda data: self.of_reference(data, case["reference"])
        )
        self.worker.set_trinity_config(
            pickle.loads(pickle.dumps(config.algorithm)), config.explorer.rollout_model.engine_type, "astuner"
        )
        return trainer

    def config_with(self, common: TrainerCommon) -> Any:
        """Trinity's configuration for another ``trainer_common``; what the worker was made with stays."""
        common = common.model_copy(update={"save_tokens": False})  # there is no run to hand log-probabilities in to
        experiment = self.facts.config
        changed = replace(experiment, astuner=experiment.astuner.model_copy(update={"trainer_common": common}))
        values = compose(replace(self.facts, config=changed), platform().settings).values
        algorithm = {name: value for name, value in values["algorithm"].items() if name != "optimizer"}
        trainer = replace(self.config.trainer, trainer_config=values["trainer"]["trainer_config"])
        return replace(self.config, algorithm=replace(self.config.algorithm, **algorithm), trainer=trainer)

    def of_reference(self, data: Any, weights: Mapping[str, torch.Tensor]) -> Any:
        """The reference model's log-probabilities, which need its weights for a while."""
        self.load(weights)
        found = self.worker.compute_log_prob(data)
        self.load(self.start)
        return found

    def logprobs(self, trainer: Any, share: Sequence[Any]) -> dict[str, list[float]]:
        """Number of the sample -> log-probabilities of its trained tokens, as Trinity computes old ones."""
        from trinity.trainer.verl.utils import to_data_proto

        from astuner_trinity.experiences import sample_of

        batch = to_data_proto(share, trainer.tokenizer.pad_token_id, None, trainer.logger)
        batch.meta_info["temperature"] = trainer.global_config.model.temperature
        found = trainer._compute_old_log_prob(batch, {}).batch
        rows = zip(share, found["old_log_probs"], found["response_mask"], strict=True)
        return {
            str(sample[1]): values[mask].tolist()
            for experience, values, mask in rows
            if (sample := sample_of(experience)) is not None
        }


def experiences_of(samples: Sequence[Any]) -> list[Any]:
    """What comes of `CreditOperator`; a sample is told by its place in ``samples``."""
    from astuner_trinity.experiences import Credited, give_credit, of_episode

    attempt = SimpleNamespace(workflow_task=SimpleNamespace(group_id="g", attempt=0))
    experiences = of_episode(attempt, samples)
    for experience, sample in zip(experiences, samples, strict=True):
        give_credit(experience, Credited(sample.advantage, sample.token_weight), step=1)
    return experiences


def filling(experiences: int) -> list[Any]:
    """What `CreditOperator` fills a batch up with."""
    from astuner_trinity.experiences import nothing

    return [nothing(step=1) for _ in range(-experiences % PAD_TO)]


if __name__ == "__main__":
    actor.main(Actor, *sys.argv[1:])
