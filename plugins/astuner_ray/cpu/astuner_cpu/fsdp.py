"""VERL's FSDP2 engine for a CPU.

The CPU packages of the backbones register it with VERL; the first registration wins.
The only difference: weights that VERL offloads are not pinned, because pinning needs an accelerator's driver.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

register = EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])
"""Decorator that registers an engine for causal language models on a CPU."""


class CpuFsdpEngine(transformer_impl.FSDPEngineWithLMHead):
    """VERL's engine for a causal language model, sharded over gloo."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> Any:
        unpinned = CPUOffloadPolicy(pin_memory=False)
        with mock.patch.object(transformer_impl, "CPUOffloadPolicy", return_value=unpinned):
            return super()._build_fsdp_module(module)
