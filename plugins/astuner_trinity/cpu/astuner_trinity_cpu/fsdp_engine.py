"""verl's FSDP2 engine, registered for the CPU; `hooks` imports this module once verl's own engine has been imported.

Two things differ.  Weights that verl keeps outside the device are not pinned, which needs an accelerator's driver.  And
weights are sent as they were trained: verl rounds them to bfloat16 where they are synchronised by checkpoints, and the
rollout engine, which computes in float32 here, would not have the policy that is trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from verl.utils.model import convert_weight_keys
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl


def _unpinned(pin_memory: bool = True) -> CPUOffloadPolicy:
    return CPUOffloadPolicy(pin_memory=False)


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])
class CpuFsdpEngine(transformer_impl.FSDPEngineWithLMHead):
    """verl's engine around a causal language model, sharded over gloo."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> Any:
        with mock.patch.object(transformer_impl, "CPUOffloadPolicy", _unpinned):
            return super()._build_fsdp_module(module)

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Names and whole tensors, gathered as they are taken; every rank must take them all."""
        parts = convert_weight_keys(self.module.state_dict(), self.module)
        return ((name, part.full_tensor() if isinstance(part, DTensor) else part) for name, part in parts.items()), None
