"""Trinity's names for the numbers of a train step."""

from __future__ import annotations

from collections.abc import Mapping

from astuner_ray.native.numbers import VERL_ACTOR

NAMES: Mapping[str, str] = {
    **VERL_ACTOR,
    "time/update_actor": "time/update",
    "time/sync_weight": "time/sync_weights",
    "time/train_step": "time/train",
}
"""Trinity's name -> ours."""
