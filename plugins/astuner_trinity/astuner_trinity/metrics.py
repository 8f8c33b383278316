"""Trinity's numbers of a train step, under the names that every backbone uses."""

from __future__ import annotations

import math
from collections.abc import Mapping

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
    "perf/mfu/actor": "perf/mfu",
    "perf/max_memory_allocated_gb": "perf/gpu_memory_gb",
    "time/update_actor": "time/update",
    "time/sync_weight": "time/sync_weights",
    "time/train_step": "time/train",
}
"""Trinity's name -> ours."""


def translate(numbers: Mapping[str, float]) -> dict[str, float]:
    """Those of Trinity's numbers that have a name of ours, and are finite."""
    found = {ours: numbers[theirs] for theirs, ours in NAMES.items() if theirs in numbers}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}
