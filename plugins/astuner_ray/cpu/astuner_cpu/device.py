"""torch.cpu with the functions of torch.cuda that trainers call unconditionally.

Memory counters report the process's memory; functions without a meaning on a CPU do nothing.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import psutil
import torch


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _resident(*_: Any, **__: Any) -> int:
    return int(psutil.Process().memory_info().rss)


def _free_and_total(*_: Any, **__: Any) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


def current_device(*_: Any) -> torch.device:
    """Return a device instead of an index: trainers pass it to ``.to()``, where 0 would mean ``cuda:0``."""
    return torch.device("cpu")


def name_once(distributed: Any) -> None:
    """Patch ``verl.utils.distributed``, whose default ``cpu:gloo,cpu:gloo`` is an error in torch."""
    original = distributed.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize(timeout_second: float | None = None, backend: str | None = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize


def _device_module() -> types.ModuleType:
    module = types.ModuleType(f"{__name__}.module")
    vars(module).update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    for name in (
        "empty_cache",
        "ipc_collect",
        "reset_accumulated_memory_stats",
        "reset_peak_memory_stats",
        "set_device",
        "set_per_process_memory_fraction",
        "synchronize",
    ):
        setattr(module, name, _nothing)
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        setattr(module, name, _resident)
    vars(module).update(
        current_device=current_device,
        device_count=lambda: 1,
        get_device_name=lambda *_: "cpu",
        get_rng_state=lambda *_: torch.get_rng_state(),
        is_available=lambda: True,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        mem_get_info=_free_and_total,
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
    )
    return module


module = _device_module()
"""Module that replaces torch.cuda for trainers."""
