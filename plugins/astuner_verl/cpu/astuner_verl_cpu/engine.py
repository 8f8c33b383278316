"""VERL's FSDP2 engine, registered for the CPU; ``actor_rollout_ref.model.external_lib`` imports this module.

The one difference: weights that VERL keeps outside the device are not pinned, which needs an accelerator's driver.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl


def _unpinned(pin_memory: bool = True) -> CPUOffloadPolicy:
    return CPUOffloadPolicy(pin_memory=False)


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])
class CpuFsdpEngine(transformer_impl.FSDPEngineWithLMHead):
    """VERL's engine around a causal language model, sharded over gloo."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> Any:
        with mock.patch.object(transformer_impl, "CPUOffloadPolicy", _unpinned):
            return super()._build_fsdp_module(module)
