"""The machine: a description, and its maximum speed."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any


def machine_line() -> str:
    """Return one line with CPU, cores, load and relevant versions."""
    packages = ("torch", "transformers", "trl", "agentscope", "astuner-core")
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"
    return f"{os.cpu_count()} cores {cpu_name()} ({load}), Python {platform.python_version()}, {versions}."


def commit() -> str:
    """Return the commit of the measured tree; ``-dirty`` if it has uncommitted changes."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def cpu_name() -> str:
    """Return the processor's name with its generation, because rented machines use one name for several processors."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    first = cpuinfo.read_text(encoding="utf-8").partition("\n\n")[0]
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    name = said.get("model name") or platform.machine()
    return f"{name} (family {said['cpu family']}, model {said['model']})" if "cpu family" in said else name


def matmul_flops() -> float:
    """Return the best float32 operations per second of one thread, over square matrix products."""
    import torch

    return product_flops(torch.float32)


@lru_cache(maxsize=4)
def product_flops(dtype: Any) -> float:
    """Return the best floating-point operations per second of a matrix product in this type."""
    import torch

    best = 0.0
    for n in (512, 1024, 2048):
        a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
        best = max(best, 2 * n**3 / _best(lambda a=a, b=b: a @ b))
    return best


@lru_cache(maxsize=64)
def read_bandwidth(size: int) -> float:
    """Return the best bytes per second at which one thread rereads ``size`` bytes.

    A working set that fits into a cache is read from that cache, so a small model's limit is far above main memory's.
    """
    import torch

    x = torch.ones(max(size, 1 << 20) // 4)
    return x.numel() * 4 / _best(x.sum)


def _best(work: Callable[[], object], repeats: int = 10) -> float:
    """Return the fewest seconds of one call."""
    seconds = []
    for _ in range(repeats + 3):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds[3:])
