"""The CPU as one of VERL's platforms.

VERL asks a platform for what torch.cuda has; here the answers are the CPU's, or nothing happens.  It counts devices by
Ray's resource "GPU", so the cluster lends as many *logical* GPUs as the run has workers; no GPU is ever touched.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _resident(*_: Any, **__: Any) -> int:
    return int(psutil.Process().memory_info().rss)


def _free_and_total(*_: Any, **__: Any) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


def _cpu() -> torch.device:
    return torch.device("cpu")


def _device_module() -> types.ModuleType:
    """torch.cpu, and the functions of torch.cuda that VERL calls without asking for them."""
    module = types.ModuleType("astuner_verl_cpu.device")
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
        current_device=_cpu,
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


_DEVICE_MODULE = _device_module()


class CpuPlatform(PlatformBase):
    """Only by ``VERL_PLATFORM=cpu``: it never claims a machine by itself."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> torch.device:
        """A device, where others give an index: VERL only hands it to ``.to()``, and there 0 means ``cuda:0``."""
        return _cpu()

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...
