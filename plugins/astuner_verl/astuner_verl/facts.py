"""What VERL's configuration depends on beside the experiment file: the core's facts, and what VERL asks of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from astuner_ray.native import facts
from astuner_verl import separate


@dataclass(frozen=True, kw_only=True)
class Facts(facts.Facts):
    """All that `astuner_verl.table` looks at; made by `Facts.of`."""

    BACKBONE: ClassVar[str] = "verl"

    def wrong(self) -> Iterator[tuple[str, str]]:
        yield from super().wrong()
        common, rollout = self.a.trainer_common, self.a.rollout
        if self.gpus < 1:
            yield "astuner.trainer_common.n_gpus_per_node", f"is {self.gpus}, and verl needs one at least"
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
            yield "astuner.model.lora.alpha", f"is {self.a.model.lora.alpha:g}, and verl takes whole numbers"
