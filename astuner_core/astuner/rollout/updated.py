"""What a step's row of numbers says of its update: whether there was one, of how many tokens, and if not, why not.

A pure function of the names in ``metrics.jsonl``, so the console, the report and an older run's folder say the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

_EQUAL = 1e-9
"""Rewards closer than this are equal: the rounding of a sum."""
SOLVED = "every attempt succeeded"
_ADVICE = {
    SOLVED: "these tasks are solved, so take harder ones",
    "no generated token is in a loss mask": "certificate.json says what became of the tokens (left_out); give the "
    "agent model=model_tuner",
    "every update was left out, since loss or gradient was not finite": "lower astuner.trainer_common.optim.lr, or "
    "train in float32",
    "every group had equal rewards": "read some of episodes/ in the run folder: does the reward tell a good attempt "
    "from a bad one? If so, take tasks that succeed now and then, or raise astuner.rollout.temperature or num_repeat",
    "no sample had a gradient": "look at the rewards in episodes/, and at the penalties that are subtracted from them",
}
"""Why a step taught nothing -> what to do."""


def updated(rows: Sequence[Row]) -> dict[str, Any]:
    """What was trained in some steps.

    :param rows: of ``metrics.jsonl``, training steps.
    :returns: ``tokens`` in updates, once for each pass; ``optimizer_steps``, None where the backbone does not count
        them; ``steps`` that changed weights, and ``of`` how many; ``why`` no step had a reward to learn from, with
        ``advice``, else empty.
    """
    counted = [n for n in (_sum(row, "optimizer_steps") for row in rows) if n is not None]
    trained = sum(not missed(row) for row in rows)
    silent = [why for row in rows if (why := no_signal(row))]
    why = Counter(silent).most_common(1)[0][0] if rows and len(silent) == len(rows) else ""
    return {
        "tokens": sum(_sum(row, "tokens/trained") or 0.0 for row in rows if not missed(row)),
        "optimizer_steps": sum(counted) if counted else None,
        "steps": trained,
        "of": len(rows),
        "why": why if rows else "no step came to its end",
        "advice": next((advice for reason, advice in _ADVICE.items() if why.startswith(reason)), ""),
    }


def missed(row: Row) -> str:
    """Why a step changed no weights; empty where it changed some, or where the row does not tell."""
    nothing = [value == 1 for name, value in row.items() if _is(name, "nothing_learnable")]
    if not nothing or not all(nothing):
        skipped = _sum(row, "skipped_steps") and _sum(row, "optimizer_steps") == 0
        return "every update was left out, since loss or gradient was not finite" if skipped else ""
    return _reason(row)


def no_signal(row: Row) -> str:
    """Why a step's rewards taught nothing; empty where they did. A KL or entropy term moves weights all the same."""
    return missed(row) or (_reason(row) if row.get("adv/zero_frac") == 1 else "")


def _reason(row: Row) -> str:
    """Why the rewards of a step without any advantage taught nothing."""
    if row.get("success/mean") == 1:
        return SOLVED
    if row.get("tokens/trainable") == 0:
        return "no generated token is in a loss mask"
    low, high = row.get("adv/reward_min"), row.get("adv/reward_max")
    if low is not None and high is not None and high - low <= _EQUAL:
        return f"every group had equal rewards (all are {high:g})"
    return "every group had equal rewards" if row.get("adv/zero_group_frac") == 1 else "no sample had a gradient"


def _sum(row: Row, name: str) -> float | None:
    """A number of the step, summed over its policies; None where it is not counted."""
    found = [value for key, value in row.items() if _is(key, name) and value is not None]
    return float(sum(found)) if found else None


def _is(key: str, name: str) -> bool:
    return key == name or re.fullmatch(rf"policy/[^/]+/{name}", key) is not None
