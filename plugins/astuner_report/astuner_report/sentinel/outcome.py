"""Rules for what comes of the run: reward without success, failures, gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from astuner_report.sentinel.rule import Lasting, Recent, Rule, Severity, StepFacts, Verdict
from astuner_report.sentinel.statistics import normal_tail, trend, two_proportions

_SIGNIFICANT = 2.326
"""z of a one-sided 1 %."""


class RewardHacking(Rule):
    """The training reward rises, and success on held-out tasks, or another judge's opinion, falls: both beyond chance.

    The reward has to have a rising trend (Mann and Kendall, one-sided 1 %) since the best validation.  The newest two
    validations have to be below the best one, each by a z-test at 1 % over the number of validations so far, since the
    best of many is high by luck (Bonferroni); the tasks being the same, the test is on the safe side.  A metric that
    `sentinel.held_out` names has to have a falling trend over the last 40 steps, over which the reward rises.
    Source of the pattern: Gao et al. 2023, "Scaling laws for reward model overoptimization".
    """

    name = "reward_hacking"
    advice: ClassVar[str] = (
        "read the episodes with the highest rewards (`astuner view`, or `astuner export --where 'reward>=1'`) for what "
        "the judge is taken in by; go back to the best validated checkpoint, mend the judge, or use use_kl_loss"
    )
    WINDOW, LEAST, LONGEST = 40, 20, 200

    def __init__(self, held_out: Sequence[str] = ()) -> None:
        """:param held_out: metrics that should not fall while the reward rises."""
        self._rewards = Recent(self.WINDOW)
        self._others = {name: Recent(self.WINDOW) for name in held_out}
        self._since_best = Recent(self.LONGEST)
        self._best: tuple[float, float, int] | None = None
        """Success, its standard error, and the step."""
        self._validations = 0
        self._fell = Lasting(2)

    def see(self, facts: StepFacts) -> Verdict:
        reward = facts.get("reward/mean")
        if reward is None:
            return None
        self._rewards.add(reward)
        self._since_best.add(reward)
        verdict: Verdict = None
        for name, values in self._others.items():
            if (value := facts.get(name)) is None:
                continue
            values.add(value)
            verdict = verdict or ""
            up, down = trend(tuple(self._rewards)), trend(tuple(values))
            if len(values) >= self.LEAST and up > _SIGNIFICANT and -down > _SIGNIFICANT:
                verdict = (
                    f"over the last {len(values)} steps the reward rises (trend z = {up:.1f}, now {reward:.3g}) and "
                    f"{name} falls (z = {down:.1f}, now {value:.3g})"
                )
        return verdict

    def validated(self, facts: StepFacts) -> Verdict:
        success, low, high = (facts.get(f"val/success{end}") for end in ("", "_ci_low", "_ci_high"))
        if success is None or low is None or high is None:
            return None
        self._validations += 1
        error = (high - low) / (2 * 1.959964)
        if self._best is None or success >= self._best[0]:
            self._best, self._since_best = (success, error, facts.step), Recent(self.LONGEST)
            self._fell(False)
            return ""
        best, best_error, at = self._best
        both = math.hypot(error, best_error)
        p = normal_tail((best - success) / both) if both else 0.0
        up = trend(tuple(self._since_best))
        if not self._fell(p < 0.01 / self._validations and up > _SIGNIFICANT):
            return ""
        return (
            f"held-out success fell from {best:.1%} (step {at}) to {success:.1%} [{low:.1%}, {high:.1%}] (p = {p:.1g}) "
            f"while the training reward rose (trend z = {up:.1f})"
        )


class FailuresRising(Rule):
    """More episodes fail than at the start of the run: 5 % at least over five steps, and beyond chance (z above 3.09).

    Failed episodes are no rewards of 0, they are missing; when they fail for a reason, what is left is a biased sample.
    `rollout.max_failed_share` ends a run much later.
    """

    name = "failures_rising"
    advice: ClassVar[str] = (
        "failures.jsonl in the run folder has every one with its reason, often a service that is too slow or full"
    )
    SHARE, Z, STEPS, START = 0.05, 3.09, 5, 10

    def __init__(self) -> None:
        self._failed, self._episodes = Recent(self.STEPS), Recent(self.STEPS)
        self._start = [0.0, 0.0]
        self._seen = 0

    def see(self, facts: StepFacts) -> Verdict:
        share, episodes = facts.get("rollout/errored_frac"), facts.get("rollout/episodes")
        if share is None or not episodes:
            return None
        self._seen += 1
        if self._seen <= self.START:
            self._start = [self._start[0] + share * episodes, self._start[1] + episodes]
            return ""
        self._failed.add(share * episodes)
        self._episodes.add(episodes)
        if not self._failed.full:
            return ""
        failed, all_of_them = sum(self._failed), sum(self._episodes)
        z = two_proportions((self._start[0], self._start[1]), (failed, all_of_them))
        if failed / all_of_them < self.SHARE or z <= self.Z:
            return ""
        return (
            f"{failed:.0f} of {all_of_them:.0f} episodes of the last {self.STEPS} steps failed "
            f"({failed / all_of_them:.0%}), and {self._start[0] / self._start[1]:.1%} in the first {self.START} steps"
        )


class BadGradients(Rule):
    """A gradient or loss that is not finite, or gradient norms ten times their median in three of five steps.

    A single spike is ordinary and clipped away (`optim.grad_clip`); a series of them comes before a divergence
    (Chowdhery et al. 2022, PaLM, section 5.1; Molybog et al. 2023).  A step that is not finite changes no weights,
    and is lost.
    """

    name = "bad_gradients"
    severity: ClassVar[Severity] = "error"
    per_policy = True
    advice: ClassVar[str] = (
        "lower trainer_common.optim.lr or grad_clip, or train in float32; look at logprob_drift and at the rewards of "
        "these steps (one huge reward makes a huge gradient)"
    )
    SPIKE, OF, SPIKES, WINDOW = 10.0, 5, 3, 20

    def __init__(self) -> None:
        self._norms = Recent(self.WINDOW)
        self._spikes = Recent(self.OF)
        self._had_norm = False
        self._lost = Lasting(1)

    def see(self, facts: StepFacts) -> Verdict:
        norm, skipped = facts.own("grad_norm"), facts.own("skipped_steps") or 0.0
        missing = norm is None and self._had_norm and facts.own("lr") is not None
        if self._lost(bool(skipped) or missing or facts.is_broken("grad_norm") or facts.is_broken("loss")):
            how = f"{skipped:.0f} optimizer steps were" if skipped else "the update was"
            return f"{how} left out{facts.who}, since the loss or its gradient was not finite"
        if norm is None:
            return None
        self._had_norm = True
        usual = self._norms.median if len(self._norms) >= self.WINDOW // 2 else math.inf
        is_spike = 0 < self.SPIKE * usual < norm
        self._spikes.add(float(is_spike))
        if not is_spike:
            self._norms.add(norm)
        if is_spike and sum(self._spikes) >= self.SPIKES:
            return (
                f"the gradient norm{facts.who} is {norm:.3g}, {self.SPIKE:g} times its median ({usual:.3g}) or more in "
                f"{sum(self._spikes):.0f} of the last {self.OF} steps"
            )
        return ""
