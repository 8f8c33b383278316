"""Rules for whether there is anything to learn from: rewards that differ, advantages, loss masks."""

from __future__ import annotations

from typing import ClassVar

from astuner_report.sentinel.rule import SOLVED, Lasting, Rule, Severity, StepFacts, Verdict

_EQUAL = 1e-9
"""Rewards closer than this are equal: the rounding of a sum."""
_LOOK = "look at episodes/ in the run folder, then at the judge, the temperature, or tasks of another difficulty"


def _all_equal(facts: StepFacts) -> bool | None:
    low, high = facts.own("adv/reward_min"), facts.own("adv/reward_max")
    return None if low is None or high is None else high - low <= _EQUAL


class ZeroVariance(Rule):
    """Every reward of a step is the same, five steps in a row.

    A comparison of equal rewards gives advantages of 0, so nothing is learned (Shao et al. 2024, equation of GRPO; TRL
    logs it as ``frac_reward_zero_std``).  One such step is ordinary in a batch of a few groups, five are a judge that
    always says the same, or tasks that are all too hard.  Where every episode succeeded the tasks are solved, which is
    no fault: the step's line on the console says so.
    """

    name = "zero_variance"
    per_policy = True
    advice: ClassVar[str] = _LOOK

    def __init__(self) -> None:
        self._lasts = Lasting()

    def see(self, facts: StepFacts) -> Verdict:
        equal = _all_equal(facts)
        if equal is None:
            return None
        reward = facts.own("adv/reward_max")
        if not self._lasts(equal and facts.get("success/mean") != 1):
            return ""
        return f"all rewards{facts.who} of the last {self._lasts.steps} steps are {reward:g}"


class NothingToLearn(Rule):
    """Five steps in a row in which all advantages are 0, or ten in which 90 % of the groups have equal rewards, while
    success is below 90 %.

    The first costs everything, the second most of the generated tokens (DAPO, Yu et al. 2025, section 3.2, draws again
    instead).  Where `zero_variance` says why, this rule is silent; so too where most groups are solved.
    """

    name = "nothing_to_learn"
    per_policy = True
    advice: ClassVar[str] = (
        "read failed attempts in episodes/: if the judge is right about them, the policy tries the same again and "
        "again, so raise astuner.rollout.temperature or num_repeat, or trainer_common.algorithm.entropy_coeff before "
        "it gets there; algorithm.dynamic_sampling=true draws other groups instead"
    )
    WASTED = 0.9
    WASTED_STEPS = 10

    def __init__(self) -> None:
        self._none, self._little = Lasting(), Lasting(self.WASTED_STEPS)

    def see(self, facts: StepFacts) -> Verdict:
        zero = facts.own("adv/zero_frac")
        if zero is None:
            return None
        spoke = facts.own("adv/reward_max") is not None
        explained = _all_equal(facts) or (facts.get("success/mean") or 0.0) >= SOLVED
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
        return ""


class EmptyMasks(Rule):
    """Scored episodes without a single trained token: at once when it is all of them, after five steps when half are.

    Then the loss is a sum over nothing.  It happens when an agent does not ask the model that it was given, when its
    clients go away before the answer, or when all that speaks has ``train: false``.
    """

    name = "empty_masks"
    severity: ClassVar[Severity] = "error"
    advice: ClassVar[str] = (
        "see certificate.json for what became of the tokens (left_out), and `astuner check tokens` for the agent"
    )
    SHARE = 0.5

    def __init__(self) -> None:
        self._half = Lasting()

    def see(self, facts: StepFacts) -> Verdict:
        share, tokens = facts.get("merge/untrained_rollout_frac"), facts.get("tokens/trainable")
        if share is None or tokens is None:
            return None
        generated = facts.get("tokens/generated") or 0.0
        half = self._half(share >= self.SHARE)
        if tokens == 0 and share == 1:
            return f"none of {generated:,.0f} generated tokens is in a loss mask: there is nothing to train"
        if half:
            return (
                f"{share:.0%} of the scored episodes have no token in a loss mask (at least half for "
                f"{self._half.steps} steps)"
            )
        return ""
