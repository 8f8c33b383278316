"""verl's numbers of a step, under the names that every backbone uses.

verl writes them as JSON lines (its logger ``file``); the file stays in the run folder with all of them, and what has a
name of ours goes to the log sinks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES: Mapping[str, str] = {
    "actor/loss": "loss",
    "actor/pg_loss": "pg_loss",
    "actor/entropy": "entropy",
    "actor/kl/ref": "kl/ref",
    "actor/kl/mismatch_mean": "kl/mismatch_mean",
    "actor/kl/mismatch_max": "kl/mismatch_max",
    "actor/ratio/mean": "ratio/mean",
    "actor/ratio/max": "ratio/max",
    "actor/clip_frac/low": "clip_frac/low",
    "actor/clip_frac/high": "clip_frac/high",
    "actor/rollout_is/weight": "rollout_is/weight",
    "actor/grad_norm": "grad_norm",
    "actor/reward_kl_penalty": "kl/in_reward",
    "perf/mfu/actor": "perf/mfu",
    "perf/max_memory_allocated_gb": "perf/gpu_memory_gb",
    "timing_s/update_actor": "time/update",
    "timing_s/update_weights": "time/sync_weights",
    "timing_s/save_checkpoint": "time/save",
    "timing_s/step": "time/step",
}
"""verl's name -> ours."""


def translate(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Those of verl's numbers that have a name of ours, and are finite."""
    found = {ours: numbers[theirs] for theirs, ours in NAMES.items() if theirs in numbers}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


class MetricsFile:
    """The file that verl's logger writes; read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def new(self) -> list[tuple[int, dict[str, Any]]]:
        """(step, numbers) of every line written since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._read)
            lines = file.read().split(b"\n")
        whole = lines[:-1]  # the last one is empty, or being written
        self._read += sum(len(line) + 1 for line in whole)
        rows = [json.loads(line) for line in whole]
        return [(int(row["step"]), row["data"]) for row in rows]
