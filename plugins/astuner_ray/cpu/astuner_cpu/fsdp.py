"""VERL's FSDP2 engine on a CPU, which the CPU packages of the backbones register with VERL, where the first one stays.

The one difference: weights that VERL keeps outside the device are not pinned, which needs an accelerator's driver.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

register = EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])
"""Makes an engine the one for a causal language model on a CPU."""


class CpuFsdpEngine(transformer_impl.FSDPEngineWithLMHead):
    """VERL's engine around a causal language model, sharded over gloo."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> Any:
        unpinned = CPUOffloadPolicy(pin_memory=False)
        with mock.patch.object(transformer_impl, "CPUOffloadPolicy", return_value=unpinned):
            return super()._build_fsdp_module(module)
