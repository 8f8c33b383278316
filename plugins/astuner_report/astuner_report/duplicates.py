"""How alike the attempts at a task are, as numbers of the step: what the sentinel's rule `duplicate_answers` reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from astuner.contracts.statistics import mean
from astuner.contracts.types import Episode


def duplicates(episodes: Sequence[Episode]) -> dict[str, float]:
    """How alike the attempts at a task are, and how alike their own log-probabilities say that they would be.

    Two independent draws from p are the same with probability sum p(x)², which is the mean of p(x) over draws; so the
    share of pairs that are the same, and the mean probability of what was said, estimate one number where the engine
    samples as it says (and the environment does not vary, which makes the first smaller).

    :param episodes: of whole groups; those that were not scored, or in which nobody spoke, do not count.
    """
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.reward is not None and episode.turns:
            groups.setdefault(episode.workflow_task.group_id, []).append(episode)
    several = [group for group in groups.values() if len(group) > 1]
    if not several:
        return {}
    same = [
        _share_of_equal_pairs([tuple(tuple(t.generation.response_ids) for t in e.turns) for e in group])
        for group in several
    ]
    logprobs = [sum(sum(t.generation.logprobs) for t in e.turns) for group in several for e in group]
    return {
        "duplicates/share": mean(same),
        "duplicates/expected": mean([math.exp(min(p, 0.0)) for p in logprobs]),
    }


def _share_of_equal_pairs(answers: Sequence[object]) -> float:
    """Of all pairs of ``answers``, two or more, the share that are the same."""
    n = len(answers)
    return sum(k * (k - 1) for k in Counter(answers).values()) / (n * (n - 1))
