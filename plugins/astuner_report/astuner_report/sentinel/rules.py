"""The rules: is there anything to learn from, does the engine serve what is trained, what becomes of the policy and
of the run; and the two tests that tell a trend, or a difference, from chance."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from astuner_report.sentinel.rule import Rule, StepFacts, Verdict

PATIENCE = 5
"""Steps in a row for which a state must last that is ordinary now and then, in small batches most of all."""
SOLVED = 0.9
"""Success above which a policy may well be sure of itself."""
WARM_UP = 10
"""Steps that a run's own start is taken from, for a rule that compares with it."""
SIGNIFICANT = 2.326
"""z of a one-sided 1 %."""


def normal_tail(z: float) -> float:
    """P(Z > z) of a standard normal Z."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def trend(values: Collection[float]) -> float:
    """Mann and Kendall's test for a trend: its z, above 0 when the values rise; 0 for fewer than 4.

    Of all pairs, how many rise less how many fall, over the standard deviation of that without a trend, ties counted.
    It asks for no shape and no normal noise, and one outlier moves it little.

    Source: Mann, Econometrica 13 (1945) 245-259; ties as in Kendall, Rank Correlation Methods (1948).
    """
    n = len(values)
    if n < 4:
        return 0.0
    rising = sum((b > a) - (b < a) for a, b in combinations(values, 2))
    ties = sum(t * (t - 1) * (2 * t + 5) for t in Counter(values).values())
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    if not rising or variance <= 0:
        return 0.0
    return (rising - math.copysign(1, rising)) / math.sqrt(variance)


def two_proportions(first: tuple[float, float], second: tuple[float, float]) -> float:
    """z of the pooled test that two independent shares are one, each (successes, tries); above 0: the second is larger.

    Source: e.g. Fleiss, Levin and Paik, Statistical Methods for Rates and Proportions (2003), section 3.1.
    """
    (a, n), (b, m) = first, second
    if not n or not m:
        return 0.0
    pooled = (a + b) / (n + m)
    error = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    return (b / m - a / n) / error if error else 0.0


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

    def __init__(self, patience: int = PATIENCE) -> None:
        self._patience, self.steps = patience, 0

    def __call__(self, is_so: bool) -> bool:
        """Count a step; whether it has been so for long enough."""
        self.steps = self.steps + 1 if is_so else 0
        return self.steps >= self._patience


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
    """Every reward of a step is the same, five steps in a row.

    A comparison of equal rewards gives advantages of 0, so nothing is learned (Shao et al. 2024, equation of GRPO; TRL
    logs it as ``frac_reward_zero_std``).  One such step is ordinary in a batch of a few groups, five are a judge that
    always says the same, or tasks that are all too hard.  Where every episode succeeded the tasks are solved, which is
    no fault: the step's line on the console says so.
    """

    name = "zero_variance"
    needs = ("adv/reward_min", "adv/reward_max")

    def __init__(self) -> None:
        self._lasts = Lasting()

    def judge(self, facts: StepFacts, low: float, high: float) -> str | None:
        if not self._lasts(high - low <= _EQUAL and facts.get("success/mean") != 1):
            return None
        success = facts.get("success/mean")
        unsolved = f", and success is {success:.0%}" if high >= 1 and success is not None else ""
        return f"all rewards{facts.who} of the last {self._lasts.steps} steps are {high:g}{unsolved}"


class NothingToLearn(Told):
    """Five steps in a row in which all advantages are 0, or ten in which 90 % of the groups have equal rewards, while
    success is below 90 %.

    The first costs everything, the second most of the generated tokens (DAPO, Yu et al. 2025, section 3.2, draws again
    instead).  Where `zero_variance` says why, this rule is silent; so too where most groups are solved.
    """

    name = "nothing_to_learn"
    needs = ("adv/zero_frac",)
    WASTED = 0.9
    WASTED_STEPS = 10

    def __init__(self) -> None:
        self._none, self._little = Lasting(), Lasting(self.WASTED_STEPS)

    def judge(self, facts: StepFacts, zero: float) -> str | None:
        low, high = facts.own("adv/reward_min"), facts.own("adv/reward_max")
        spoke = high is not None
        all_equal = low is not None and high is not None and high - low <= _EQUAL
        explained = all_equal or (facts.get("success/mean") or 0.0) >= SOLVED
        nothing = self._none(zero == 1 and not explained)
        groups = facts.get("adv/zero_group_frac")
        mostly = zero >= self.WASTED and (groups or 0.0) >= self.WASTED and not explained
        little = self._little(mostly)
        if nothing and not spoke:
            who = f"no agent that speaks with the policy {facts.policy} has" if facts.policy else "no agent has"
            return f"in the last {self._none.steps} steps {who} said anything that can be trained on"
        if nothing:
            return (
                f"all advantages{facts.who} of the last {self._none.steps} steps are 0: the rewards within each group "
                "are equal"
            )
        if little:
            return (
                f"in each of the last {self._little.steps} steps at least {self.WASTED:.0%} of the groups had equal "
                f"rewards (now {groups or 0.0:.0%}), so nearly all that is generated{facts.who} is thrown away"
            )
        return None


class EmptyMasks(Told):
    """Scored episodes without a single trained token: at once when it is all of them, after five steps when half are.

    Then the loss is a sum over nothing.  It happens when an agent does not ask the model that it was given, when its
    clients go away before the answer, or when all that speaks has ``train: false``.
    """

    name = "empty_masks"
    needs = ("merge/untrained_rollout_frac", "tokens/trainable")
    SHARE = 0.5

    def __init__(self) -> None:
        self._half = Lasting()

    def judge(self, facts: StepFacts, share: float, tokens: float) -> str | None:
        generated = facts.get("tokens/generated") or 0.0
        half = self._half(share >= self.SHARE)
        if tokens == 0 and share == 1:
            return f"none of {generated:,.0f} generated tokens is in a loss mask: there is nothing to train"
        if half:
            return (
                f"{share:.0%} of the scored episodes have no token in a loss mask (at least half for "
                f"{self._half.steps} steps)"
            )
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


class EntropyCollapse(Told):
    """Entropy at a tenth of the run's start, or below 0.002 nats, for five steps, while success in these is below 90 %.

    Without entropy nothing is explored, and reward is bounded by what is left of it (Cui et al. 2025, "The entropy
    mechanism", R = -a e^H + b; DAPO's clip-higher is a remedy).  A policy that solves its tasks is rightly sure of
    itself, and a small model on narrow tasks starts at 0.1 nats; so the comparison is with the run's own start, and
    the absolute bound is where 500 tokens hold one choice between two.  Of what is sampled (``rollout/entropy``), so it
    is known in steps with equal rewards, too; in rows of an older run, of what is trained (``entropy``).
    """

    name = "entropy_collapse"
    SHARE, LEAST = 0.1, 0.002

    def __init__(self) -> None:
        self._starts = {name: Start() for name in ("rollout/entropy", "entropy")}
        self._low, self._success = Lasting(), last(PATIENCE)

    def see(self, facts: StepFacts) -> Verdict:
        if (success := facts.get("success/mean")) is not None:
            self._success.append(success)
        name = next((name for name in self._starts if facts.own(name) is not None), "")
        if (entropy := facts.own(name)) is None:
            return None
        start = self._starts[name](entropy)
        low = self._low(entropy < self.LEAST or (start is not None and entropy < self.SHARE * start))
        success = fmean(self._success) if self._success else 0.0
        if not low or success >= SOLVED:
            return ""
        was = f"it was {start:.3g} at the start" if start is not None else "it has been since the start"
        return f"entropy{facts.who} is {entropy:.3g} nats for {self._low.steps} steps and success {success:.0%}; {was}"


class DuplicateAnswers(Told):
    """Attempts at one task are the same far more often than their own log-probabilities say, or nearly always.

    Independent draws from p are equal with probability sum p(x)², which the recorded log-probabilities estimate
    (``duplicates/expected``).  An engine that is more alike than that does not sample as it says: one seed for all, an
    answer that is cached, a temperature of its own.  The share over ten steps has to be 0.25 above; an environment that
    varies makes it smaller, never larger.  When it is as expected and 95 % for five steps, with success below 90 %, the
    engine is right and the policy says always the same.
    """

    name = "duplicate_answers"
    needs = ("duplicates/share", "duplicates/expected")
    EXCESS, WINDOW = 0.25, 10
    NEARLY_ALL = 0.95

    def __init__(self) -> None:
        self._share, self._expected = last(self.WINDOW), last(self.WINDOW)
        self._same = Lasting()

    def judge(self, facts: StepFacts, share: float, expected: float) -> str | None:
        self._share.append(share)
        self._expected.append(expected)
        success = facts.get("success/mean") or 0.0
        same = self._same(share >= self.NEARLY_ALL and success < SOLVED)
        mean, usual = fmean(self._share), fmean(self._expected)
        if len(self._share) >= self.WINDOW // 2 and mean - usual >= self.EXCESS:
            return (
                f"{mean:.0%} of the pairs of attempts at one task are the same, token by token (mean of "
                f"{len(self._share)} steps), and by their own log-probabilities {usual:.0%} would be"
            )
        if same:
            return (
                f"{share:.0%} of the pairs of attempts at one task are the same, token by token, for "
                f"{self._same.steps} steps, and success is {success:.0%}"
            )
        return None


class LengthExplosion(Told):
    """Answers are twice as long as at the start while the reward has not risen, or thrice as long as 20 steps ago; each
    for three steps.

    Answers that grow with the reward are how models learn to reason; answers that grow without it are the bias of
    losses that divide by length (Liu et al. 2025, Dr. GRPO), or a policy that has come apart.
    """

    name = "length_explosion"
    needs = ("response_length/mean", "reward/mean")
    GROWN, SUDDEN, STEPS, AGO = 2.0, 3.0, 3, 20

    def __init__(self) -> None:
        self._start = Start()
        self._recent, self._rewards = last(self.AGO), last(3 * self.AGO)
        self._long, self._sudden = (Lasting(self.STEPS) for _ in range(2))

    def judge(self, facts: StepFacts, length: float, reward: float) -> str | None:
        start = self._start(length)
        before = median(self._recent) if len(self._recent) >= self.AGO // 2 else None
        self._rewards.append(reward)
        rising = trend(self._rewards) > SIGNIFICANT
        long = self._long(start is not None and length > self.GROWN * start and not rising)
        sudden = self._sudden(before is not None and length > self.SUDDEN * before)
        if not self._sudden.steps:
            self._recent.append(length)  # or an explosion would soon be compared with itself
        if sudden and before is not None:
            return f"answers have {length:,.0f} tokens, and had {before:,.0f} (median of the steps before)"
        if long and start is not None:
            return f"answers have {length:,.0f} tokens, {start:,.0f} at the start, and the reward has not risen"
        return None


class CutOff(Told):
    """A limit cuts off more than a fifth of the model calls, or ends more than a fifth of the episodes; at once.

    What is cut off cannot be judged fairly, and a limit that is too small teaches the policy that it cannot succeed
    (DAPO, section 3.4, "overlong reward shaping").
    """

    name = "cut_off"
    SHARE = 0.2
    PREFIX = "limits/"

    def judge(self, facts: StepFacts) -> str | None:
        met = {name: facts.get(name) or 0.0 for name in facts.row if name.startswith(self.PREFIX)}
        worst = max(met, key=lambda name: met[name], default="")
        if not met or met[worst] <= self.SHARE:
            return None
        key = worst.removeprefix(self.PREFIX)
        where = "the model's context, or the max_tokens that the agent asks for" if key == "other" else f"astuner.{key}"
        return f"{met[worst]:.0%} of the model calls or episodes end at a limit: {where}"


class BadGradients(Told):
    """A gradient or loss that is not finite, or gradient norms ten times their median in three of five steps.

    A single spike is ordinary and clipped away (`optim.grad_clip`); a series of them comes before a divergence
    (Chowdhery et al. 2022, PaLM, section 5.1; Molybog et al. 2023).  A step that is not finite changes no weights,
    and is lost.
    """

    name = "bad_gradients"
    SPIKE, OF, SPIKES, WINDOW = 10.0, 5, 3, 20

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
        usual = median(self._norms) if len(self._norms) >= self.WINDOW // 2 else math.inf
        is_spike = 0 < self.SPIKE * usual < norm
        self._spikes.append(float(is_spike))
        if not is_spike:
            self._norms.append(norm)
        if is_spike and sum(self._spikes) >= self.SPIKES:
            return (
                f"the gradient norm{facts.who} is {norm:.3g}, {self.SPIKE:g} times its median ({usual:.3g}) or more in "
                f"{sum(self._spikes):.0f} of the last {self.OF} steps"
            )
        return ""


class FailuresRising(Told):
    """More episodes fail than at the start of the run: 5 % at least over five steps, and beyond chance (z above 3.09).

    Failed episodes are no rewards of 0, they are missing; when they fail for a reason, what is left is a biased sample.
    `rollout.max_failed_share` ends a run much later.
    """

    name = "failures_rising"
    needs = ("rollout/errored_frac", "rollout/episodes")
    SHARE, Z, STEPS, START = 0.05, 3.09, 5, 10

    def __init__(self) -> None:
        self._failed, self._episodes = last(self.STEPS), last(self.STEPS)
        self._start = [0.0, 0.0]
        self._seen = 0

    def judge(self, facts: StepFacts, share: float, episodes: float) -> str | None:
        if not episodes:
            return None
        self._seen += 1
        if self._seen <= self.START:
            self._start = [self._start[0] + share * episodes, self._start[1] + episodes]
            return None
        self._failed.append(share * episodes)
        self._episodes.append(episodes)
        if len(self._failed) < self.STEPS:
            return None
        failed, all_of_them = sum(self._failed), sum(self._episodes)
        z = two_proportions((self._start[0], self._start[1]), (failed, all_of_them))
        if failed / all_of_them < self.SHARE or z <= self.Z:
            return None
        return (
            f"{failed:.0f} of {all_of_them:.0f} episodes of the last {self.STEPS} steps failed "
            f"({failed / all_of_them:.0%}), and {self._start[0] / self._start[1]:.1%} in the first {self.START} steps"
        )


FIRST: tuple[type[Rule], ...] = tuple(Told.__subclasses__())
"""The rules of this module, in the order in which they stand here."""
