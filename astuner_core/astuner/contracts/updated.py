"""Determine from the metrics of a step whether it updated the weights, and if not, why.

The functions use only metrics in ``metrics.jsonl``, so console, report and folders of older runs agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from astuner.contracts.types import SUCCESS_TOLERANCE

Row = Mapping[str, Any]

_EQUAL = 1e-9
"""Rewards that differ by less are equal, because sums are rounded."""
SOLVED = "every attempt succeeded"


def missed(row: Row) -> str:
    """Return why a step did not change weights; empty if it did, or if the metrics do not show it."""
    nothing = [value == 1 for name, value in row.items() if _is(name, "nothing_learnable")]
    if not nothing or not all(nothing):
        skipped = total(row, "skipped_steps") and total(row, "optimizer_steps") == 0
        return "every update was left out, since loss or gradient was not finite" if skipped else ""
    return _reason(row)


def no_signal(row: Row) -> str:
    """Return why a step's rewards gave no learning signal; empty if they did.

    A KL or entropy term may still change weights.
    """
    return missed(row) or (_reason(row) if row.get("adv/zero_frac") == 1 else "")


def _reason(row: Row) -> str:
    """Return why a step without advantages had no learning signal."""
    low, high = row.get("adv/reward_min"), row.get("adv/reward_max")
    on_a_scale_to_1 = high is None or high <= 1 + SUCCESS_TOLERANCE  # all grades from 1 to 5 would count as success
    if row.get("success/mean") == 1 and (row.get("success/stated") or on_a_scale_to_1):
        return SOLVED
    if row.get("tokens/trainable") == 0:
        return "no generated token is in a loss mask"
    if low is not None and high is not None and high - low <= _EQUAL:
        return f"every group had equal rewards (all are {high:g})"
    return "every group had equal rewards" if row.get("adv/zero_group_frac") == 1 else "no sample had a gradient"


def total(row: Row, name: str) -> float | None:
    """Return a metric of the step, summed over policies, or None if it is missing."""
    found = [value for key, value in row.items() if _is(key, name) and value is not None]
    return float(sum(found)) if found else None


@lru_cache(maxsize=4096)  # the rows of a run have the same metrics
def _is(key: str, name: str) -> bool:
    return key == name or re.fullmatch(rf"policy/[^/]+/{name}", key) is not None
