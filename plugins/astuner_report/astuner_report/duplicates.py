"""Numbers of a step that the sentinel reads and nobody else measures: how alike the attempts at a task are, whether
equal ones are rewarded alike, and the entropy of what was sampled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations

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
    """The entropy per token that was sampled with, in nats: the mean of -log p over what may enter a loss mask.

    The expectation of -log p(x) over x drawn from p is p's entropy by definition, and entropies of the tokens of a text
    add up (Cover and Thomas, Elements of Information Theory, theorem 2.5.1); so no distribution has to be kept, and it
    is known in steps without an update, too.  p is what was sampled with, at the temperature of the rollout.

    :param policies: those that train, where the run tells several apart: each has a number of its own.
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
    """Return how much more likely the repeated attempts of a group are under copying than under sampling, in nats.

    Take the attempts in order. If they are independent draws, attempt k equals one of the earlier attempts with
    probability s, the sum of the probabilities of the distinct earlier attempts, which their log-probabilities give.
    An environment that varies makes it smaller. The alternative repeats with probability s + e (1 - s), e = `EXCESS`.
    The result is the sum of the log-likelihood ratios, so the exponential of its sum over groups and steps is a
    nonnegative supermartingale with expectation 1 or less under sampling (Wald 1945; Ville 1939).
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
    """Return the share of validation tasks that got the most common answer, token by token over all model calls.

    :param episodes: of a validation; the first scored one of each task counts, if the model was called in it.
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
    """The mean over all pairs of attempts, two or more, of how far their rewards are apart, squared; of those that are
    not the same, prompts included, 0."""
    alike: dict[object, list[Episode]] = {}
    for episode in group:
        alike.setdefault(_tokens(episode), []).append(episode)
    apart = [
        ((a.reward or 0.0) - (b.reward or 0.0)) ** 2
        for same in alike.values()
        for a, b in combinations(same, 2)
        if a.reward != b.reward and _prompts(a) == _prompts(b)  # prompts grow with every turn, so these come last
    ]
    return math.fsum(apart) / math.comb(len(group), 2)


def _prompts(episode: Episode) -> list[list[int]]:
    return [list(t.generation.prompt_ids) for t in episode.turns]


def _share_of_equal_pairs(answers: Sequence[object]) -> float:
    """Of all pairs of ``answers``, two or more, the share that are the same."""
    n = len(answers)
    return sum(k * (k - 1) for k in Counter(answers).values()) / (n * (n - 1))
