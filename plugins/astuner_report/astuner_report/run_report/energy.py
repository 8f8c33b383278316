"""Energy counters of the machine: CPUs (Linux powercap, RAPL) and NVIDIA GPUs (NVML).

Nothing is estimated. Both counters cover all processes of the machine. Without readable counters there are no metrics.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")
_CPU, _GPU = "energy/cpu_joules", "energy/gpu_joules"


@dataclass
class _Counter:
    """One energy counter, and its value at the last reading."""

    metric: str
    read: Callable[[], float]
    """Joules since an arbitrary time."""
    wraps_at: float | None
    """Value in joules at which the counter wraps to 0; None if it never does."""
    last: float = 0.0

    def since_last(self) -> float:
        """Return the joules since the last call.

        More than one wrap between two calls is not detected; the counters of RAPL wrap after minutes.
        """
        now = self.read()
        used, self.last = now - self.last, now
        return used if used >= 0 or self.wraps_at is None else used + self.wraps_at


class EnergyMeter:
    """Reads the counters after each step."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._counters: list[_Counter] = []
        self._said: list[str] = []
        self._find_cpus(powercap)
        self._find_gpus()
        for counter in self._counters:
            counter.last = counter.read()

    def since_last(self) -> dict[str, float]:
        """Return the joules since the last call, or since creation, by metric; empty if no counter is readable."""
        used: dict[str, float] = {}
        for counter in self._counters:
            used[counter.metric] = used.get(counter.metric, 0.0) + max(counter.since_last(), 0.0)
        return used

    def __str__(self) -> str:
        return "; ".join(self._said)

    def _find_cpus(self, powercap: Path) -> None:
        zones = list(_zones(powercap))
        if not zones:
            self._said.append("CPUs not measured: RAPL is not available in /sys/class/powercap")
            return
        readable = [zone for zone in zones if os.access(zone / "energy_uj", os.R_OK)]
        if not readable:
            self._said.append("CPUs not measured: only root can read the energy counters")
            return
        for zone in readable:
            limit = _number(zone / "max_energy_range_uj", 1e6)
            self._counters.append(_Counter(_CPU, partial(_number, zone / "energy_uj", 1e6), limit))
        self._said.append(f"CPUs measured by RAPL ({', '.join(_name(zone) for zone in readable)})")

    def _find_gpus(self) -> None:
        if shutil.which("nvidia-smi") is None:
            return
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            self._said.append("GPUs not measured: install nvidia-ml-py with pip install nvidia-ml-py")
            return
        try:
            nvml.nvmlInit()
            wanted = _visible(nvml.nvmlDeviceGetCount())
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in wanted]
            counters = [_Counter(_GPU, _millijoules(nvml, handle), None) for handle in handles]
            for counter in counters:
                counter.read()
        except nvml.NVMLError as e:
            self._said.append(f"GPUs not measured: {e}")
            return
        self._counters += counters
        self._said.append(f"GPUs measured by NVML ({', '.join(map(str, wanted))})")


def _zones(powercap: Path) -> Iterator[Path]:
    """Yield packages and memory; the cores are part of a package."""
    for zone in sorted(powercap.glob("intel-rapl:*")):
        if (zone / "energy_uj").exists() and (_name(zone).startswith("package") or _name(zone) == "dram"):
            yield zone


def _name(zone: Path) -> str:
    return (zone / "name").read_text(encoding="utf-8").strip()


def _number(path: Path, of_one: float) -> float:
    return float(path.read_text(encoding="utf-8")) / of_one


def _millijoules(nvml: Any, handle: Any) -> Callable[[], float]:
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3


def _visible(count: int) -> list[int]:
    """Return the indices of the visible GPUs; all if CUDA_VISIBLE_DEVICES does not contain indices."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        return list(range(count))
    named = [part.strip() for part in said.split(",") if part.strip()]
    if not all(part.isdigit() for part in named):
        return list(range(count))
    return [int(part) for part in named if int(part) < count]
