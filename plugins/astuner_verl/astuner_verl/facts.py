"""Inputs of VERL's configuration from outside the experiment file: shared facts and VERL's own constraints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from astuner_ray.native import facts
from astuner_ray.native.gpu_memory import gib, of_facts
from astuner_verl import separate

ENGINE_SHARE = 0.5
"""VERL's default of ``gpu_memory_utilization``."""


@dataclass(frozen=True, kw_only=True)
class Facts(facts.Facts):
    """Facts for `astuner_verl.table`, created by `Facts.of`."""

    BACKBONE: ClassVar[str] = "verl"

    def wrong(self) -> Iterator[tuple[str, str]]:
        yield from super().wrong()
        common, rollout = self.a.trainer_common, self.a.rollout
        if self.gpus < 1:
            yield "astuner.trainer_common.n_gpus_per_node", f"is {self.gpus}, but verl needs at least one GPU"
            return
        world, sharing = self.gpus * common.nnodes, common.ulysses_sequence_parallel_size
        shares = [("trainer_common.ulysses_sequence_parallel_size", sharing, "groups that share sequences")]
        if not separate.trains_only(self.own):
            shares.insert(
                0, ("rollout.tensor_model_parallel_size", rollout.tensor_model_parallel_size, "rollout engines")
            )
        for key, share, who in shares:
            if world % share:
                yield (
                    f"astuner.{key}",
                    f"is {share}, but {common.nnodes} x {self.gpus} = {world} GPUs cannot be cut into {who} of {share}",
                )
        if too_few := self.sequence_fits(self.micro_batch_tokens):
            yield "astuner.trainer_common.micro_batch_tokens", too_few
        if not float(self.a.model.lora.alpha).is_integer():
            yield "astuner.model.lora.alpha", f"is {self.a.model.lora.alpha:g}, but verl accepts integers only"

    def memory_plan(self) -> Mapping[str, str]:
        """Return the plan lines on GPU memory, an estimate; empty if the model's config does not give its shape.

        Trainer and rollout engines take turns: while one works, the other's share is freed, except for the trainer's
        state unless it is offloaded.
        """
        found = of_facts(self, gpus=self.gpus * self.a.trainer_common.nnodes)
        if found is None:
            return {}
        share = float(self.own.get("actor_rollout_ref.rollout.gpu_memory_utilization", ENGINE_SHARE))
        conversation = self.max_model_len * found.kv_per_token
        engine = (found.rollout_weights + conversation) / share
        trainer: float = found.update
        if not separate.trains_only(self.own):
            trainer = max(trainer, engine, found.resting / (1 - share))
        apart = separate.written(self.own)
        each = f"for the trainer, {gib(engine)} per rollout GPU, at least" if apart else "at least"
        stays = "" if apart else f"{gib(found.resting)} of the trainer stay; "
        return {
            "GPU memory": f"about {gib(trainer)} per GPU {each}",
            "an update": found.of_update(self.micro_batch_tokens),
            "a rollout": f"{stays}in {share:g} of the GPU: {gib(found.rollout_weights)} weights + {gib(conversation)} "
            f"per conversation of {self.max_model_len:,} tokens",
        }
