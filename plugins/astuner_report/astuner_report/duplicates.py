"""Metrics for the sentinel: equal attempts at a task, rewards of equal attempts, and the entropy of sampled tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations

from astuner.contracts.statistics import mean
from astuner.contracts.types import Episode


def duplicates(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return how often attempts at a task are equal, and how often their log-probabilities predict it.

    Two independent draws from p are equal with probability sum p(x)², which is the mean of p(x) over draws. The share
    of equal pairs and the mean probability of an attempt therefore estimate the same number if the engine samples as it
    reports (and the environment does not vary, which makes the first smaller).

    :param episodes: episodes of complete groups; those without a reward or without model calls are ignored.
    """
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.reward is not None and episode.turns:
            groups.setdefault(episode.workflow_task.group_id, []).append(episode)
    several = [group for group in groups.values() if len(group) > 1]
    if not several:
        return {}
    same = [_share_of_equal_pairs([_tokens(e) for e in group]) for group in several]
    logprobs = [_logprob(e) for group in several for e in group]
    return {
        "duplicates/share": mean(same),
        "duplicates/expected": mean([math.exp(min(p, 0.0)) for p in logprobs]),
        "duplicates/reward_noise": mean([_noise(group) for group in several]),
        "duplicates/repeats": float(sum(len(group) - len(set(map(_tokens, group))) for group in several)),
        "duplicates/evidence": math.fsum(_evidence(group) for group in several),
    }


def sampled_entropy(episodes: Iterable[Episode], policies: Sequence[str] = ()) -> dict[str, float]:
    """Return the entropy per token of the sampling distribution, in nats: the mean of -log p over trainable tokens.

    The expectation of -log p(x) over x drawn from p is p's entropy by definition, and entropies of the tokens of a text
    add up (Cover and Thomas, Elements of Information Theory, theorem 2.5.1). No distribution has to be stored, and the
    value is known in steps without an update, too. p is the distribution at the temperature of the rollout.

    :param policies: policies that train, if the run distinguishes several; each gets its own metric.
    """
    turns = [t for e in episodes if e.reward is not None for t in e.turns if t.trained]
    found = {}
    for policy in policies or ("",):
        said = [t.generation.logprobs for t in turns if policy in ("", t.policy)]
        if tokens := sum(map(len, said)):
            name = f"policy/{policy}/rollout/entropy" if policy else "rollout/entropy"
            found[name] = -math.fsum(map(math.fsum, said)) / tokens
    return found


EXCESS = 0.5
"""Probability with which the alternative hypothesis of `_evidence` repeats an earlier attempt instead of sampling."""
_MAX_EVIDENCE = 50.0
"""Largest contribution of one attempt to `_evidence`, in nats; keeps a probability of 0 finite."""


def _evidence(group: Sequence[Episode]) -> float:
    """Return the log-likelihood ratio of copying to sampling for the repeated attempts of a group, in nats.

    Take the attempts in order. If they are independent draws, attempt k equals one of the earlier attempts with
    probability s, the sum of the probabilities of the distinct earlier attempts, known from their log-probabilities. An
    environment that varies makes it smaller. The alternative repeats with probability s + e (1 - s), e = `EXCESS`. The
    result is the sum of the log-likelihood ratios, so the exponential of its sum over groups and steps is a nonnegative
    supermartingale with expectation 1 or less under sampling (Wald 1945; Ville 1939).
    """
    total, seen, s = 0.0, set[object](), 0.0
    for episode in group:
        if (tokens := _tokens(episode)) in seen:
            total += min(math.log(s + EXCESS * (1 - s)) - math.log(s) if s else math.inf, _MAX_EVIDENCE)
            continue
        total += math.log(1 - EXCESS) if seen else 0.0
        seen.add(tokens)
        s = min(s + math.exp(min(_logprob(episode), 0.0)), 1.0)
    return total


def same_answer(episodes: Iterable[Episode]) -> dict[str, float]:
    """Return the share of validation tasks with the most common answer, token by token over all model calls.

    :param episodes: episodes of a validation; the first scored one of each task counts, if it called the model.
    """
    answers: dict[str, object] = {}
    for episode in episodes:
        if episode.reward is not None and episode.turns:
            answers.setdefault(episode.workflow_task.group_id, _tokens(episode))
    return {"val/same_answer": max(Counter(answers.values()).values()) / len(answers)} if answers else {}


def _tokens(episode: Episode) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(turn.generation.response_ids) for turn in episode.turns)


def _logprob(episode: Episode) -> float:
    return sum(sum(turn.generation.logprobs) for turn in episode.turns)


def _noise(group: Sequence[Episode]) -> float:
    """Return the mean squared reward difference over all pairs of attempts; pairs that differ count as 0.

    Two attempts are equal if their prompts and answers are equal. The group has two or more attempts.
    """
    alike: dict[object, list[Episode]] = {}
    for episode in group:
        alike.setdefault(_tokens(episode), []).append(episode)
    apart = [
        ((a.reward or 0.0) - (b.reward or 0.0)) ** 2
        for same in alike.values()
        for a, b in combinations(same, 2)
        if a.reward != b.reward and _prompts(a) == _prompts(b)  # prompts are long, so they are compared last
    ]
    return math.fsum(apart) / math.comb(len(group), 2)


def _prompts(episode: Episode) -> list[list[int]]:
    return [list(t.generation.prompt_ids) for t in episode.turns]


def _share_of_equal_pairs(answers: Sequence[object]) -> float:
    """Return the share of equal pairs among all pairs of ``answers`` (two or more)."""
    n = len(answers)
    return sum(k * (k - 1) for k in Counter(answers).values()) / (n * (n - 1))
