"""Rules about the outcome of a run: progress on validation tasks, the meaning of the reward, and a broken policy.

Rules about validations use what every row has: success and its 95 % interval. All validations use the same tasks, so
two of them differ by less than independent ones, and the tests are conservative.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation, fmean, median, stdev

from astuner_report.sentinel.rule import StepFacts, Verdict
from astuner_report.sentinel.rules import PATIENCE, SOLVED, WARM_UP, CutOff, Lasting, Told, last, term_sizes
from astuner_report.sentinel.statistics import (
    SIGNIFICANT,
    SURE,
    VERY_SURE,
    exact_tail,
    lower_bound,
    normal_tail,
    percent,
    trend,
)

GAIN = 0.15
"""Gain in success that a worthwhile run should reach."""
_ONE_SIDED = 1.644854
"""z of a one-sided test at 5 %."""
_RATE = re.compile(r"(policy/[^/]+/)?lr")
_LONGEST = 200
"""Maximum number of steps of a trend test."""


@dataclass(frozen=True, kw_only=True)
class Validated:
    """Success in one validation."""

    step: int
    success: float
    low: float
    high: float
    error: float
    """Standard error of `success`."""
    tasks: float | None

    @classmethod
    def of(cls, facts: StepFacts) -> Validated | None:
        """Return the validation of a row; None if the row of an older run has no interval."""
        success, low, high = (facts.get(f"val/success{end}") for end in ("", "_ci_low", "_ci_high"))
        if success is None or low is None or high is None:
            return None
        tasks = facts.get("val/tasks")
        least = 0.5 / tasks if tasks else 1e-6  # the interval has no width if all attempts have the same result
        error = max((high - low) / (2 * 1.959964), least)
        return cls(step=facts.step, success=success, low=low, high=high, error=error, tasks=tasks)

    def __str__(self) -> str:
        return f"{percent(self.success, 1)} (95 % interval {percent(self.low, 1)} to {percent(self.high, 1)})"


def gain(validations: Sequence[Validated]) -> tuple[float, float]:
    """Return the gain in success from the first to the last validation, and its standard error.

    The gain is taken along the line that fits all validations best (least squares over the steps).
    """
    steps = [float(v.step) for v in validations]
    middle, span = fmean(steps), steps[-1] - steps[0]
    spread = math.fsum((x - middle) ** 2 for x in steps)
    if not spread:
        return 0.0, math.inf
    slope = math.fsum((x - middle) * v.success for x, v in zip(steps, validations, strict=True)) / spread
    error = math.sqrt(fmean([v.error**2 for v in validations]) / spread)
    return slope * span, error * span


class PolicyBroke(Told):
    """The policy broke: its sampling changed abruptly, and its success fell below half of the baseline.

    Signs of an abrupt change, for two steps each: the policy samples with five times its entropy before (at least 0.5
    nats), or one update moves it by a KL of 0.1 or more (``kl``, if several optimizer steps share a batch and no
    weights were old). Unusable answers (`unusable`) count only in the first ten updates, because later a tool or a
    service is as likely to cause them.

    The baseline is the up to ten steps before; the first step is sampled from the weights before any update. Without
    successes in the baseline no alarm is raised. The message names no cause, because updates, loss terms, rewards and
    the environment can all break a policy; `learning_rate` and `regularizer_dominates` explain it if they have
    evidence. The alarm holds until success is back.

    Error rate: Fisher's exact test at 1 % that success fell, in addition to the signs, which are far outside of
    sampling noise.
    """

    name = "policy_broke"
    KL, JUMP, LEAST, UNUSABLE, P = 0.1, 5.0, 0.5, 0.5, 0.01
    FIRST_UPDATES = 10

    def __init__(self) -> None:
        self._far = Lasting(2)
        self._before, self._since = (
            deque[tuple[float, float]](maxlen=WARM_UP),
            deque[tuple[float, float]](maxlen=WARM_UP),
        )
        self._entropy = last(WARM_UP)
        self._usual: dict[str, float] = {}
        self._broken, self._updates = "", 0

    def see(self, facts: StepFacts) -> Verdict:
        success, episodes = facts.get("success/mean"), facts.get("rollout/episodes")
        return None if success is None or not episodes else self._look(facts, success, episodes)

    def _look(self, facts: StepFacts, success: float, episodes: float) -> str:
        signs = self._signs(facts) if self._before else {}
        steps = self._since if signs or self._broken else self._before
        steps.append((success * episodes, episodes))
        self._updates += facts.own("lr") is not None  # missing in steps without an update
        moved = signs.keys() - {"unusable"} or (signs and self._updates <= self.FIRST_UPDATES)
        far = self._far(bool(moved))
        before, now = _pooled(self._before), _pooled(self._since)
        rate, recent = _rate(before), _rate(now)
        if recent > rate / 2:
            self._broken = ""
        elif far and not self._broken and recent < rate / 2 and exact_tail(_failures(before), _failures(now)) < self.P:
            self._broken = self.say(facts, signs, f"success fell from {percent(rate)} to {percent(recent)}")
        if not signs and not self._broken:
            self._since.clear()
            self._usual = {**self._usual, **unusable(facts)}
            entropy = facts.own("rollout/entropy")
            self._entropy.extend([] if entropy is None else [entropy])
        return self._broken

    def _signs(self, facts: StepFacts) -> dict[str, str]:
        """Return what changed compared with the steps before; a metric without a baseline is not a sign."""
        signs = {}
        if not facts.get("staleness/max") and (kl := facts.own("kl") or 0.0) >= self.KL:
            signs["kl"] = f"one update moved it by a KL of {kl:.2g} nats"
        entropy, usual = facts.own("rollout/entropy"), median(self._entropy) if self._entropy else math.inf
        if entropy is not None and entropy >= max(self.JUMP * usual, self.LEAST):
            signs["entropy"] = f"entropy rose from {usual:.2g} to {entropy:.2g} nats"
        for name, share in unusable(facts).items():
            was = self._usual.get(name, 0.0 if name.startswith(CutOff.PREFIX) else math.inf)  # no limit reached: 0
            if share >= was + self.UNUSABLE:
                signs.setdefault("unusable", f"{name} rose from {percent(was)} to {percent(share)}")
        return signs

    def say(self, facts: StepFacts, signs: Mapping[str, str], success: str) -> str:
        """Return the message for a policy that broke."""
        who = f" {facts.policy}" if facts.policy else ""
        return f"The policy{who} broke: {', '.join(signs.values())}, and {success}"


class LearningRate(PolicyBroke):
    """The learning rate is 0 for five steps, or updates that are too large broke the policy (`policy_broke`).

    Evidence for the second: one update moves the policy by a KL of 0.1 in two steps, ten times the value at which
    implementations of PPO stop an epoch (``target_kl`` of Spinning Up is 0.01); or the policy broke within the first
    ten updates, before which the same weights worked. A rate that worked for longer does not break a policy abruptly,
    so later breaks need the KL. The rule is silent if the KL or the entropy term was half of the update before
    (`term_sizes`), because the coefficient is then the cause.

    Error rate: as for `policy_broke`.
    """

    name = "learning_rate"
    TERMS = 0.5

    def __init__(self) -> None:
        super().__init__()
        self._zero = Lasting()
        self._rate, self._terms = math.nan, False

    def see(self, facts: StepFacts) -> Verdict:
        if (rate := facts.own("lr")) is not None:  # missing in steps without an update
            self._rate = rate
            if self._zero(rate == 0):
                return f"The learning rate{facts.who} is 0 for {self._zero.steps} steps, so the weights do not change"
        if not self._since and (sizes := term_sizes(facts)) is not None:
            self._terms = sizes[0] + sizes[1] >= self.TERMS * sum(sizes)
        return super().see(facts)

    def say(self, facts: StepFacts, signs: Mapping[str, str], success: str) -> str:
        large = "kl" in signs or self._updates <= self.FIRST_UPDATES
        if not large or self._terms or math.isnan(self._rate):
            return ""
        return f"{super().say(facts, signs, success)}; the likely cause is the learning rate, now {self._rate:.3g}"


def _pooled(steps: Iterable[tuple[float, float]]) -> tuple[float, float]:
    counts = list(steps)
    return math.fsum(k for k, _ in counts), math.fsum(n for _, n in counts)


def _rate(counts: tuple[float, float]) -> float:
    return counts[0] / counts[1] if counts[1] else 0.0


def _failures(counts: tuple[float, float]) -> tuple[float, float]:
    return counts[1] - counts[0], counts[1]


class RandomReward(Told):
    """At least half of the variance of the reward is between equal attempts, including equal prompts.

    Half of the mean squared difference between equal attempts is the variance of the judge itself. Its share of the
    total variance is one minus the reliability of a test in psychometrics (Lord and Novick 1968): 1 if the reward
    ignores the answer, 0 if equal answers always get the same reward. Measured over five to ten steps with at least 20
    repeated attempts.

    Error rate: 0.1 % or less for a true share of a quarter. With the squared differences in units of the reward's
    range, Wilson's lower bound of their mean (one-sided 0.1 %, conservative for values between 0 and 1) has to be above
    a quarter of the value for pure noise.
    """

    name = "random_reward"
    needs = ("duplicates/share", "duplicates/reward_noise", "reward/std", "rollout/episodes")
    SHARE, LEAST, REPEATS = 0.5, 0.25, 20

    def __init__(self) -> None:
        self._steps = deque[tuple[float, ...]](maxlen=2 * PATIENCE)
        self._ranges = last(2 * PATIENCE)

    def judge(self, facts: StepFacts, same: float, noise: float, std: float, episodes: float) -> str | None:
        repeats = facts.get("duplicates/repeats")
        self._steps.append((noise, 2 * same * std * std, same, same * episodes / 2 if repeats is None else repeats))
        self._ranges.append((facts.get("reward/max") or 0.0) - (facts.get("reward/min") or 0.0))
        found, expected, pairs, n = map(math.fsum, zip(*self._steps, strict=True))
        if len(self._steps) < PATIENCE or n < self.REPEATS or not 0 < self.SHARE * expected <= found:
            return None
        square = max(max(self._ranges) ** 2, found / pairs)
        if lower_bound(n * found / pairs / square, n) * square * pairs < self.LEAST * expected:
            return None
        return (
            f"Identical attempts get different rewards: {percent(min(found / expected, 1.0))} of the reward's variance "
            f"is noise (over {len(self._steps)} steps), so the policy mostly learns from chance"
        )


class OfReward(Told):
    """A rule that compares the mean reward of training steps with success.

    If agents have their own rewards (``reward/ROLE/mean``), the mean reward does not measure success and the rule is
    silent.
    """

    def see(self, facts: StepFacts) -> Verdict:
        if any(name.startswith("reward/") and re.fullmatch(r"reward/.+/mean", name) for name in facts.row):
            return None
        return super().see(facts)


class RewardSuccessApart(OfReward):
    """Reward and success of training steps have a correlation below -0.6 over 8 to 20 steps, beyond chance.

    The alarm holds until the correlation is no longer negative.

    Error rate: one-sided 0.01 % by Fisher's z in each step; steps share most of their window, so about 0.1 % in 100.
    """

    name = "reward_success_apart"
    needs = ("reward/mean", "success/mean")
    LESS, SWAPPED, LEAST, WINDOW = -0.6, -0.95, 8, 20

    def __init__(self) -> None:
        self._rewards, self._success = last(self.WINDOW), last(self.WINDOW)
        self._found = False

    def judge(self, facts: StepFacts, reward: float, success: float) -> str | None:
        self._rewards.append(reward)
        self._success.append(success)
        if (n := len(self._rewards)) < self.LEAST:
            return None
        try:
            r = correlation(self._rewards, self._success)
        except StatisticsError:  # one of them is constant
            return None
        against = r <= self.LESS and math.atanh(max(r, -0.999999)) * math.sqrt(n - 3) <= -VERY_SURE
        self._found = against or (self._found and r < 0)
        if not self._found:
            return ""
        what = "so the sign of the reward is probably swapped" if r <= self.SWAPPED else "so it rewards something else"
        return (
            f"The reward falls when success rises (correlation {r:.2f} over {n} steps; now {reward:.3g} and "
            f"{percent(success)}), {what}"
        )


class RewardOnly(OfReward):
    """The reward of training steps rises and success does not, although a gain of 10 points would have been detected.

    Over the latest 20 to 60 steps, the mean reward of the last third is half a standard deviation of the episodes'
    rewards above that of the first third, beyond chance, and success gained nothing beyond chance. At least 20
    successes and 20 failures have to occur: if success is constant, for instance because no reward reaches 1, it
    contains no information about the reward.

    Error rate: the reward's gain and trend have one-sided tests at 0.01 %, evaluated in every step. The upper 99.9 %
    bound of the gain in success has to be below 10 points, so a run whose success gained 10 points triggers the rule
    with probability 0.1 % at most in each step.
    """

    name = "reward_only"
    needs = ("reward/mean", "reward/std", "success/mean", "rollout/episodes")
    WINDOW, LEAST, SEEN, EFFECT, GAIN = 60, 20, 20, 0.5, 0.1

    def __init__(self) -> None:
        self._steps = deque[tuple[float, ...]](maxlen=self.WINDOW)

    def judge(self, facts: StepFacts, reward: float, std: float, success: float, episodes: float) -> str | None:
        self._steps.append((reward, std, success, episodes))
        rewards, stds, successes, tried = zip(*self._steps, strict=True)
        seen = math.fsum(s * n for s, n in zip(successes, tried, strict=True))
        if len(rewards) < self.LEAST or not self.SEEN <= seen <= math.fsum(tried) - self.SEEN:
            return None
        gained, error = _gain_of_thirds(rewards)
        more, spread = _gain_of_thirds(successes)
        if gained < max(self.EFFECT * max(stds), VERY_SURE * error) or trend(rewards) <= VERY_SURE:
            return None
        if more > _ONE_SIDED * spread or more + SURE * spread >= self.GAIN:
            return None
        return (
            f"Over {len(rewards)} steps the reward rose by {gained:.2g} to {fmean(rewards[-PATIENCE:]):.3g}, but "
            f"success went from {percent(fmean(successes[: len(successes) // 3]))} to "
            f"{percent(fmean(successes[-(len(successes) // 3) :]))} (a gain of {100 * self.GAIN:.0f} points would have "
            "been detected), so the judge rewards something else"
        )


def _gain_of_thirds(values: Sequence[float]) -> tuple[float, float]:
    """Return the difference between the means of the last and the first third, and its standard error."""
    n = len(values) // 3
    first, end = values[:n], values[-n:]
    return fmean(end) - fmean(first), math.hypot(stdev(first), stdev(end)) / math.sqrt(n)


def _is_below(one: Validated, other: Validated) -> bool:
    """Return whether a validation is below another one beyond chance (one-sided 5 %)."""
    return other.success - one.success > _ONE_SIDED * math.hypot(one.error, other.error)


class AtValidations(Told):
    """A rule that compares validations; those before training and after a warm start count as one."""

    def __init__(self) -> None:
        self._validations: list[Validated] = []
        self._steps = 0
        self._rewards: deque[tuple[int, float]] = deque(maxlen=_LONGEST)
        self._successes: deque[tuple[int, float]] = deque(maxlen=_LONGEST)
        self._first, self._last = list[float](), last(WARM_UP)
        self._at_rate = ""
        self._plays_itself = False

    def see(self, facts: StepFacts) -> Verdict:
        self._steps += 1
        reward, success = facts.get("reward/mean"), facts.get("success/mean")
        self._rewards.extend([] if reward is None else [(facts.step, reward)])
        if success is not None:
            self._successes.append((facts.step, success))
            self._last.append(success)
            if len(self._first) < WARM_UP:
                self._first.append(success)
        for rate in (facts.get(name) for name in facts.row if name.endswith("lr") and _RATE.fullmatch(name)):
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
        """Return a message if two or more validations show a problem."""


class NoProgress(AtValidations):
    """Neither validation success nor the training reward has risen, and a gain of 15 points would have been detected.

    The rule needs two validations after the first and 60 steps: the gain along the line that fits all validations is
    within chance (one-sided 5 %), its upper 95 % bound is below 15 points, and the reward has no rising trend (5 %). It
    is silent if success is above 85 %, and if several policies play against each other.

    Error rate: a run that gained 15 points triggers the rule with probability 5 % at most in each validation.
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
            f"Neither success nor the reward rises: success was {percent(validations[0].success, 1)} at first and is "
            f"{now} after {self._steps} steps{self._at_rate}; {after} validations{of} would have detected a gain of "
            f"{100 * GAIN:.0f} points"
        )


class TrainOnly(AtValidations):
    """Training success is far above validation success, or rises while validation success does not.

    Rises: the means of the first and the last ten steps are compared with the first validation and the current one.
    Training gained 15 points, and 15 points more and twice as much as validation, beyond chance; it is now 5 points
    above validation, also beyond chance (5 %), because greedy validation is ahead at first; and the training reward has
    a rising trend. Not if validation fell from its best back to its start (5 %): a policy that lost its weights just
    before a validation shows the same numbers.

    Far above: success of the training steps between this validation and the previous one is 30 points above the higher
    of the two, beyond chance. This can be the case from the first step and needs no rise.

    Error rate: a z-test at 1 % over the number of validations for each (Bonferroni). Between two validations the
    standard error comes from the spread of the training steps, at least five, and the larger error of the two
    validations.
    """

    name = "train_only"
    ABOVE, FAR = 0.05, 0.3

    def __init__(self) -> None:
        super().__init__()
        self._between: list[float] = []

    def see(self, facts: StepFacts) -> Verdict:
        if (success := facts.get("success/mean")) is not None:
            self._between.append(success)
        return super().see(facts)

    def validated(self, facts: StepFacts) -> Verdict:
        verdict = super().validated(facts)
        self._between = []
        return verdict

    def compare(self, validations: Sequence[Validated]) -> str | None:
        return self._above(validations) or self._rises(validations)

    def _above(self, validations: Sequence[Validated]) -> str | None:
        between = self._between
        if len(between) < PATIENCE or self._plays_itself:
            return None
        before, now = validations[-2:]
        ahead = fmean(between) - max(before.success, now.success)
        error = math.hypot(stdev(between) / math.sqrt(len(between)), max(before.error, now.error))
        p = normal_tail(ahead / error)
        if ahead < self.FAR or p >= 0.01 / (len(validations) - 1):
            return None
        return (
            f"Success in training is {percent(fmean(between))} between steps {before.step} and {now.step}, but "
            f"{percent(before.success, 1)} and {now} in validation (p = {p:.1g}), so tasks, tools or judges of the "
            "splits differ, or the policy does not generalize"
        )

    def _rises(self, validations: Sequence[Validated]) -> str | None:
        first, now = validations[0], validations[-1]
        best = max(validations, key=lambda validation: validation.success)
        lost = _is_below(now, best) and not _is_below(now, first)
        if lost or self._steps < 2 * WARM_UP or len(self._last) < WARM_UP:
            return None
        before, after = fmean(self._first), fmean(self._last)
        training, held_out = after - before, now.success - first.success
        if min(training, training - held_out) < GAIN or training < 2 * held_out or after - now.success < self.ABOVE:
            return None
        noise = math.hypot(stdev(self._first), stdev(self._last)) / math.sqrt(WARM_UP)
        p = normal_tail((training - held_out) / math.hypot(noise, first.error, now.error))
        above = (after - now.success) / math.hypot(stdev(self._last) / math.sqrt(WARM_UP), now.error)
        if p >= 0.01 / (len(validations) - 1) or above <= _ONE_SIDED or self._trend() <= SIGNIFICANT:
            return None
        return (
            f"Success in training rose from {percent(before)} to {percent(after)}, but went from "
            f"{percent(first.success, 1)} to {now} in validation (p = {p:.1g}), so less than half of the gain "
            "generalizes"
        )


class SameAnswer(Told):
    """90 % of the validation tasks get the same answer, token by token, and success is below 90 %.

    A policy that gives different tasks the same answer does not read them. Sampled metrics can look healthy meanwhile:
    greedy answers become equal long before the entropy is low, and a frequent correct answer counts as success. The
    share is ``val/same_answer``, over at least 20 tasks.

    Error rate: with 20 tasks, a true share of one half gives 90 % in 0.02 % of the cases.
    """

    name = "same_answer"
    SHARE, TASKS = 0.9, 20

    def see(self, facts: StepFacts) -> Verdict:
        return None

    def validated(self, facts: StepFacts) -> Verdict:
        share, success, tasks = (facts.get(f"val/{name}") for name in ("same_answer", "success", "tasks"))
        if share is None or success is None or tasks is None:
            return None
        if tasks < self.TASKS or share < self.SHARE or success >= SOLVED:
            return ""
        return (
            f"{percent(share)} of {tasks:.0f} validation tasks get the same answer, token by token, and success is "
            f"{percent(success)}, so the policy does not read the task"
        )


class WorseThanBest(AtValidations):
    """Validation success is at least 5 points below its best, including the start, beyond chance.

    Twice in a row by a z-test at 1 % over the number n of validations before, because the best of many is high by luck
    (Bonferroni), or once at 0.1 % over n², because the test is repeated as often.

    Error rate: below 1 % over n in each validation, and 0.2 % in total for the second test.
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
        """Return the message for success that fell."""
        start = "the start" if best is first else f"the start was {percent(first.success, 1)}"
        was = f"{percent(best.success, 1)} at step {best.step} ({start})"
        return f"Success in validation fell from {was} to {now}{self._at_rate} (p = {p:.1g}), so the policy got worse"


class RewardHacking(WorseThanBest):
    """The training reward rises while held-out success, or another judge's metric, falls, both beyond chance.

    The reward has to have a rising trend (Mann-Kendall, one-sided 1 %) since the best validation, and success has to be
    below that validation as `worse_than_best` requires. If success in training rises too, the same judge finds more
    successes in training, which is not evidence against the judge (`train_only`). Exception: if training counts 90 % as
    successes and validation 10 %, the sign of the training reward may be swapped. A metric of `sentinel.held_out` has
    to have a falling trend over the last 40 steps in which the reward rises.

    Error rate: that of `worse_than_best`, times 1 % for the trend. For `held_out` both trends are tested at 0.1 % in
    every step; steps share most of their window.

    Source of the pattern: Gao et al. 2023, "Scaling laws for reward model overoptimization".
    """

    name = "reward_hacking"
    WINDOW, ENOUGH = 40, 20

    def __init__(self, held_out: Sequence[str] = ()) -> None:
        """Create the rule.

        :param held_out: metrics that should not fall while the reward rises.
        """
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
            if len(values) >= self.ENOUGH and up > SURE and -down > SURE:
                verdict = (
                    f"Over the last {len(values)} steps the reward rises (trend z = {up:.1f}, now {rewards[-1]:.3g}) "
                    f"while {name} falls (z = {down:.1f}, now {value:.3g}), so the policy may exploit the judge"
                )
        return verdict

    def say(self, first: Validated, best: Validated, now: Validated, p: float) -> str | None:
        up = trend([reward for step, reward in self._rewards if step > best.step])
        if up <= SIGNIFICANT:
            return None
        training = fmean(self._last) if self._last else 0.0
        swapped = training >= SOLVED and now.success <= 1 - SOLVED
        risen = trend([success for step, success in self._successes if step > best.step]) > SIGNIFICANT
        if risen and not swapped:
            return None  # the same judge finds more successes in training: not evidence against the judge
        hint = (
            f"the sign of the reward may be swapped ({percent(training)} count as successes in training)"
            if swapped
            else "the policy may exploit the judge"
        )
        return (
            f"Success in validation fell from {percent(best.success, 1)} (step {best.step}) to {now} (p = {p:.1g}) "
            f"while the training reward rose (trend z = {up:.1f}), so {hint}"
        )


class InvalidRising(Told):
    """The share of unusable answers (`unusable`) rises by 10 points after the first ten steps, beyond chance.

    The means of the first ten and the last five steps are compared. Limits do not count while success rises, because
    answers that succeed more often may grow, nor if `cut_off` reports them from the start. A limit that is missing in a
    step was not reached; any other metric needs all of the first ten steps as its baseline.

    Error rate: Fisher's exact test at 0.1 % for each metric, evaluated in every step; steps share most of their window.
    """

    name = "invalid_rising"
    needs = ("success/mean", "rollout/episodes")
    MORE, P = 0.1, 0.001

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
            is_limit = name.startswith(CutOff.PREFIX)
            if not is_limit and not all(name in step for step in self._first):
                continue
            was, now = (fmean([step.get(name, 0.0) for step in steps]) for steps in (self._first, self._last))
            if is_limit and (longer or was > CutOff.SHARE):
                continue
            if now - was >= self.MORE and exact_tail((was * m, m), (now * n, n)) < self.P:
                risen.append(f"{name} rose from {percent(was)} to {percent(now)}")
        if not risen:
            return None
        return f"More answers cannot be used: {'; '.join(risen)} (means of the first ten steps and the last five)"


NO_USE = re.compile(r"(workflow|judge)/(.*[/_])?(unreadable|unclear|unparsed|invalid|illegal|malformed)")
"""Names under which a workflow or judge counts answers that it cannot use."""


def unusable(facts: StepFacts) -> dict[str, float]:
    """Return the shares of unusable answers by name.

    These are answers that a limit ended, metrics with a name that matches `NO_USE`, and answers that are not boxed
    (``judge/boxed``).
    """
    told = {name: facts.get(name) for name in facts.row if name.startswith(CutOff.PREFIX) or NO_USE.fullmatch(name)}
    boxed = facts.get("judge/boxed")
    told["answers without a box"] = None if boxed is None else 1 - boxed
    return {name: share for name, share in told.items() if share is not None}


OUTCOMES: tuple[type[Told], ...] = (
    RewardHacking, LearningRate, PolicyBroke, RandomReward, RewardSuccessApart, RewardOnly, NoProgress, TrainOnly,
    SameAnswer, WorseThanBest, InvalidRising,
)  # fmt: skip
