"""Rules for what becomes of the policy: entropy, sameness, length."""

from __future__ import annotations

from typing import ClassVar

from astuner_report.sentinel.rule import SOLVED, Lasting, Recent, Rule, Start, StepFacts, Verdict
from astuner_report.sentinel.statistics import trend

_SIGNIFICANT = 2.326
"""z of a one-sided 1 %."""


class EntropyCollapse(Rule):
    """Entropy at a tenth of the run's start, or below 0.002 nats, for five steps, while success is below 90 %.

    Without entropy nothing is explored, and reward is bounded by what is left of it (Cui et al. 2025, "The entropy
    mechanism", R = -a e^H + b; DAPO's clip-higher is a remedy).  A policy that solves its tasks is rightly sure of
    itself, and a small model on narrow tasks starts at 0.1 nats; so the comparison is with the run's own start, and
    the absolute bound is where 500 tokens hold one choice between two.
    """

    name = "entropy_collapse"
    per_policy = True
    advice: ClassVar[str] = (
        "the policy has stopped exploring: go back to an earlier checkpoint with a lower trainer_common.optim.lr, a "
        "larger algorithm.clip_ratio_high (0.28), an entropy_coeff above 0, or use_kl_loss"
    )
    SHARE, LEAST = 0.1, 0.002

    def __init__(self) -> None:
        self._start, self._low = Start(), Lasting()

    def see(self, facts: StepFacts) -> Verdict:
        entropy = facts.own("entropy")
        if entropy is None:
            return None
        success = facts.get("success/mean") or 0.0
        start = self._start(entropy)
        below = entropy < self.LEAST or (start is not None and entropy < self.SHARE * start)
        if not self._low(below and success < SOLVED):
            return ""
        was = f"it was {start:.3g} at the start" if start is not None else "it has been since the start"
        return f"entropy{facts.who} is {entropy:.3g} nats for {self._low.steps} steps and success {success:.0%}; {was}"


class DuplicateAnswers(Rule):
    """Attempts at one task are the same far more often than their own log-probabilities say, or nearly always.

    Independent draws from p are equal with probability sum p(x)², which the recorded log-probabilities estimate
    (``duplicates/expected``).  An engine that is more alike than that does not sample as it says: one seed for all, an
    answer that is cached, a temperature of its own.  The share over ten steps has to be 0.25 above; an environment that
    varies makes it smaller, never larger.  When it is as expected and 95 % for five steps, with success below 90 %, the
    engine is right and the policy says always the same.
    """

    name = "duplicate_answers"
    advice: ClassVar[str] = (
        "look at whether the engine got the temperature and a seed for each attempt (astuner.rollout.temperature); if "
        "it did, the policy has collapsed: raise the temperature, or go back to an earlier checkpoint"
    )
    EXCESS, WINDOW = 0.25, 10
    NEARLY_ALL = 0.95

    def __init__(self) -> None:
        self._share, self._expected = Recent(self.WINDOW), Recent(self.WINDOW)
        self._same = Lasting()

    def see(self, facts: StepFacts) -> Verdict:
        share, expected = facts.get("duplicates/share"), facts.get("duplicates/expected")
        if share is None or expected is None:
            return None
        self._share.add(share)
        self._expected.add(expected)
        success = facts.get("success/mean") or 0.0
        same = self._same(share >= self.NEARLY_ALL and success < SOLVED)
        if len(self._share) >= self.WINDOW // 2 and self._share.mean - self._expected.mean >= self.EXCESS:
            return (
                f"{self._share.mean:.0%} of the pairs of attempts at one task are the same, token by token (mean of "
                f"{len(self._share)} steps), and by their own log-probabilities {self._expected.mean:.0%} would be"
            )
        if same:
            return (
                f"{share:.0%} of the pairs of attempts at one task are the same, token by token, for "
                f"{self._same.steps} steps, and success is {success:.0%}"
            )
        return ""


class LengthExplosion(Rule):
    """Answers are twice as long as at the start while the reward has not risen, or thrice as long as 20 steps ago; each
    for three steps.

    Answers that grow with the reward are how models learn to reason; answers that grow without it are the bias of
    losses that divide by length (Liu et al. 2025, Dr. GRPO), or a policy that has come apart.
    """

    name = "length_explosion"
    advice: ClassVar[str] = (
        "read some of the long answers in episodes/; if they ramble, use algorithm.loss=dr_grpo, a lower learning rate "
        "or a penalty for length"
    )
    GROWN, SUDDEN, STEPS, AGO = 2.0, 3.0, 3, 20

    def __init__(self) -> None:
        self._start = Start()
        self._recent, self._rewards = Recent(self.AGO), Recent(3 * self.AGO)
        self._long, self._sudden = (Lasting(self.STEPS) for _ in range(2))

    def see(self, facts: StepFacts) -> Verdict:
        length, reward = facts.get("response_length/mean"), facts.get("reward/mean")
        if length is None or reward is None:
            return None
        start = self._start(length)
        before = self._recent.median if len(self._recent) >= self.AGO // 2 else None
        self._rewards.add(reward)
        rising = trend(tuple(self._rewards)) > _SIGNIFICANT
        long = self._long(start is not None and length > self.GROWN * start and not rising)
        sudden = self._sudden(before is not None and length > self.SUDDEN * before)
        if not self._sudden.steps:
            self._recent.add(length)  # or an explosion would soon be compared with itself
        if sudden and before is not None:
            return f"answers have {length:,.0f} tokens, and had {before:,.0f} (median of the steps before)"
        if long and start is not None:
            return f"answers have {length:,.0f} tokens, {start:,.0f} at the start, and the reward has not risen"
        return ""


class CutOff(Rule):
    """A limit cuts off more than a fifth of the model calls, or ends more than a fifth of the episodes; at once.

    What is cut off cannot be judged fairly, and a limit that is too small teaches the policy that it cannot succeed
    (DAPO, section 3.4, "overlong reward shaping").
    """

    name = "cut_off"
    advice: ClassVar[str] = (
        "if good attempts need more, raise that key; what an attempt is worth that a limit ended: "
        "astuner.rollout.truncated_reward"
    )
    SHARE = 0.2
    PREFIX = "limits/"

    def see(self, facts: StepFacts) -> Verdict:
        met = {name: facts.get(name) or 0.0 for name in facts.row if name.startswith(self.PREFIX)}
        worst = max(met, key=lambda name: met[name], default="")
        if not met or met[worst] <= self.SHARE:
            return ""
        key = worst.removeprefix(self.PREFIX)
        where = "the model's context, or the max_tokens that the agent asks for" if key == "other" else f"astuner.{key}"
        return f"{met[worst]:.0%} of the model calls or episodes end at a limit: {where}"
