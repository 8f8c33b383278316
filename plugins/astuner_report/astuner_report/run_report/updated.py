"""What was trained in some steps, of how many tokens; and if nothing, why not, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from astuner.rollout.updated import SOLVED, missed, no_signal, total

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


def updated(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was trained in some steps.

    :param rows: of ``metrics.jsonl``, training steps.
    :returns: ``tokens`` in updates, once for each pass; ``optimizer_steps``, None where the backbone does not count
        them; ``steps`` that changed weights, and ``of`` how many; ``why`` no step had a reward to learn from, with
        ``advice``, else empty.
    """
    counted = [n for n in (total(row, "optimizer_steps") for row in rows) if n is not None]
    trained = sum(not missed(row) for row in rows)
    silent = [why for row in rows if (why := no_signal(row))]
    why = Counter(silent).most_common(1)[0][0] if rows and len(silent) == len(rows) else ""
    return {
        "tokens": sum(total(row, "tokens/trained") or 0.0 for row in rows if not missed(row)),
        "optimizer_steps": sum(counted) if counted else None,
        "steps": trained,
        "of": len(rows),
        "why": why if rows else "no step came to its end",
        "advice": next((advice for reason, advice in _ADVICE.items() if why.startswith(reason)), ""),
    }
