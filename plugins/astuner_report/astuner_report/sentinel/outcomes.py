"""The rules about what a run comes to: does it get better where it counts, does the reward say what success is, and did
the policy break.

Those that look at validations take what every row has, success and its 95 % interval.  The tasks are the same each
time, so two validations differ by less than independent ones would, and these tests are on the safe side.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation, fmean, median, stdev

from astuner_report.sentinel.rule import StepFacts, Verdict
from astuner_report.sentinel.rules import (
    PATIENCE,
    SIGNIFICANT,
    SOLVED,
    WARM_UP,
    CutOff,
    Lasting,
    Told,
    last,
    normal_tail,
    trend,
    two_proportions,
)

GAIN = 0.15
"""What a run should gain, in success, for it to be worth its tokens."""
_ONE_SIDED = 1.644854
"""z of a one-sided 5 %."""
_SURE = 3.090232
"""z of a one-sided 0.1 %, for what is looked at in every step."""
_LONGEST = 200
"""Steps at most that a trend is looked for in: its cost is quadratic."""


@dataclass(frozen=True, kw_only=True)
class Validated:
    """A validation."""

    step: int
    success: float
    low: float
    high: float
    error: float
    """Standard error of `success`."""
    tasks: float | None

    @classmethod
    def of(cls, facts: StepFacts) -> Validated | None:
        """None where the row, of an older run, has no interval."""
        success, low, high = (facts.get(f"val/success{end}") for end in ("", "_ci_low", "_ci_high"))
        if success is None or low is None or high is None:
            return None
        tasks = facts.get("val/tasks")
        least = 0.5 / tasks if tasks else 1e-6  # several attempts that all end alike have an interval without width
        error = max((high - low) / (2 * 1.959964), least)
        return cls(step=facts.step, success=success, low=low, high=high, error=error, tasks=tasks)

    def __str__(self) -> str:
        return f"{self.success:.1%} [{self.low:.1%}, {self.high:.1%}]"


def gain(validations: Sequence[Validated]) -> tuple[float, float]:
    """What success gained from the first of some validations to the last, and its standard error.

    Along the line that fits them best (least squares over the steps), so that all of them say something of it.
    """
    steps = [float(v.step) for v in validations]
    middle, span = fmean(steps), steps[-1] - steps[0]
    spread = math.fsum((x - middle) ** 2 for x in steps)
    if not spread:
        return 0.0, math.inf
    slope = math.fsum((x - middle) * v.success for x, v in zip(steps, validations, strict=True)) / spread
    error = math.sqrt(fmean([v.error**2 for v in validations]) / spread)
    return slope * span, error * span


class LearningRate(Told):
    """A learning rate of 0 for five steps; or updates that break the policy, for which one that is too high is the
    likely reason.

    Broken is a policy that in two steps in a row was moved by a KL of 0.1 or more (``kl``, where several optimizer
    steps share a batch and no weights were old), ten times what PPO's implementations stop an epoch for (Spinning Up's
    ``target_kl`` is 0.01); or that samples with five times its entropy before, and 0.5 nats at least; or of whose
    answers half can no longer be used (`unusable`).  And its success is below half of what it was, beyond chance (z
    above 3.09), or this goes on for five steps without more success.  Once said, it holds until success is back.
    """

    name = "learning_rate"
    KL, JUMP, LEAST, GARBLED = 0.1, 5.0, 0.5, 0.5

    def __init__(self) -> None:
        self._zero, self._far = Lasting(), Lasting(2)
        self._before, self._entropy, self._recent = last(WARM_UP), last(WARM_UP), last(3)
        self._usual: dict[str, float] = {}
        self._rate, self._broken = math.nan, ""

    def see(self, facts: StepFacts) -> Verdict:
        if (rate := facts.own("lr")) is not None:  # not there where nothing was learned
            self._rate = rate
            if self._zero(rate == 0):
                return f"the learning rate{facts.who} is 0 for {self._zero.steps} steps, so the weights do not move"
        success, episodes = facts.get("success/mean"), facts.get("rollout/episodes")
        if math.isnan(self._rate) or success is None or episodes is None:
            return None
        return self._look(facts, success, episodes)

    def _look(self, facts: StepFacts, success: float, episodes: float) -> str:
        shares, signs = unusable(facts), []
        if not facts.get("staleness/max") and (kl := facts.own("kl") or 0.0) >= self.KL:
            signs.append(f"one update moves it by a KL of {kl:.2g} nats")
        entropy, usual = facts.own("rollout/entropy"), median(self._entropy) if self._entropy else math.inf
        if entropy is not None and entropy >= max(self.JUMP * usual, self.LEAST):
            signs.append(f"entropy rose from {usual:.2g} to {entropy:.2g} nats")
        garbled = [name for name, share in shares.items() if share >= self._usual.get(name, 0.0) + self.GARBLED]
        signs += [f"{name} from {self._usual.get(name, 0.0):.0%} to {shares[name]:.0%}" for name in garbled[:1]]
        self._recent.append(success)
        before, now = (fmean(self._before) if self._before else 0.0), fmean(self._recent)
        n, m = episodes * len(self._recent), episodes * len(self._before)
        far = self._far(bool(signs))
        fell = now < before / 2 and two_proportions((now * n, n), (before * m, m)) > _SURE
        if now > before / 2:
            self._broken = ""
        if far and not self._broken and (fell or (now <= before and self._far.steps >= PATIENCE)):
            self._broken = (
                f"the policy{facts.who} broke: {', '.join(signs)}, and success went from {before:.0%} to {now:.0%}; "
                f"the learning rate, now {self._rate:.3g}, is the likely cause"
            )
        if not signs and not self._broken:
            self._before.append(success)
            self._entropy.extend([] if entropy is None else [entropy])
            self._usual |= shares
        return self._broken


class RandomReward(Told):
    """Half of the variance of the reward, or more, is between attempts that are the same, prompts included.

    Half of the mean squared difference of such attempts is the variance of what the judge does by itself, and its share
    of all variance is one less the reliability of a test in psychometrics (Lord and Novick 1968): 1 where the reward
    ignores what was said, 0 where the same is always judged alike.  Over five to ten steps with 20 such pairs.
    """

    name = "random_reward"
    needs = ("duplicates/share", "duplicates/reward_noise", "reward/std", "rollout/episodes")
    SHARE, PAIRS = 0.5, 20

    def __init__(self) -> None:
        self._noise, self._pairs, self._expected = (last(2 * PATIENCE) for _ in range(3))

    def judge(self, facts: StepFacts, same: float, noise: float, std: float, episodes: float) -> str | None:
        self._noise.append(noise)
        self._expected.append(2 * same * std * std)
        self._pairs.append(same * episodes)
        found, expected, n = sum(self._noise), sum(self._expected), len(self._noise)
        if n < PATIENCE or sum(self._pairs) < self.PAIRS or not 0 < self.SHARE * expected <= found:
            return None
        return (
            f"attempts that are the same, word for word, get different rewards: {min(found / expected, 1.0):.0%} of "
            f"the variance of the reward is noise (of {n} steps), so it is chance more than anything the policy does"
        )


class RewardSuccessApart(Told):
    """Reward and success of training steps go against each other: a correlation below -0.6 over 20 steps, 8 at least,
    beyond chance (one-sided 0.1 %, Fisher's z).  It holds until they are no longer negatively correlated.

    Where agents have rewards of their own (``reward/ROLE/mean``) the mean reward is no measure of success, and the rule
    says nothing.
    """

    name = "reward_success_apart"
    needs = ("reward/mean", "success/mean")
    LESS, SWAPPED, LEAST, WINDOW = -0.6, -0.95, 8, 20

    def __init__(self) -> None:
        self._rewards, self._success = last(self.WINDOW), last(self.WINDOW)
        self._found = False

    def see(self, facts: StepFacts) -> Verdict:
        if any(re.fullmatch(r"reward/.+/mean", name) for name in facts.row):
            return None
        return super().see(facts)

    def judge(self, facts: StepFacts, reward: float, success: float) -> str | None:
        self._rewards.append(reward)
        self._success.append(success)
        if (n := len(self._rewards)) < self.LEAST:
            return None
        try:
            r = correlation(self._rewards, self._success)
        except StatisticsError:  # one of them does not move
            return None
        against = r <= self.LESS and math.atanh(max(r, -0.999999)) * math.sqrt(n - 3) <= -_SURE
        self._found = against or (self._found and r < 0)
        if not self._found:
            return ""
        what = "as one whose sign is swapped" if r <= self.SWAPPED else "so it pays for something else"
        return (
            f"the reward falls where success rises (correlation {r:.2f} over {n} steps; now {reward:.3g} and "
            f"{success:.0%}), {what}"
        )


class AtValidations(Told):
    """A rule that counts validations; those before training, and a warm start, are one."""

    def __init__(self) -> None:
        self._validations: list[Validated] = []
        self._steps = 0
        self._rewards: deque[tuple[int, float]] = deque(maxlen=_LONGEST)
        self._first, self._last = list[float](), last(WARM_UP)
        self._at_rate = ""
        self._plays_itself = False

    def see(self, facts: StepFacts) -> Verdict:
        self._steps += 1
        reward, success = facts.get("reward/mean"), facts.get("success/mean")
        self._rewards.extend([] if reward is None else [(facts.step, reward)])
        if success is not None:
            self._last.append(success)
            if len(self._first) < WARM_UP:
                self._first.append(success)
        for rate in (facts.get(name) for name in facts.row if re.fullmatch(r"(policy/[^/]+/)?lr", name)):
            self._at_rate = self._at_rate if rate is None else f" at a learning rate of {rate:.3g}"
        self._plays_itself = len({name.split("/")[1] for name in facts.row if name.startswith("policy/")}) > 1
        return None

    def validated(self, facts: StepFacts) -> Verdict:
        if (now := Validated.of(facts)) is None:
            return None
        if not self._steps:
            self._validations.clear()
        self._validations.append(now)
        return self.compare(self._validations) or "" if len(self._validations) > 1 else ""

    def _trend(self) -> float:
        return trend([reward for _, reward in self._rewards])

    @abstractmethod
    def compare(self, validations: Sequence[Validated]) -> str | None:
        """What is wrong, if anything is, of two or more validations."""


class NoProgress(AtValidations):
    """Neither success in validation nor the reward in training has risen, and a gain of 15 points would have been seen.

    After two validations beyond the first and 60 steps: the gain along the line that fits all validations is within
    chance (one-sided 5 %), its upper 95 % bound is below 15 points, and the reward has no rising trend (5 %).  Not
    where success is so high that 15 points are not left, nor where several policies play each other.
    """

    name = "no_progress"
    AFTER, STEPS, FLAT = 2, 60, _ONE_SIDED

    def compare(self, validations: Sequence[Validated]) -> str | None:
        now, after = validations[-1], len(validations) - 1
        room = now.success + GAIN <= 1
        if after < self.AFTER or self._steps < self.STEPS or not room or self._plays_itself:
            return None
        gained, error = gain(validations)
        if gained > _ONE_SIDED * error or gained + _ONE_SIDED * error >= GAIN or self._trend() > self.FLAT:
            return None
        of = "" if now.tasks is None else f" of {now.tasks:.0f} tasks"
        return (
            f"success does not move: {validations[0].success:.1%} at first, {now} after {self._steps} steps"
            f"{self._at_rate}; nor does the reward. After {after} validations{of} a gain of {100 * GAIN:.0f} points "
            "would have been seen"
        )


class TrainOnly(AtValidations):
    """Success in training rises and leaves that of validation behind.

    The means of the first and the last ten steps, against the first validation and this one: training gained 15 points
    more, beyond chance (z-test, 1 % over the number of validations), and twice as much, and is 5 points above now, for
    a policy that answers its validation greedily is ahead there at first.  The training reward has a rising trend.
    """

    name = "train_only"
    ABOVE = 0.05

    def compare(self, validations: Sequence[Validated]) -> str | None:
        first, now = validations[0], validations[-1]
        if self._steps < 2 * WARM_UP or len(self._last) < WARM_UP:
            return None
        before, after = fmean(self._first), fmean(self._last)
        training, held_out = after - before, now.success - first.success
        if training - held_out < GAIN or training < 2 * held_out or after - now.success < self.ABOVE:
            return None
        noise = math.hypot(stdev(self._first), stdev(self._last)) / math.sqrt(WARM_UP)
        p = normal_tail((training - held_out) / math.hypot(noise, first.error, now.error))
        if p >= 0.01 / (len(validations) - 1) or self._trend() <= SIGNIFICANT:
            return None
        return (
            f"success in training rose from {before:.0%} to {after:.0%}, in validation it went from "
            f"{first.success:.1%} to {now} (p = {p:.1g}): less than half of what is learned carries over"
        )


class WorseThanBest(AtValidations):
    """Success in validation is below its best, the start included, by 5 points at least and beyond chance.

    Twice in a row by a z-test at 1 % over the number n of validations before, since the best of many is high by luck
    (Bonferroni), or once at 0.1 % over n², since there are as many looks.
    """

    name = "worse_than_best"
    LEAST = 0.05

    def __init__(self) -> None:
        super().__init__()
        self._fell = Lasting(2)

    def compare(self, validations: Sequence[Validated]) -> str | None:
        now, before = validations[-1], len(validations) - 1
        best = max(reversed(validations[:-1]), key=lambda v: v.success)
        p = normal_tail((best.success - now.success) / math.hypot(best.error, now.error))
        fell = self._fell(best.success - now.success >= self.LEAST and p < 0.01 / before)
        if not fell and not (self._fell.steps and p < 0.001 / before**2):
            return None
        return self.say(validations[0], best, now, p)

    def say(self, first: Validated, best: Validated, now: Validated, p: float) -> str | None:
        """What is wrong with success that fell."""
        start = "where it started" if best is first else f"it started at {first.success:.1%}"
        was = f"was {best.success:.1%} at step {best.step} ({start})"
        return f"success in validation is {now}{self._at_rate}, and {was}: p = {p:.1g}"


class RewardHacking(WorseThanBest):
    """The training reward rises, and success on held-out tasks, or another judge's opinion, falls: both beyond chance.

    The reward has to have a rising trend (Mann and Kendall, one-sided 1 %) since the best validation, below which
    success has to be as `worse_than_best` says.  Where training counts as a success what validation counts as a
    failure, the reward's sign may be swapped.  A metric that `sentinel.held_out` names has to have a falling trend over
    the last 40 steps, over which the reward rises.
    Source of the pattern: Gao et al. 2023, "Scaling laws for reward model overoptimization".
    """

    name = "reward_hacking"
    WINDOW, ENOUGH = 40, 20

    def __init__(self, held_out: Sequence[str] = ()) -> None:
        """:param held_out: metrics that should not fall while the reward rises."""
        super().__init__()
        self._others = {name: last(self.WINDOW) for name in held_out}

    def see(self, facts: StepFacts) -> Verdict:
        super().see(facts)
        verdict: Verdict = None
        for name, values in self._others.items():
            if (value := facts.get(name)) is None or facts.get("reward/mean") is None:
                continue
            values.append(value)
            verdict = verdict or ""
            rewards = [reward for _, reward in self._rewards][-self.WINDOW :]
            up, down = trend(rewards), trend(values)
            if len(values) >= self.ENOUGH and up > SIGNIFICANT and -down > SIGNIFICANT:
                verdict = (
                    f"over the last {len(values)} steps the reward rises (trend z = {up:.1f}, now {rewards[-1]:.3g}) "
                    f"and {name} falls (z = {down:.1f}, now {value:.3g})"
                )
        return verdict

    def say(self, first: Validated, best: Validated, now: Validated, p: float) -> str | None:
        up = trend([reward for step, reward in self._rewards if step > best.step])
        if up <= SIGNIFICANT:
            return None
        training = fmean(self._last) if self._last else 0.0
        swapped = training >= SOLVED and now.success <= 1 - SOLVED
        hint = f"; {training:.0%} count as successes in training: is the reward's sign swapped?" if swapped else ""
        return (
            f"success in validation fell from {best.success:.1%} (step {best.step}) to {now} (p = {p:.1g}) while the "
            f"training reward rose (trend z = {up:.1f}){hint}"
        )


class InvalidRising(Told):
    """A growing share of what the policy says is of no use (`unusable`): of five steps 10 points more than of the first
    ten, beyond chance (z above 3.09).

    A limit is none of it while success rises, for answers may well grow that succeed more often, nor where `cut_off`
    speaks of it from the start.
    """

    name = "invalid_rising"
    needs = ("success/mean", "rollout/episodes")
    MORE = 0.1

    def __init__(self) -> None:
        self._first: list[dict[str, float]] = []
        self._last: deque[dict[str, float]] = deque(maxlen=PATIENCE)
        self._success = last(4 * WARM_UP)

    def judge(self, facts: StepFacts, success: float, episodes: float) -> str | None:
        self._success.append(success)
        shares = unusable(facts)
        (self._first if len(self._first) < WARM_UP else self._last).append(shares)
        if len(self._last) < PATIENCE:
            return None
        risen, longer = [], trend(self._success) > SIGNIFICANT
        m, n = episodes * WARM_UP, episodes * PATIENCE
        for name in sorted(shares, key=lambda name: name.startswith(CutOff.PREFIX)):
            was, now = (fmean([step.get(name, 0.0) for step in steps]) for steps in (self._first, self._last))
            if name.startswith(CutOff.PREFIX) and (longer or was > CutOff.SHARE):
                continue
            if now - was >= self.MORE and two_proportions((was * m, m), (now * n, n)) > _SURE:
                risen.append(f"{name} rose from {was:.0%} to {now:.0%}")
        return f"{'; '.join(risen)} (means of the first ten steps and the last five)" if risen else None


NO_USE = re.compile(r"(workflow|judge)/(.*[/_])?(unreadable|unclear|unparsed|invalid|illegal|malformed)")
"""The names under which a workflow or judge counts what it cannot use."""


def unusable(facts: StepFacts) -> dict[str, float]:
    """Shares of what the policy says that are of no use: what a limit ends, what is counted under a name of `NO_USE`,
    and answers that are not boxed (``judge/boxed``)."""
    told = {name: facts.get(name) for name in facts.row if name.startswith(CutOff.PREFIX) or NO_USE.fullmatch(name)}
    boxed = facts.get("judge/boxed")
    told["answers without a box"] = None if boxed is None else 1 - boxed
    return {name: share for name, share in told.items() if share is not None}


OUTCOMES: tuple[type[Told], ...] = (
    RewardHacking, LearningRate, RandomReward, RewardSuccessApart, NoProgress, TrainOnly, WorseThanBest, InvalidRising,
)  # fmt: skip
