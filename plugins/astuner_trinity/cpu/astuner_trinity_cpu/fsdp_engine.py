"""verl's FSDP2 engine for the CPU; `hooks` imports this module once verl's own engine has been imported.

Beside what `astuner_cpu.fsdp` says, weights are sent as they were trained: verl rounds them to bfloat16 where they are
synchronised by checkpoints, and the rollout engine, which computes in float32 here, would not have the policy that is
trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils.model import convert_weight_keys

from astuner_cpu.fsdp import CpuFsdpEngine, register


@register
class ExactFsdpEngine(CpuFsdpEngine):
    """verl's engine around a causal language model, sharded over gloo."""

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Names and whole tensors, gathered as they are taken; every rank must take them all."""
        parts = convert_weight_keys(self.module.state_dict(), self.module)
        return ((name, part.full_tensor() if isinstance(part, DTensor) else part) for name, part in parts.items()), None
