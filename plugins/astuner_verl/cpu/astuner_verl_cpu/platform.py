"""The CPU as a VERL platform.

A platform provides VERL with the functions of torch.cuda; here they describe the CPU or do nothing.  VERL counts
devices by Ray's resource "GPU", so the cluster declares as many *logical* GPUs as the run has workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from verl.plugin.platform import PlatformBase

from astuner_cpu import device


class CpuPlatform(PlatformBase):
    """CPU platform; active only with ``VERL_PLATFORM=cpu``, never detected automatically."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = device.module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> torch.device:
        """Return a device instead of an index: VERL passes it to ``.to()``, where 0 would mean ``cuda:0``."""
        return device.current_device()

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
