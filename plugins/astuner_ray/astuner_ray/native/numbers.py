"""An engine's numbers of a step, under the names that every backbone uses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

VERL_ACTOR: Mapping[str, str] = {
    "actor/loss": "loss",
    "actor/pg_loss": "pg_loss",
    "actor/entropy": "entropy",
    "actor/kl": "kl",
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
}
"""What VERL's workers report of an update with `astuner_ray.training.loss`, whoever drives them: their name -> ours."""


def translate(numbers: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """Those of an engine's numbers that have a name of ours, and are finite; what a loss measures has one of its own.

    :param names: the engine's name -> ours.
    """
    of_loss = {name: name.removeprefix("actor/") for name in numbers if name.startswith("actor/loss/")}
    found = {ours: float(numbers[theirs]) for theirs, ours in {**names, **of_loss}.items() if theirs in numbers}
    return {name: value for name, value in found.items() if math.isfinite(value)}
