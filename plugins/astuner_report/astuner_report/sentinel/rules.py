"""The rules: is there anything to learn from, does the engine serve what is trained, what becomes of the policy and
of the run.

Three principles hold for every rule. A rule that compares with earlier steps needs a baseline, and a missing baseline
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
    trend,
    two_proportions,
)

__all__ = ["FIRST", "Lasting", "normal_tail", "trend", "two_proportions"]

PATIENCE = 5
"""Steps in a row for which a state must last that is ordinary now and then, in small batches most of all."""
SOLVED = 0.9
"""Success above which a policy may well be sure of itself."""
WARM_UP = 10
"""Steps that a run's own start is taken from, for a rule that compares with it."""


_EQUAL = 1e-9
"""Rewards closer than this are equal: the rounding of a sum."""


_WORDS: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8")
)


EXPLAINS: Mapping[str, Collection[str]] = {name: words.get("explains", ()) for name, words in _WORDS.items()}
"""Rule, or what is said of the tasks before the first step -> the rules whose complaints follow from it."""


class Told(Rule):
    """A rule whose advice, severity and reach stand in ``rules.yaml``, and that says nothing of rows without its
    numbers."""

    needs: tuple[str, ...] = ()
    """The metrics that it cannot do without; of the policy that is looked at."""
    judge: Callable[..., str | None]
    """What is wrong, if anything is, of the facts and the numbers that it needs."""

    def __init_subclass__(cls) -> None:
        for name, value in _WORDS.get(getattr(cls, "name", ""), {}).items():  # one of somebody else may be made of ours
            setattr(cls, name, value)

    def see(self, facts: StepFacts) -> Verdict:
        numbers = [facts.own(name) for name in self.needs]
        return None if None in numbers else self.judge(facts, *numbers) or ""


class Lasting:
    """For how many steps in a row something has been so."""

    def __init__(self, patience: int = PATIENCE, *, least: float = 0) -> None:
        """:param least: observations that these steps must have together."""
        self._patience, self._least = patience, least
        self.steps, self.observed = 0, 0.0

    def __call__(self, is_so: bool, observed: float = 0) -> bool:
        """Count a step; whether it has been so for long enough.

        :param observed: observations of the step.
        """
        self.steps, self.observed = (self.steps + 1, self.observed + observed) if is_so else (0, 0.0)
        return self.steps >= self._patience and self.observed >= self._least


class Pooled:
    """Sums over the latest steps, as many as are needed for enough observations."""

    def __init__(self, least: float, *, steps: int = PATIENCE, most: int = 60) -> None:
        """:param least: observations that the steps must have together.
        :param steps: steps at least; :param most: steps at most.
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
    """Return the number of groups of a step; in a row of an older run, as if groups had the default size."""
    groups = facts.get("rollout/groups")
    return groups if groups is not None else max(1.0, (facts.get("rollout/episodes") or 0.0) / DEFAULT_GROUP)


class Start:
    """The median of a run's first values, once there are enough of them."""

    def __init__(self, n: int = WARM_UP) -> None:
        self._n = n
        self._values: list[float] = []
        self.value: float | None = None

    def __call__(self, value: float) -> float | None:
        """Take one more value in; the start, or None while it is being measured, this value included."""
        if self.value is None:
            self._values.append(value)
            if len(self._values) == self._n:
                self.value = median(self._values)
            return None
        return self.value


def last(n: int) -> deque[float]:
    """The last ``n`` values."""
    return deque(maxlen=n)


class ZeroVariance(Told):
    """Every reward of a step is the same, five steps in a row, of 40 episodes or more.

    A comparison of equal rewards gives advantages of 0, so nothing is learned (Shao et al. 2024, equation of GRPO; TRL
    logs it as ``frac_reward_zero_std``).  One such step is ordinary in a batch of a few groups.  Where every episode
    succeeded the tasks are solved, which is no fault: the step's line on the console says so.

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
        unsolved = f", and success is {success:.0%}" if high >= 1 - _EQUAL and success is not None else ""
        return f"all rewards{facts.who} of the last {self._lasts.steps} steps are {high:g}{unsolved}"


class NothingToLearn(Told):
    """More than three quarters of the groups have equal rewards and are not solved; or all of them have, while success
    is below 90 %; or no agent that speaks with the policy said anything that can be trained on, for five steps.

    Such groups cost tokens and teach nothing (DAPO, Yu et al. 2025, section 3.2, draws again instead).  Solved groups
    are at most as many as success says, so the share of unsolved groups without a signal is at least the share of
    groups without one, less success.  Pooled over the latest 160 groups, of ten steps at least and 60 at most, so that
    a step with a signal now and then hides nothing; or over 40 groups of five steps, if all have equal rewards.  Where
    `zero_variance` explains it, this rule is silent.

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
            who = f"no agent that speaks with the policy {facts.policy} has" if facts.policy else "no agent has"
            return f"in the last {self._speechless.steps} steps {who} said anything that can be trained on"
        groups, equal = groups_of(facts), facts.get("adv/zero_group_frac")
        share = zero if zero == 1 or equal is None else min(zero, equal)
        solved = facts.get("success/mean") or 0.0
        sums = (groups, share * groups, solved * groups, max(share - solved, 0.0) * groups)
        every, most = self._all(*sums), self._most(*sums)
        if low is not None and high is not None and high - low <= _EQUAL:
            return None  # `zero_variance` reports it
        if every and math.isclose(every[0], every[1]) and every[2] < SOLVED * every[0]:
            return f"all advantages{facts.who} of the last {every[0]:.0f} groups are 0: rewards within each are equal"
        if most and lower_bound(most[3], most[0]) > self.SHARE:
            return (
                f"{most[1] / most[0]:.0%} of the groups of the last steps have equal rewards{facts.who} and success is "
                f"{most[2] / most[0]:.0%}, so nearly all that is generated teaches nothing"
            )
        return None


class EmptyMasks(Told):
    """Scored episodes without a single trained token: at once when it is all of them, after five steps when half are.

    Then the loss is a sum over nothing.  It happens when an agent does not ask the model that it was given, when its
    clients go away before the answer, or when all that speaks has ``train: false``.

    Error rate: all of a step's generated tokens are counted, so the first is a fact. Half are pooled over 40 episodes;
    a true share of a quarter gives that by chance in 0.02 % of the cases.
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
            return f"none of {generated:,.0f} generated tokens is in a loss mask: there is nothing to train"
        if pooled is not None and pooled[1] >= self.SHARE * pooled[0]:
            return f"{pooled[1]:.0f} of the last {pooled[0]:.0f} scored episodes have no token in a loss mask"
        return None


class StaleWeights(Told):
    """Weights that generate are older than the backbone says they may be, or do not get newer although it trains.

    A backbone states its bound (0 where rollouts and training take turns).  Where it states none, new weights are
    overdue after three times the longest that they took so far, and ten steps at least.  An engine that says it has
    the new weights and serves the old ones is found by `logprob_drift`.
    """

    name = "stale_weights"
    needs = ("policy_version", "staleness/max")  # not there where the engine cannot know
    OVERDUE = 10

    def __init__(self) -> None:
        self._newest = -1.0
        self._since = 0
        self._longest = 1

    def judge(self, facts: StepFacts, newest: float, oldest: float) -> str | None:
        if facts.max_staleness is not None and oldest > facts.max_staleness:
            return (
                f"weights that generated are {oldest:.0f} updates behind those that are trained, and at most "
                f"{facts.max_staleness} is what this backbone says"
            )
        if facts.get("nothing_learnable") == 1:
            return None  # the weights did not change, so there is nothing to get
        if newest > self._newest:
            self._longest = max(self._longest, self._since) if self._newest >= 0 else 1
            self._newest, self._since = newest, 1
            return None
        self._since += 1
        if self._since > max(self.OVERDUE, 3 * self._longest):
            return (
                f"for {self._since} steps everything was generated by weights of version {newest:.0f} or older, though "
                f"they are trained; they got newer every {self._longest} steps at most before"
            )
        return None


class LogprobDrift(Told):
    """Rollout and trainer disagree about the same tokens by 0.1 nats on average for three steps, or ten times as much
    as at the start of the run (and 0.01 at least), or by 10 nats about some token in five steps.

    The rule of thumb: training is stable while the KL divergence between them is below 0.01 (Thinking Machines, Tinker
    documentation, "RL hyperparameters").  With d = log p - log q on sampled tokens, KL is about E[d²] / 2 (Schulman
    2020, k2), at least (E|d|)² / 2, and (E|d|)² where d is spread exponentially; so ``kl/mismatch_mean`` of 0.1 is a
    KL of about 0.01.  In float32 it stays below 1e-5; a probability that differs by 0.003 is usual in bfloat16 and one
    by 0.012 with fp8 rollouts.  A token off by 10 nats is impossible to one side (ratio 22,000); one of them may be a
    rare token's rounding, one in each of five steps is not.

    Where weights are allowed to be old, their age is part of the difference, so there only the growth counts.
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
            return "the difference between rollout's and trainer's log-probabilities is not a finite number"
        return super().see(facts)

    def judge(self, facts: StepFacts, mean: float) -> str | None:
        most, fresh = facts.own("kl/mismatch_max"), not facts.get("staleness/max")
        start = self._start(mean)
        far = self._far(fresh and mean >= self.MEAN)
        grown = self._grown(start is not None and mean >= max(self.FLOOR, self.GROWTH * start))
        impossible = self._max(fresh and (most or 0.0) >= self.MOST)
        said = f"log-probabilities of rollout and trainer{facts.who} differ by {mean:.3g} on average"
        if far:
            return f"{said}, {self.MEAN:g} or more for {self._far.steps} steps (a KL of about {mean * mean:.2g})"
        if grown and start is not None:
            return f"{said}, and by {start:.2g} at the start of the run"
        if impossible:
            return f"{said}, and by {most:.3g} at some token ({self.MOST:g} or more for {self._max.steps} steps)"
        return None


class OfEntropy(Told):
    """A rule about the entropy per token: of what is sampled (``rollout/entropy``), so it is known in steps with equal
    rewards, too; in rows of an older run, of what is trained (``entropy``)."""

    NAMES = ("rollout/entropy", "entropy")

    def see(self, facts: StepFacts) -> Verdict:
        name = next((name for name in self.NAMES if facts.own(name) is not None), "")
        entropy, tokens = facts.own(name), facts.get("tokens/generated")
        return None if entropy is None else self.judge(facts, name, entropy, math.inf if tokens is None else tokens)


class EntropyCollapse(OfEntropy):
    """Entropy at a tenth of the run's start, or below 0.002 nats, for five steps and 1,000 tokens, while success in
    these is below 90 %.

    Without entropy nothing is explored, and reward is bounded by what is left of it (Cui et al. 2025, "The entropy
    mechanism", R = -a e^H + b; DAPO's clip-higher is a remedy).  A policy that solves its tasks is rightly sure of
    itself, and a small model on narrow tasks starts at 0.1 nats; so the comparison is with the run's own start, and
    the absolute bound is where 500 tokens hold one choice between two.

    Error rate: where one token in 20 is a choice, 1,000 tokens hold 50 of them; that an unchanged policy makes a tenth
    as many by chance has a probability below 1e-15 (Poisson).
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
        was = f"it was {start:.3g} at the start" if start is not None else "it has been since the start"
        return f"entropy{facts.who} is {entropy:.3g} nats for {self._low.steps} steps and success {mean:.0%}; {was}"


class EntropyExplosion(OfEntropy):
    """Entropy is 1 nat above the first step's, and half as large again, for five steps and 500 tokens.

    The first step is sampled from the weights before any update. One nat more is a policy that chooses among e times
    as many tokens: reinforcement learning lowers entropy, or raises it by a fraction of that. Greedy answers can look
    healthy meanwhile, because the most probable token hides what is below it.

    Error rate: -log p of a token has a standard deviation of about its mean, 3 nats at most in practice, so the mean
    of 500 tokens is off by 0.13 nats; the margin is seven times as large, and five steps have to exceed it.
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
            f"entropy{facts.who} rose from {first:.3g} nats in the first step to {entropy:.3g} "
            f"({self._high.steps} steps in a row)"
        )


class DuplicateAnswers(Told):
    """Attempts at one task are the same far more often than their own log-probabilities say, or nearly always.

    An engine that is more alike than independent draws does not sample as it says: one seed for all, an answer that is
    cached, a temperature of its own.  ``duplicates/evidence`` is the log-likelihood ratio of copying over sampling
    (`astuner_report.duplicates`); its cumulative sum, which starts over at 0 (CUSUM, Page 1954), has to reach log
    100,000.  When the attempts are as expected, and 90 % of the pairs of the latest 80 groups (of five steps at least)
    are the same, with success below 90 %, the engine is right and the policy says always the same.

    Error rate: an engine that samples as it says reaches that within n steps with a probability of n / 100,000 at most,
    for any batch size (the likelihood ratios of all starting steps sum to n in expectation; Doob's inequality).  For
    the policy, Wilson's lower bound (one-sided 0.1 %) has to be above 75 %.  Rows without ``duplicates/evidence`` get
    it from the mean shares, a group counting as one comparison.
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
            return None  # the log-probabilities are not those that were sampled with
        evidence = facts.get("duplicates/evidence")
        step = copying_evidence(share, expected, groups_of(facts)) if evidence is None else evidence
        self._sum = min(max(self._sum + step, 0.0), 2 * self.EVIDENCE)
        self._shares.append((share, expected))
        groups, success = groups_of(facts), facts.get("success/mean") or 0.0
        pooled = self._recent(groups, share * groups, success * groups)
        if self._sum >= self.EVIDENCE:
            mean, usual = (fmean(values) for values in zip(*self._shares, strict=True))
            return (
                f"{mean:.0%} of the pairs of attempts at one task are the same, token by token (mean of "
                f"{len(self._shares)} steps), and by their own log-probabilities {usual:.0%} would be"
            )
        return self._always_the_same(*pooled) if pooled else None

    def _always_the_same(self, groups: float, same: float, solved: float) -> str | None:
        is_sure = same >= self.NEARLY_ALL * groups and lower_bound(same, groups) > self.LEAST
        if not is_sure or solved >= SOLVED * groups:
            return None
        return (
            f"{same / groups:.0%} of the pairs of attempts at one task are the same, token by token (last {groups:.0f} "
            f"groups), as their log-probabilities say, and success is {solved / groups:.0%}"
        )


def copying_evidence(share: float, expected: float, comparisons: float) -> float:
    """Return an estimate of ``duplicates/evidence`` from the mean shares of a step."""
    usual = min(max(expected, 1e-6), 1 - 1e-6)
    copied = math.log((usual + EXCESS * (1 - usual)) / usual)
    return comparisons * (share * copied + (1 - share) * math.log(1 - EXCESS))


class LengthExplosion(Told):
    """Answers are twice as long as at the start for five steps while the reward does not rise, or thrice as long as 20
    steps ago for three.

    Answers that grow with the reward are how models learn to reason; answers that grow without it are the bias of
    losses that divide by length (Liu et al. 2025, Dr. GRPO), or a policy that has come apart.

    Error rate: each of these steps also has to exceed the longest of the ten (or 20) steps that it is compared with.
    Without a change, five exceed ten others by chance in 1 of 3,003 cases, three exceed 20 in 1 of 1,771.  That the
    reward does not rise is only stated after 20 steps, if its trend is not even suggestive (z below 1).
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
            self._recent.append(length)  # or an explosion would soon be compared with itself
        if sudden and before is not None:
            return f"answers have {length:,.0f} tokens, and had {before:,.0f} (median of the steps before)"
        if long and flat and start is not None:
            return f"answers have {length:,.0f} tokens, {start:,.0f} at the start, and the reward does not rise"
        return None


class CutOff(Told):
    """A limit cuts off more than a fifth of the model calls, or ends more than a fifth of the episodes.

    What is cut off cannot be judged fairly, and a limit that is too small teaches the policy that it cannot succeed
    (DAPO, section 3.4, "overlong reward shaping").

    Error rate: pooled over the latest 40 or 200 episodes (one step, where it has as many). Wilson's lower bound
    (one-sided 0.1 %) has to be above 10 %.
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
        where = "the model's context, or the max_tokens that the agent asks for" if key == "other" else f"astuner.{key}"
        return f"{shares[worst]:.0%} of the model calls or episodes end at a limit: {where}"

    def _is_sure(self, episodes: float, cut: float) -> bool:
        return cut > self.SHARE * episodes and lower_bound(cut, episodes) > self.LEAST


class BadGradients(Told):
    """A gradient or loss that is not finite, or four of five gradient norms are ten times their median.

    A single spike is ordinary and clipped away (`optim.grad_clip`); a series of them comes before a divergence
    (Chowdhery et al. 2022, PaLM, section 5.1; Molybog et al. 2023).  A step that is not finite changes no weights,
    and is lost.  Only steps with a reward signal count: without one the gradient is that of the KL or entropy term
    alone, and much smaller.  A norm below `optim.grad_clip` is never a spike.

    Error rate: a spike also exceeds every one of up to 40 norms before (20 at least).  Without a change, four of five
    exceed 20 others by chance in 5 of 10,626 cases, 40 others in 5 of 135,751.
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
            how = f"{skipped:.0f} optimizer steps were" if skipped else "the update was"
            return f"{how} left out{facts.who}, since the loss or its gradient was not finite"
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
            f"the gradient norm{facts.who} is {norm:.3g}, {self.SPIKE:g} times its median ({usual:.3g}) or more in "
            f"{sum(self._spikes):.0f} of the last {self.OF} steps with a reward signal"
        )


USUAL_KL, USUAL_ENTROPY = 0.1, 0.02
"""Coefficients of the two terms up to which a dominating term has another cause, e.g. updates that are too large."""


def term_sizes(facts: StepFacts) -> tuple[float, float, float] | None:
    """Return the gradients of the KL term, the entropy term and the policy loss of a step, to compare them.

    A term counts only if its coefficient is above the usual range: a policy that moved far has a large KL gradient
    with a small coefficient, too. The coefficients follow from the row: loss = policy loss + β KL - c H.  The policy
    loss counts as if all samples had an advantage, so that the comparison is of the coefficients, not of how many
    groups have a signal.  In a row of an older run, the values of the two terms and the entropy stand for the
    gradients, which they bound (`astuner_objectives.step.logit_gradients`).

    :returns: None for a step without a reward signal, or without the numbers.
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
    """The KL or the entropy term pulls on the policy more strongly than the policy loss, its coefficient is above the
    usual range, and the reward does not rise.

    The gradients of the terms with respect to the logits are summed over the latest steps with a reward signal, five
    and 500 trained tokens at least (`logit_grad/…`).  Usual coefficients give a few percent.  What follows, such as
    large gradients, rising entropy or a policy that breaks, is then due to the coefficient.  Silent while the reward
    has a rising trend (one-sided 1 %), or success is 90 %, where little is left to learn.

    Error rate: none of its own. The sizes are sums over all tokens of these steps, and the coefficients are those of
    the run.
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
            f"the gradient of the {term} term{facts.who} is {times:.3g} times that of the policy loss, so "
            f"trainer_common.{key} decides what is learned and the reward hardly does"
        )


class FailuresRising(Told):
    """More episodes fail than at the start of the run: 5 % at least over five steps, and beyond chance; or more than a
    tenth of all have failed from the start.

    Failed episodes are no rewards of 0, they are missing; when they fail for a reason, what is left is a biased sample.
    `rollout.max_failed_share` ends a run much later.

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
                f"({failed / tried:.0%}), and {self._start[0] / self._start[1]:.1%} in the first {self.START} steps"
            )
        if failed >= self.AT_START * tried and lower_bound(*self._start) > self.AT_START:
            return (
                f"{self._start[0]:.0f} of {self._start[1]:.0f} episodes of the first {self.START} steps failed "
                f"({self._start[0] / self._start[1]:.0%}), and {failed / tried:.0%} of the last {self.STEPS} steps'"
            )
        return None


FIRST: tuple[type[Rule], ...] = (
    ZeroVariance, NothingToLearn, EmptyMasks, StaleWeights, LogprobDrift, EntropyCollapse, EntropyExplosion,
    DuplicateAnswers, LengthExplosion, CutOff, BadGradients, RegularizerDominates, FailuresRising,
)  # fmt: skip
"""The rules of this module, in the order in which they are evaluated."""
