"""Random training samples with the shapes that matter: groups, turns, forks, tool results, shared prefixes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from astuner.config.schema import AlgorithmSection
from astuner.contracts.types import Sample
from astuner.rollout.credit import Scored, assign_credit

from ._tiny_models import VOCAB, reference_logprobs


def random_samples(
    model: Any = None,
    *,
    seed: int = 0,
    groups: int = 3,
    repeats: int = 3,
    temperature: float = 1.0,
    noise: float = 0.1,
    algorithm: AlgorithmSection | None = None,
    constant_length: int = 16,
) -> list[Sample]:
    """Episodes of two turns around a tool result; every third one forks into a second sample after its first turn.

    Recorded log-probabilities are the model's own at `temperature`, plus Gaussian noise (so that ratios are not 1);
    advantages and token weights are those of `assign_credit`.
    """
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]

    system = tokens(5, 5)
    scored = []
    for group in range(groups):
        prompt = system + tokens(2, 9)
        for attempt in range(repeats):
            episode = f"episode-{group}-{attempt}"
            reward = rng.random()
            first = tokens(1, 6)
            branches = []
            for branch in range(2 if attempt == 2 else 1):
                tool, last, rest = tokens(1, 4), tokens(1, 5), tokens(0, 3)
                ids = prompt + first + tool + last + rest
                trains_first = branch == 0  # a token is trained by one sample only
                mask = [0] * len(prompt) + [int(trains_first)] * len(first)
                mask += [0] * len(tool) + [1] * len(last) + [0] * len(rest)
                branches.append(
                    Sample(
                        episode_id=episode,
                        group_id=f"group-{group}",
                        agent="main",
                        input_ids=ids,
                        loss_mask=mask,
                        logprobs=_recorded(model, ids, mask, temperature, noise, rng),
                        policy_version=0,
                        reward=reward,
                    )
                )
            scored.append(Scored(episode_id=episode, group_id=f"group-{group}", reward=reward, samples=tuple(branches)))
    return assign_credit(scored, algorithm or AlgorithmSection(), constant_length=constant_length)


def _recorded(
    model: Any, ids: list[int], mask: list[int], temperature: float, noise: float, rng: random.Random
) -> list[float]:
    if model is None:
        return [rng.uniform(-5, -1) if trained else 0.0 for trained in mask]
    log_p = reference_logprobs(model, ids, temperature)
    return [float(log_p[t - 1, ids[t]]) + rng.gauss(0, noise) if trained else 0.0 for t, trained in enumerate(mask)]


def with_(samples: list[Sample], **changes: Any) -> list[Sample]:
    return [replace(sample, **changes) for sample in samples]
