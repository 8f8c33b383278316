"""The energy that a machine itself counts: of its CPUs (Linux powercap, RAPL) and its NVIDIA GPUs (NVML).

Nothing here is estimated.  Both count for the whole machine, whoever uses it; where neither can be read, there are no
numbers.
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
    metric: str
    read: Callable[[], float]
    """Joules since some time."""
    wraps_at: float | None
    """Where it begins again at 0, in joules; None: never."""
    last: float = 0.0

    def since_last(self) -> float:
        """A counter that was wrapped more than once between two calls is not seen; RAPL's do so after minutes."""
        now = self.read()
        used, self.last = now - self.last, now
        return used if used >= 0 or self.wraps_at is None else used + self.wraps_at


class EnergyMeter:
    """Reads the counters; as often as a step ends."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._counters: list[_Counter] = []
        self._said: list[str] = []
        self._find_cpus(powercap)
        self._find_gpus()
        for counter in self._counters:
            counter.last = counter.read()

    def since_last(self) -> dict[str, float]:
        """Joules since the last call, or since the meter was made, by metric; empty where nothing counts."""
        used: dict[str, float] = {}
        for counter in self._counters:
            used[counter.metric] = used.get(counter.metric, 0.0) + max(counter.since_last(), 0.0)
        return used

    def __str__(self) -> str:
        return "; ".join(self._said)

    def _find_cpus(self, powercap: Path) -> None:
        zones = list(_zones(powercap))
        if not zones:
            self._said.append("this machine does not count the energy of its CPUs (no RAPL in /sys/class/powercap)")
            return
        readable = [zone for zone in zones if os.access(zone / "energy_uj", os.R_OK)]
        if not readable:
            self._said.append("the energy counters of the CPUs are readable by root only")
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
    """Whole packages, and memory beside them; a package's cores are in it already."""
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
    """The GPUs that this process may use; all where the variable names them in another way than by number."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        return list(range(count))
    named = [part.strip() for part in said.split(",") if part.strip()]
    if not all(part.isdigit() for part in named):
        return list(range(count))
    return [int(part) for part in named if int(part) < count]
