"""What a step's row of numbers says of its update: whether there was one, and if not, why not.

A pure function of the names in ``metrics.jsonl``, so the console, the report and an older run's folder say the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from astuner.contracts.types import SUCCESS_TOLERANCE

Row = Mapping[str, Any]

_EQUAL = 1e-9
"""Rewards closer than this are equal: the rounding of a sum."""
SOLVED = "every attempt succeeded"


def missed(row: Row) -> str:
    """Why a step changed no weights; empty where it changed some, or where the row does not tell."""
    nothing = [value == 1 for name, value in row.items() if _is(name, "nothing_learnable")]
    if not nothing or not all(nothing):
        skipped = total(row, "skipped_steps") and total(row, "optimizer_steps") == 0
        return "every update was left out, since loss or gradient was not finite" if skipped else ""
    return _reason(row)


def no_signal(row: Row) -> str:
    """Why a step's rewards taught nothing; empty where they did. A KL or entropy term moves weights all the same."""
    return missed(row) or (_reason(row) if row.get("adv/zero_frac") == 1 else "")


def _reason(row: Row) -> str:
    """Why the rewards of a step without any advantage taught nothing."""
    low, high = row.get("adv/reward_min"), row.get("adv/reward_max")
    on_a_scale_to_1 = high is None or high <= 1 + SUCCESS_TOLERANCE  # grades from 1 to 5 all count as success
    if row.get("success/mean") == 1 and (row.get("success/stated") or on_a_scale_to_1):
        return SOLVED
    if row.get("tokens/trainable") == 0:
        return "no generated token is in a loss mask"
    if low is not None and high is not None and high - low <= _EQUAL:
        return f"every group had equal rewards (all are {high:g})"
    return "every group had equal rewards" if row.get("adv/zero_group_frac") == 1 else "no sample had a gradient"


def total(row: Row, name: str) -> float | None:
    """A number of the step, summed over its policies; None where it is not counted."""
    found = [value for key, value in row.items() if _is(key, name) and value is not None]
    return float(sum(found)) if found else None


def _is(key: str, name: str) -> bool:
    return key == name or re.fullmatch(rf"policy/[^/]+/{name}", key) is not None
