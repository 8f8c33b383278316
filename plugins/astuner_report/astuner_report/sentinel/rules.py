"""Rules about the learning signal, the engine, the policy and the episodes of a run.

Three principles apply to every rule. A rule that compares with earlier steps needs a baseline, and a missing baseline
is not 0. A rule that reads a share or a mean uses a test with a stated error rate, not a threshold on a few
observations. A rule that names a cause has evidence for it; otherwise its advice lists what to check.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from astuner_report.duplicates import EXCESS
from astuner_report.sentinel.rule import Rule, StepFacts, Verdict
from astuner_report.sentinel.statistics import (
    SIGNIFICANT,
    exact_tail,
    lower_bound,
    normal_tail,
    percent,
    trend,
    two_proportions,
)

__all__ = ["FIRST", "Lasting", "normal_tail", "trend", "two_proportions"]

PATIENCE = 5
"""Consecutive steps for which a state must last if it is normal from time to time, especially in small batches."""
SOLVED = 0.9
"""Success rate from which on a low entropy is expected."""
WARM_UP = 10
"""Number of first steps that form the baseline of a run."""


_EQUAL = 1e-9
"""Rewards closer than this are equal: the rounding of a sum."""


_WORDS: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8")
)


EXPLAINS: Mapping[str, Collection[str]] = {name: words.get("explains", ()) for name, words in _WORDS.items()}
"""Rule, or alarm about the tasks before the first step -> the rules whose alarms follow from it."""


class Told(Rule):
    """A rule with its advice, severity and scope in ``rules.yaml``, which skips rows without its required metrics."""

    needs: tuple[str, ...] = ()
    """Metrics that the rule requires, of the monitored policy."""
    judge: Callable[..., str | None]
    """Return a message if something is wrong, from the step's facts and the required metrics."""

    def __init_subclass__(cls) -> None:
        for name, value in _WORDS.get(getattr(cls, "name", ""), {}).items():  # a user's rule may extend a built-in one
            setattr(cls, name, value)

    def see(self, facts: StepFacts) -> Verdict:
        numbers = [facts.own(name) for name in self.needs]
        return None if None in numbers else self.judge(facts, *numbers) or ""


class Lasting:
    """Counts the consecutive steps in which a condition is true."""

    def __init__(self, patience: int = PATIENCE, *, least: float = 0) -> None:
        """Create a counter that starts at 0.

        :param least: number of observations that these steps must contain together.
        """
        self._patience, self._least = patience, least
        self.steps, self.observed = 0, 0.0

    def __call__(self, is_so: bool, observed: float = 0) -> bool:
        """Count a step and return whether the condition has been true for long enough.

        :param observed: number of observations in the step.
        """
        self.steps, self.observed = (self.steps + 1, self.observed + observed) if is_so else (0, 0.0)
        return self.steps >= self._patience and self.observed >= self._least


class Pooled:
    """Sums over as many of the latest steps as are needed for enough observations."""

    def __init__(self, least: float, *, steps: int = PATIENCE, most: int = 60) -> None:
        """Create an empty pool.

        :param least: number of observations that the steps must contain together.
        :param steps: minimum number of steps.
        :param most: maximum number of steps.
        """
        self._least, self._steps = least, steps
        self._rows: deque[tuple[float, ...]] = deque(maxlen=most)

    def __call__(self, observed: float, *amounts: float) -> tuple[float, ...] | None:
        """Add a step.

        :returns: observations and amounts, summed over these steps; None while there are too few.
        """
        self._rows.append((observed, *amounts))
        totals = [0.0] * (1 + len(amounts))
        for count, row in enumerate(reversed(self._rows), 1):
            totals = [total + value for total, value in zip(totals, row, strict=True)]
            if totals[0] >= self._least and count >= self._steps:
                return tuple(totals)
        return None


DEFAULT_GROUP = 8
"""Default of `rollout.num_repeat`."""


def groups_of(facts: StepFacts) -> float:
    """Return the number of groups of a step; in rows of older runs, derive it from the default group size."""
    groups = facts.get("rollout/groups")
    return groups if groups is not None else max(1.0, (facts.get("rollout/episodes") or 0.0) / DEFAULT_GROUP)


class Start:
    """The median of a run's first values."""

    def __init__(self, n: int = WARM_UP) -> None:
        self._n = n
        self._values: list[float] = []
        self.value: float | None = None

    def __call__(self, value: float) -> float | None:
        """Add a value and return the baseline, or None while it is being measured (this value included)."""
        if self.value is None:
            self._values.append(value)
            if len(self._values) == self._n:
                self.value = median(self._values)
            return None
        return self.value


def last(n: int) -> deque[float]:
    """Return an empty queue for the last ``n`` values."""
    return deque(maxlen=n)


class ZeroVariance(Told):
    """All rewards are equal for five consecutive steps with 40 episodes or more.

    Equal rewards give advantages of 0, so nothing is learned (Shao et al. 2024, equation of GRPO; TRL logs this as
    ``frac_reward_zero_std``). A single such step is normal in a batch of a few groups. If every episode succeeded, the
    tasks are solved and no alarm is raised; the step's console line reports it.

    Error rate: if a fifth of the episodes gets another reward, 40 in a row are equal with probability 0.8^40 = 0.01 %.
    """

    name = "zero_variance"
    needs = ("adv/reward_min", "adv/reward_max")
    EPISODES = 40

    def __init__(self) -> None:
        self._lasts = Lasting(least=self.EPISODES)

    def judge(self, facts: StepFacts, low: float, high: float) -> str | None:
        episodes = facts.get("rollout/episodes")
        is_equal = high - low <= _EQUAL and facts.get("success/mean") != 1
        if not self._lasts(is_equal, math.inf if episodes is None else episodes):
            return None
        success = facts.get("success/mean")
        unsolved = f" and success is {percent(success)}" if high >= 1 - _EQUAL and success is not None else ""
        what = f"All rewards{facts.who} of the last {self._lasts.steps} steps are {high:g}{unsolved}"
        return f"{what}, so the policy gets no learning signal"


class NothingToLearn(Told):
    """Too few groups have a learning signal.

    The rule fires when more than three quarters of the groups have equal rewards and are not solved; when all groups
    have equal rewards while success is below 90 %; or when no agent of the policy generated a trainable token for five
    steps.

    Groups with equal rewards cost tokens and teach nothing (DAPO, Yu et al. 2025, section 3.2, resamples instead). The
    success rate bounds the share of solved groups, so the share of unsolved groups without a signal is at least the
    share of groups without a signal minus success. The shares are pooled over the latest 160 groups from 10 to 60
    steps, so a single step with a signal does not reset them; if all rewards are equal, over 40 groups from five steps.
    The rule is silent where `zero_variance` applies.

    Error rate: Wilson's lower bound of the share (one-sided 0.1 %) has to be above 75 %. If a sixth of the groups has a
    signal, 40 in a row have none in 0.07 % of the cases.
    """

    name = "nothing_to_learn"
    needs = ("adv/zero_frac",)
    SHARE = 0.75
    GROUPS, ALL_EQUAL = 160, 40

    def __init__(self) -> None:
        self._speechless = Lasting()
        self._all, self._most = Pooled(self.ALL_EQUAL), Pooled(self.GROUPS, steps=2 * PATIENCE)

    def judge(self, facts: StepFacts, zero: float) -> str | None:
        low, high = facts.own("adv/reward_min"), facts.own("adv/reward_max")
        if self._speechless(zero == 1 and high is None):
            who = f"No agent of the policy {facts.policy}" if facts.policy else "No agent"
            return f"{who} generated a trainable token in the last {self._speechless.steps} steps"
        groups, equal = groups_of(facts), facts.get("adv/zero_group_frac")
        share = zero if zero == 1 or equal is None else min(zero, equal)
        solved = facts.get("success/mean") or 0.0
        sums = (groups, share * groups, solved * groups, max(share - solved, 0.0) * groups)
        every, most = self._all(*sums), self._most(*sums)
        if low is not None and high is not None and high - low <= _EQUAL:
            return None  # `zero_variance` reports it
        if every and math.isclose(every[0], every[1]) and every[2] < SOLVED * every[0]:
            return (
                f"All advantages{facts.who} of the last {every[0]:.0f} groups are 0, because rewards within each group "
                "are equal, so the policy learns nothing"
            )
        if most and lower_bound(most[3], most[0]) > self.SHARE:
            return (
                f"{percent(most[1] / most[0])} of the latest groups have equal rewards{facts.who} and success is "
                f"{percent(most[2] / most[0])}, so most generated tokens teach nothing"
            )
        return None


class EmptyMasks(Told):
    """Scored episodes contain no trained token: immediately if this affects all, after five steps if it affects half.

    The loss is then a sum over nothing. This happens when an agent does not call the model that it was given, when
    clients disconnect before the reply arrives, or when all agents that generate have ``train: false``.

    Error rate: all generated tokens of a step are counted, so the first condition is exact. The second is pooled over
    40 episodes; a true share of a quarter triggers it in 0.02 % of the cases.
    """

    name = "empty_masks"
    needs = ("merge/untrained_rollout_frac", "tokens/trainable")
    SHARE, EPISODES = 0.5, 40

    def __init__(self) -> None:
        self._recent = Pooled(self.EPISODES)

    def judge(self, facts: StepFacts, share: float, tokens: float) -> str | None:
        generated = facts.get("tokens/generated") or 0.0
        episodes = facts.get("rollout/episodes") or float(self.EPISODES)
        pooled = self._recent(episodes, share * episodes)
        if tokens == 0 and share == 1 and generated:
            return f"None of {generated:,.0f} generated tokens is in a loss mask, so nothing can be trained"
        if pooled is not None and pooled[1] >= self.SHARE * pooled[0]:
            return (
                f"{pooled[1]:.0f} of the last {pooled[0]:.0f} scored episodes are not trained on, because none of "
                "their tokens is in a loss mask"
            )
        return None


class StaleWeights(Told):
    """The generating weights are older than the backbone allows, or do not advance although the model trains.

    A backbone states its bound (0 if rollouts and training alternate). Without a bound, new weights are overdue after
    three times the longest interval so far, and at least ten steps. `logprob_drift` detects an engine that reports new
    weights but serves old ones.
    """

    name = "stale_weights"
    needs = ("policy_version", "staleness/max")  # missing if the engine does not report versions
    OVERDUE = 10

    def __init__(self) -> None:
        self._newest = -1.0
        self._since = 0
        self._longest = 1

    def judge(self, facts: StepFacts, newest: float, oldest: float) -> str | None:
        if facts.max_staleness is not None and oldest > facts.max_staleness:
            return (
                f"The engine generated with weights that are {oldest:.0f} updates older than the trained ones, but "
                f"this backbone allows at most {facts.max_staleness}"
            )
        if facts.get("nothing_learnable") == 1:
            return None  # the weights did not change, so no new version is due
        if newest > self._newest:
            self._longest = max(self._longest, self._since) if self._newest >= 0 else 1
            self._newest, self._since = newest, 1
            return None
        self._since += 1
        if self._since > max(self.OVERDUE, 3 * self._longest):
            return (
                f"The engine has generated with weights of version {newest:.0f} or older for {self._since} steps, "
                f"although training continues (before: at most {self._longest} steps between versions)"
            )
        return None


class LogprobDrift(Told):
    """Rollout and trainer disagree about the log-probabilities of the same tokens.

    The rule fires when they differ by 0.1 nats on average for three steps, by ten times as much as at the start of the
    run (and at least 0.01), or by 10 nats for some token in five steps.

    Rule of thumb: training is stable while the KL divergence between them is below 0.01 (Thinking Machines, Tinker
    documentation, "RL hyperparameters"). With d = log p - log q on sampled tokens, KL is about E[d²] / 2 (Schulman
    2020, k2), at least (E|d|)² / 2, and (E|d|)² if d has an exponential distribution; a ``kl/mismatch_mean`` of 0.1
    therefore corresponds to a KL of about 0.01. In float32 it stays below 1e-5; a difference in probability of 0.003 is
    normal in bfloat16 and 0.012 with fp8 rollouts. A token that is off by 10 nats is impossible for one side (ratio
    22,000): once may be rounding of a rare token, in each of five steps is not.

    If weights may be old, their age contributes to the difference, so only its growth counts in such steps.
    """

    name = "logprob_drift"
    needs = ("kl/mismatch_mean",)
    MEAN, GROWTH, FLOOR, MOST = 0.1, 10.0, 0.01, 10.0
    STEPS = 3

    def __init__(self) -> None:
        self._start = Start()
        self._far, self._grown, self._max = Lasting(self.STEPS), Lasting(self.STEPS), Lasting()

    def see(self, facts: StepFacts) -> Verdict:
        if facts.is_broken("kl/mismatch_mean"):
            return "The difference between the log-probabilities of rollout and trainer is not a finite number"
        return super().see(facts)

    def judge(self, facts: StepFacts, mean: float) -> str | None:
        most, fresh = facts.own("kl/mismatch_max"), not facts.get("staleness/max")
        start = self._start(mean)
        far = self._far(fresh and mean >= self.MEAN)
        grown = self._grown(start is not None and mean >= max(self.FLOOR, self.GROWTH * start))
        impossible = self._max(fresh and (most or 0.0) >= self.MOST)
        said = f"Log-probabilities of rollout and trainer{facts.who} differ by {mean:.3g} on average"
        if far:
            reason = f"{self.MEAN:g} or more for {self._far.steps} steps (a KL of about {mean * mean:.2g})"
        elif grown and start is not None:
            reason = f"compared with {start:.2g} at the start of the run"
        elif impossible:
            reason = f"by up to {most:.3g} for one token ({self.MOST:g} or more for {self._max.steps} steps)"
        else:
            return None
        return f"{said}, {reason}, so updates use wrong probabilities"


class OfEntropy(Told):
    """A rule about the entropy per token.

    It reads the entropy of sampled tokens (``rollout/entropy``), which is also known in steps with equal rewards; in
    rows of older runs, that of trained tokens (``entropy``).
    """

    NAMES = ("rollout/entropy", "entropy")

    def see(self, facts: StepFacts) -> Verdict:
        name = next((name for name in self.NAMES if facts.own(name) is not None), "")
        entropy, tokens = facts.own(name), facts.get("tokens/generated")
        return None if entropy is None else self.judge(facts, name, entropy, math.inf if tokens is None else tokens)


class EntropyCollapse(OfEntropy):
    """The entropy is a tenth of the baseline, or below 0.002 nats, while success is below 90 %.

    It has to last for five steps and 1,000 tokens. Without entropy the policy explores nothing, and the remaining
    entropy bounds the reward (Cui et al. 2025, "The entropy mechanism", R = -a e^H + b; DAPO's clip-higher is a
    remedy). A policy that solves its tasks has a low entropy, and a small model on narrow tasks starts at 0.1 nats, so
    the comparison is with the run's own baseline. At the absolute bound, 500 tokens contain one choice between two.

    Error rate: if one token in 20 is a choice, 1,000 tokens contain 50 of them; the probability that an unchanged
    policy makes a tenth of that is below 1e-15 (Poisson).
    """

    name = "entropy_collapse"
    SHARE, LEAST, TOKENS = 0.1, 0.002, 1000

    def __init__(self) -> None:
        self._starts = {name: Start() for name in self.NAMES}
        self._low, self._success = Lasting(least=self.TOKENS), last(PATIENCE)

    def judge(self, facts: StepFacts, name: str, entropy: float, tokens: float) -> str | None:
        if (success := facts.get("success/mean")) is not None:
            self._success.append(success)
        start = self._starts[name](entropy)
        low = self._low(entropy < self.LEAST or (start is not None and entropy < self.SHARE * start), tokens)
        mean = fmean(self._success) if self._success else 0.0
        if not low or mean >= SOLVED:
            return None
        was = f"from {start:.3g} at the start" if start is not None else "since the start"
        return (
            f"Entropy{facts.who} is {entropy:.3g} nats for {self._low.steps} steps ({was}) while success is "
            f"{percent(mean)}, so the policy hardly explores"
        )


class EntropyExplosion(OfEntropy):
    """The entropy is 1 nat above the first step, and 1.5 times as high, for five steps and 500 tokens.

    The first step is sampled from the weights before any update. One more nat means that the policy chooses among e
    times as many tokens; reinforcement learning lowers entropy, or raises it by a fraction of that. Greedy answers can
    look correct meanwhile, because the most probable token hides the rest of the distribution.

    Error rate: the standard deviation of -log p of a token is about its mean, at most 3 nats in practice, so the mean
    of 500 tokens is off by 0.13 nats; the margin is seven times as large and has to be exceeded in five steps.
    """

    name = "entropy_explosion"
    MORE, FACTOR, TOKENS = 1.0, 1.5, 500

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._high = Lasting(least=self.TOKENS)

    def judge(self, facts: StepFacts, name: str, entropy: float, tokens: float) -> str | None:
        first = self._first.setdefault(name, entropy)
        if not self._high(entropy >= max(first + self.MORE, self.FACTOR * first), tokens):
            return None
        return (
            f"Entropy{facts.who} rose from {first:.3g} nats in the first step to {entropy:.3g} "
            f"({self._high.steps} consecutive steps), so the policy drifts towards random text"
        )


class DuplicateAnswers(Told):
    """Attempts at a task are equal far more often than their log-probabilities predict, or nearly always.

    An engine whose samples repeat more often than independent draws does not sample as it reports: one seed for all
    episodes, cached answers, or another temperature. ``duplicates/evidence`` is the log-likelihood ratio of copying to
    sampling (`astuner_report.duplicates`); its cumulative sum, reset at 0 (CUSUM, Page 1954), has to reach log 100,000.
    If attempts repeat as predicted and 90 % of the pairs of the latest 80 groups (from at least five steps) are equal
    while success is below 90 %, the engine is correct and the policy always gives the same answer.

    Error rate: an engine that samples as reported reaches the bound within n steps with probability n / 100,000 at
    most, for any batch size (the likelihood ratios of all starting steps sum to n in expectation; Doob's inequality).
    For the policy, Wilson's lower bound (one-sided 0.1 %) has to be above 75 %. For rows without
    ``duplicates/evidence`` it is estimated from the mean shares, counting a group as one comparison.
    """

    name = "duplicate_answers"
    needs = ("duplicates/share", "duplicates/expected")
    EVIDENCE = math.log(100_000)
    NEARLY_ALL, LEAST, GROUPS = 0.9, 0.75, 80

    def __init__(self) -> None:
        self._sum = 0.0
        self._shares = deque[tuple[float, float]](maxlen=2 * PATIENCE)
        self._recent = Pooled(self.GROUPS)

    def judge(self, facts: StepFacts, share: float, expected: float) -> str | None:
        if (facts.get("kl/mismatch_mean") or 0.0) >= LogprobDrift.MEAN:
            return None  # the log-probabilities do not describe the sampling distribution
        evidence = facts.get("duplicates/evidence")
        step = copying_evidence(share, expected, groups_of(facts)) if evidence is None else evidence
        self._sum = min(max(self._sum + step, 0.0), 2 * self.EVIDENCE)
        self._shares.append((share, expected))
        groups, success = groups_of(facts), facts.get("success/mean") or 0.0
        pooled = self._recent(groups, share * groups, success * groups)
        if self._sum >= self.EVIDENCE:
            mean, usual = (fmean(values) for values in zip(*self._shares, strict=True))
            return (
                f"{percent(mean)} of the pairs of attempts at a task are equal, token by token (mean of "
                f"{len(self._shares)} steps), but their log-probabilities predict {percent(usual)}, so the engine does "
                "not sample independently"
            )
        return self._always_the_same(*pooled) if pooled else None

    def _always_the_same(self, groups: float, same: float, solved: float) -> str | None:
        is_sure = same >= self.NEARLY_ALL * groups and lower_bound(same, groups) > self.LEAST
        if not is_sure or solved >= SOLVED * groups:
            return None
        return (
            f"{percent(same / groups)} of the pairs of attempts at a task are equal, token by token (last {groups:.0f} "
            f"groups, as their log-probabilities predict), while success is {percent(solved / groups)}"
        )


def copying_evidence(share: float, expected: float, comparisons: float) -> float:
    """Return an estimate of ``duplicates/evidence`` from the mean shares of a step."""
    usual = min(max(expected, 1e-6), 1 - 1e-6)
    copied = math.log((usual + EXCESS * (1 - usual)) / usual)
    return comparisons * (share * copied + (1 - share) * math.log(1 - EXCESS))


class LengthExplosion(Told):
    """Answers are twice as long as at the start while the reward does not rise, or three times as long as 20 steps ago.

    The first has to last for five steps, the second for three. Answers that grow with the reward are how models learn
    to reason; answers that grow without it are the bias of losses that divide by length (Liu et al. 2025, Dr. GRPO), or
    a broken policy.

    Error rate: each of these steps also has to exceed the longest of the ten (or 20) steps that it is compared with.
    Without a change, five exceed ten others by chance in 1 of 3,003 cases, three exceed 20 in 1 of 1,771. The reward
    counts as not rising only after 20 steps, if its trend is not even suggestive (z below 1).
    """

    name = "length_explosion"
    needs = ("response_length/mean", "reward/mean")
    GROWN, SUDDEN, STEPS, AGO = 2.0, 3.0, 3, 20
    FLAT = 1.0

    def __init__(self) -> None:
        self._start, self._longest = Start(), 0.0
        self._recent, self._rewards = last(self.AGO), last(3 * self.AGO)
        self._long, self._sudden = Lasting(), Lasting(self.STEPS)

    def judge(self, facts: StepFacts, length: float, reward: float) -> str | None:
        start = self._start(length)
        self._longest = max(self._longest, length) if start is None else self._longest
        before = median(self._recent) if len(self._recent) >= self.AGO // 2 else None
        self._rewards.append(reward)
        flat = len(self._rewards) >= self.AGO and trend(self._rewards) < self.FLAT
        long = self._long(start is not None and length > max(self.GROWN * start, self._longest))
        sudden = self._sudden(before is not None and length > max(self.SUDDEN * before, *self._recent))
        if not self._sudden.steps:
            self._recent.append(length)  # otherwise an explosion would become its own baseline
        if sudden and before is not None:
            return (
                f"Answers grew from {before:,.0f} tokens (median of the steps before) to {length:,.0f}, a sign of "
                "rambling or repetition"
            )
        if long and flat and start is not None:
            return f"Answers grew from {start:,.0f} tokens at the start to {length:,.0f}, but the reward does not rise"
        return None


class CutOff(Told):
    """A limit truncates more than a fifth of the model calls, or ends more than a fifth of the episodes.

    Truncated answers cannot be judged fairly, and a limit that is too small teaches the policy that it cannot succeed
    (DAPO, section 3.4, "overlong reward shaping").

    Error rate: pooled over the latest 40 or 200 episodes (one step, if it has as many). Wilson's lower bound (one-sided
    0.1 %) has to be above 10 %.
    """

    name = "cut_off"
    SHARE, LEAST, EPISODES = 0.2, 0.1, (40, 200)
    PREFIX = "limits/"

    def __init__(self) -> None:
        self._recent: dict[str, list[Pooled]] = {}

    def judge(self, facts: StepFacts) -> str | None:
        met = {name: facts.get(name) or 0.0 for name in facts.row if name.startswith(self.PREFIX)}
        for name in met:
            self._recent.setdefault(name, [Pooled(least, steps=1) for least in self.EPISODES])
        episodes = facts.get("rollout/episodes") or float(self.EPISODES[0])
        shares: dict[str, float] = {}
        for name, recent in self._recent.items():
            pooled = [pool(episodes, met.get(name, 0.0) * episodes) for pool in recent]
            sure = [cut / n for n, cut in filter(None, pooled) if self._is_sure(n, cut)]
            shares |= {name: max(sure)} if sure else {}
        if not (worst := max(shares, key=lambda name: shares[name], default="")):
            return None
        key = worst.removeprefix(self.PREFIX)
        where = "the model's context or the agent's max_tokens" if key == "other" else f"astuner.{key}"
        return (
            f"{percent(shares[worst])} of the model calls or episodes end at a limit ({where}), so their answers are "
            "not judged fairly"
        )

    def _is_sure(self, episodes: float, cut: float) -> bool:
        return cut > self.SHARE * episodes and lower_bound(cut, episodes) > self.LEAST


class BadGradients(Told):
    """A gradient or loss is not finite, or four of five gradient norms are ten times their median.

    A single spike is normal and clipped (`optim.grad_clip`); a series precedes a divergence (Chowdhery et al. 2022,
    PaLM, section 5.1; Molybog et al. 2023). A step that is not finite is skipped and changes no weights. Only steps
    with a reward signal count: without one, the gradient is that of the KL or entropy term alone and much smaller. A
    norm below `optim.grad_clip` is never a spike.

    Error rate: a spike also exceeds all of the 20 to 40 norms before it. Without a change, four of five exceed 20
    others by chance in 5 of 10,626 cases, 40 others in 5 of 135,751.
    """

    name = "bad_gradients"
    SPIKE, OF, SPIKES, WINDOW, LEAST = 10.0, 5, 4, 40, 20

    def __init__(self) -> None:
        self._norms = last(self.WINDOW)
        self._spikes = last(self.OF)
        self._had_norm = False

    def see(self, facts: StepFacts) -> Verdict:
        norm, skipped = facts.own("grad_norm"), facts.own("skipped_steps") or 0.0
        missing = norm is None and self._had_norm and facts.own("lr") is not None
        if skipped or missing or facts.is_broken("grad_norm") or facts.is_broken("loss"):
            how = f"{skipped:.0f} optimizer steps{facts.who} were" if skipped else f"The update{facts.who} was"
            return f"{how} skipped, because the loss or its gradient was not finite"
        if norm is None:
            return None
        self._had_norm = True
        return None if facts.own("adv/zero_frac") == 1 else self._look(facts, norm)

    def _look(self, facts: StepFacts, norm: float) -> str:
        usual = median(self._norms) if len(self._norms) >= self.LEAST else math.inf
        is_spike = norm > max(self.SPIKE * usual, facts.grad_clip, *self._norms, 0.0)
        self._spikes.append(float(is_spike))
        if not is_spike:
            self._norms.append(norm)
        if not is_spike or sum(self._spikes) < self.SPIKES:
            return ""
        return (
            f"The gradient norm{facts.who} is {norm:.3g}, at least {self.SPIKE:g} times its median ({usual:.3g}) in "
            f"{sum(self._spikes):.0f} of the last {self.OF} steps with a reward signal, so training may diverge"
        )


USUAL_KL, USUAL_ENTROPY = 0.1, 0.02
"""Coefficients of the two terms up to which a dominating term has another cause, such as updates that are too large."""


def term_sizes(facts: StepFacts) -> tuple[float, float, float] | None:
    """Return the gradient sizes of the KL term, the entropy term and the policy loss of a step, to compare them.

    A term counts only if its coefficient is above the usual range, because a policy that moved far has a large KL
    gradient with a small coefficient, too. The coefficients follow from the row: loss = policy loss + β KL - c H. The
    policy loss is scaled as if all samples had an advantage, so that the comparison is of the coefficients, not of the
    number of groups with a signal. In rows of older runs, the values of the two terms and the entropy replace the
    gradients, which they bound (`astuner_objectives.step.logit_gradients`).

    :returns: None for a step without a reward signal or without the metrics.
    """
    names = ("adv/zero_frac", "loss", "pg_loss", "entropy")
    zero, loss, policy_loss, spread = (facts.own(name) for name in names)
    if zero is None or loss is None or policy_loss is None or spread is None or zero >= 1:
        return None
    added, distance = loss - policy_loss, facts.own("kl/ref") or 0.0
    entropy = facts.own("logit_grad/entropy")
    entropy = max(-added, 0.0) if entropy is None else entropy
    kl = max(added - entropy, 0.0)
    is_kl = kl > USUAL_KL * distance > 0
    is_entropy = entropy > USUAL_ENTROPY * spread > 0
    kl_size = facts.own("logit_grad/kl")
    policy = facts.own("logit_grad/policy")
    return (
        (kl if kl_size is None else kl_size) * is_kl,
        entropy * is_entropy,
        spread if policy is None else policy / (1 - zero),
    )


class RegularizerDominates(Told):
    """The gradient of the KL or entropy term is larger than the policy gradient, and the reward does not rise.

    The coefficient of the term also has to be above the usual range. The gradients of the terms with respect to the
    logits are summed over the latest steps with a reward signal, at least five and 500 trained tokens (`logit_grad/…`).
    Usual coefficients give a few percent. Consequences, such as large gradients, rising entropy or a broken policy, are
    then due to the coefficient. The rule is silent while the reward has a rising trend (one-sided 1 %) or success is 90
    %, where little is left to learn.

    Error rate: no sampling error. The sizes are sums over all tokens of these steps, and the coefficients are taken
    from the run.
    """

    name = "regularizer_dominates"
    SHARE, TOKENS, WINDOW = 0.5, 500, 40

    def __init__(self) -> None:
        self._recent = Pooled(self.TOKENS)
        self._rewards = last(self.WINDOW)

    def see(self, facts: StepFacts) -> Verdict:
        if (reward := facts.get("reward/mean")) is not None:
            self._rewards.append(reward)
        if (sizes := term_sizes(facts)) is None:
            return None
        tokens = facts.own("tokens/trained")
        if (pooled := self._recent(self.TOKENS if tokens is None else tokens, *sizes)) is None:
            return None
        _, kl, entropy, policy = pooled
        if kl + entropy <= self.SHARE * (kl + entropy + policy):
            return ""
        if trend(self._rewards) > SIGNIFICANT or (facts.get("success/mean") or 0.0) >= SOLVED:
            return ""
        term, key = ("KL", "kl_loss_coef") if kl > entropy else ("entropy", "entropy_coeff")
        times = max(kl, entropy) / policy if policy else math.inf
        return (
            f"The gradient of the {term} term{facts.who} is {times:.3g} times as large as the gradient of the policy "
            f"loss, so trainer_common.{key} determines what is learned instead of the reward"
        )


class FailuresRising(Told):
    """More episodes fail than at the start of the run, or more than a tenth of all have failed from the start.

    The first needs 5 % of the episodes of five steps, beyond chance. Failed episodes are missing rather than rewarded
    with 0; if failures have a systematic cause, the remaining episodes are a biased sample. `rollout.max_failed_share`
    ends a run much later.

    Error rate: Fisher's exact test at 0.1 % against the first ten steps; for the start, Wilson's lower bound (one-sided
    0.1 %) over the first ten steps has to be above 10 %.
    """

    name = "failures_rising"
    needs = ("rollout/errored_frac", "rollout/episodes")
    SHARE, P, STEPS, START = 0.05, 0.001, 5, 10
    AT_START = 0.1

    def __init__(self) -> None:
        self._failed, self._episodes = last(self.STEPS), last(self.STEPS)
        self._start = (0.0, 0.0)
        self._seen = 0

    def judge(self, facts: StepFacts, share: float, episodes: float) -> str | None:
        if not episodes:
            return None
        self._seen += 1
        if self._seen <= self.START:
            self._start = (self._start[0] + share * episodes, self._start[1] + episodes)
        self._failed.append(share * episodes)
        self._episodes.append(episodes)
        if self._seen < self.START:
            return None
        failed, tried = sum(self._failed), sum(self._episodes)
        enough = self._seen >= self.START + self.STEPS and failed >= self.SHARE * tried
        if enough and exact_tail(self._start, (failed, tried)) < self.P:
            return (
                f"{failed:.0f} of {tried:.0f} episodes of the last {self.STEPS} steps failed "
                f"({percent(failed / tried)}), compared with {percent(self._start[0] / self._start[1], 1)} in the "
                f"first {self.START} steps, so the remaining episodes are a biased sample"
            )
        if failed >= self.AT_START * tried and lower_bound(*self._start) > self.AT_START:
            return (
                f"{self._start[0]:.0f} of {self._start[1]:.0f} episodes of the first {self.START} steps failed "
                f"({percent(self._start[0] / self._start[1])}), and {percent(failed / tried)} in the last {self.STEPS} "
                "steps, so the remaining episodes are a biased sample"
            )
        return None


FIRST: tuple[type[Rule], ...] = (
    ZeroVariance, NothingToLearn, EmptyMasks, StaleWeights, LogprobDrift, EntropyCollapse, EntropyExplosion,
    DuplicateAnswers, LengthExplosion, CutOff, BadGradients, RegularizerDominates, FailuresRising,
)  # fmt: skip
"""The rules of this module, in the order of evaluation."""
