"""What a run has cost: tokens, time, energy. Sums over its rows, so a run that was continued is counted whole."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_TRAINED = re.compile(r"(policy/[^/]+/)?tokens/trained")
_PHASES = ("rollout", "train", "validation", "save")
_KWH = 3.6e6
"""Joules."""


def cost(rows: Sequence[Mapping[str, Any]], *, watts: float | None) -> dict[str, Any]:
    """
    :param rows: of ``metrics.jsonl``.
    :param watts: what the machine draws, where a person says so.
    """
    seconds = {phase: _total(rows, f"time/{phase}") for phase in _PHASES}
    spent = {phase: total for phase, total in seconds.items() if total is not None}
    whole = sum(_total(rows, f"time/{name}") or 0.0 for name in ("step", "validation", "save"))
    trained = [value for row in rows for name, value in row.items() if _TRAINED.fullmatch(name) and value is not None]
    return {
        "tokens": {
            "generated": _total(rows, "tokens/generated"),
            "trainable": _total(rows, "tokens/trainable"),
            "trained": sum(trained) if trained else None,
        },
        "seconds": {"whole": whole, **spent},
        "energy": _energy(rows, whole, watts),
    }


def _total(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) if values else None


def _energy(rows: Sequence[Mapping[str, Any]], seconds: float, watts: float | None) -> dict[str, Any] | None:
    """Measured where something counts, else estimated if a person gave a number to estimate from, else None."""
    measured = {part: _total(rows, f"energy/{part}_joules") for part in ("cpu", "gpu")}
    known = {part: joules for part, joules in measured.items() if joules is not None}
    if known:
        return {"how": "measured", "kwh": sum(known.values()) / _KWH, "parts": {p: j / _KWH for p, j in known.items()}}
    if watts is not None:
        return {"how": "estimated", "kwh": watts * seconds / _KWH, "watts": watts}
    return None
