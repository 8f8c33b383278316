"""Why success in training and in validation differ although the policy is the same: they sample differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astuner.contracts.statistics import percent

FAR = 0.1
"""Difference in success from which on the sampling is explained."""
RECENT = 5
"""Training steps before a validation whose success is compared with it."""
_KEYS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
"""Sampling parameter -> its value if it is not set."""


def sampling_note(rollout: Mapping[str, Any], training: float, validation: float) -> str:
    """Return why two success rates cannot be compared; empty if they are close, or both splits sample equally.

    :param rollout: the section ``astuner.rollout``.
    """
    if abs(training - validation) <= FAR:
        return ""
    trains = {key: rollout.get(key, default) for key, default in _KEYS.items()}
    validates = {key: (rollout.get("val_kwargs") or {}).get(key, default) for key, default in _KEYS.items()}
    validates["temperature"] = (rollout.get("val_kwargs") or {}).get("temperature", 0.0)
    if trains == validates:
        return ""
    return (
        f"Training success {percent(training, 1)} and validation success {percent(validation, 1)} cannot be compared: "
        f"training samples with {_shown(trains, validates)}{' (exploration)' if trains['temperature'] else ''}, "
        f"validation with {_shown(validates, trains)}"
    )


def _shown(values: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    if not values["temperature"]:
        return "temperature 0 (greedy)"
    differing = [
        key for key in values if values[key] != others[key] and (others["temperature"] or key == "temperature")
    ]
    return ", ".join(f"{key} {values[key]:g}" for key in differing)
