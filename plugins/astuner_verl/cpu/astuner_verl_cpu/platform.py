"""The CPU as one of VERL's platforms.

VERL asks a platform for what torch.cuda has; here the answers are the CPU's, or nothing happens.  It counts devices by
Ray's resource "GPU", so the cluster lends as many *logical* GPUs as the run has workers; no GPU is ever touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from verl.plugin.platform import PlatformBase

from astuner_cpu import device


class CpuPlatform(PlatformBase):
    """Only by ``VERL_PLATFORM=cpu``: it never claims a machine by itself."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = device.module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> torch.device:
        """A device, where others give an index: VERL only hands it to ``.to()``, and there 0 means ``cuda:0``."""
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
