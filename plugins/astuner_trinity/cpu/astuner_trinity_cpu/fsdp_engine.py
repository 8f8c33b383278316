"""verl's FSDP2 engine for the CPU; `hooks` imports this module after verl's own engine.

In addition to `astuner_cpu.fsdp`, weights are sent unrounded: verl rounds them to bfloat16 when they are synchronized
through checkpoints, and the rollout engine, which computes in float32 here, would differ from the trained policy.
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
    """verl's engine for a causal language model, sharded over gloo."""

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Yield names and full tensors, gathered one by one; every rank must consume all of them."""
        parts = convert_weight_keys(self.module.state_dict(), self.module)
        return ((name, part.full_tensor() if isinstance(part, DTensor) else part) for name, part in parts.items()), None
