"""VERL's FSDP 2 engine, changed to send weights with merged adapters; imported through ``model.external_lib`` for LoRA.

Trinity's engines receive full weights, so that rollouts use the trained policy.  verl 0.8.0 merges the adapters,
collects references to the weights, and removes the adapters before the weights are read: engines would keep the base
model forever (fixed in 0.9.1).  Here one matrix at a time is copied and merged, and the trained weights are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_name
from verl.utils.model import convert_weight_keys
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl as _registers  # noqa: F401

_KIND, _BACKEND = "language_model", "fsdp2"
_Theirs: Any = EngineRegistry.get_engine_cls(_KIND, _BACKEND)


class MergedEngine(_Theirs):  # type: ignore[misc]  # the engine registered for this device
    """Engine of a model with adapters."""

    def _build_lora_module(self, module: Any) -> Any:
        """Build the adapters in float32; Trinity rounds them to 16 bits, which would lose small steps."""
        module = super()._build_lora_module(module)
        for weight in module.parameters():
            if weight.requires_grad:
                weight.data = weight.data.float()
        return module

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Yield names and full tensors in the precision of the passes; every process must consume all of them."""
        mixed = self.engine_config.mixed_precision or {}
        return merged(self.module, PrecisionType.to_dtype(mixed.get("param_dtype", "bf16"))), None


EngineRegistry._engines[_KIND][_BACKEND][get_device_name()] = MergedEngine  # `register` keeps an existing entry


def merged(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model wrapped by peft, under the model's own names: ``W + alpha / r * B A``.

    :param dtype: Type to which the sums are rounded.
    """
    layers: dict[str, Any] = {
        f"{name}.base_layer.weight": m for name, m in module.named_modules() if isinstance(m, LoraLayer)
    }
    weights = {name: weight for name, weight in module.state_dict().items() if ".lora_" not in name}
    plain = {name.removeprefix("base_model.model.").replace(".base_layer.", "."): name for name in weights}
    for name, wrapped in convert_weight_keys(plain, module).items():
        weight = _whole(weights[wrapped])
        if (layer := layers.get(wrapped)) is not None:
            for adapter in layer.active_adapters:
                up, down = (_whole(half[adapter].weight).float() for half in (layer.lora_B, layer.lora_A))
                weight = weight.float() + layer.scaling[adapter] * (up @ down)
        yield name, weight.to(dtype)


def _whole(weight: Tensor) -> Tensor:
    """Return the full tensor on the device used for communication, even if it is offloaded between updates."""
    here = weight.detach().to(get_device_name())
    return here.full_tensor() if isinstance(here, DTensor) else here
