"""A weighted combination of judges.

Each is made and asked as if it were the experiment's own.  A reward that lacks a part would be another reward, so an
attempt that one of them has no verdict on has none at all.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator

from astuner.contracts.building import BuildContext
from astuner.contracts.errors import AstunerError, ConfigError, JudgeFailed, PluginError, problems_of
from astuner.contracts.judge import Attempt, GroupJudge, Judge
from astuner.contracts.section import Section
from astuner.contracts.types import JudgeOutput, WorkflowOutput, WorkflowTask
from astuner_helpers.members import Member, together

_RULES = ("all", "any")
_WHERE = "astuner.task_judge.weighted.judges"


class Part(Section):
    judge: str = Field(min_length=1)
    """A registered name, `module->Class` or `path/to/file.py->Class`, as `task_judge.judge`."""
    weight: float = 1.0
    """What its reward is multiplied with; a penalty has one below 0."""
    config: dict[str, Any] | None = None
    """Its options; null: those of `astuner.task_judge.NAME`, so that two parts with the same judge can differ."""


class WeightedConfig(Section):
    judges: dict[str, Part] = Field(min_length=1)
    """The parts by a label of your own; the reward of each is logged as `judge/LABEL`."""
    normalise: bool = True
    """Divide the sum by the sum of the weights' sizes, so that rewards of 0 to 1 give a reward of 0 to 1."""
    success: str = "all"
    """When an attempt is a success: `all` parts of a weight above 0 say so, `any` of them does, or the part LABEL."""

    @model_validator(mode="after")
    def _fits(self) -> WeightedConfig:
        for label in self.judges:
            if label in _RULES or not label or "/" in label:
                raise ValueError(f"{label!r} is no label: not empty, without /, and other than all and any")
        if not any(part.weight for part in self.judges.values()):
            raise ValueError("every weight is 0, so every reward would be")
        if self.success not in (*_RULES, *self.judges):
            raise ValueError(f"success: {self.success!r} is none of all, any, {', '.join(self.judges)}")
        if self.success in _RULES and not any(part.weight > 0 for part in self.judges.values()):
            raise ValueError("success needs a part with a weight above 0; name one in success: LABEL")
        return self


def weighted(config: WeightedConfig, context: BuildContext) -> Judge:
    """The combination: one that compares attempts if one of its parts does.

    :raises ConfigError, PluginError: a part cannot be found or made, or its options are wrong.
    """
    members: dict[str, Member] = {}
    errors: list[AstunerError] = []
    for label, part in config.judges.items():
        try:
            members[label] = Member.build(context, part.judge, part.config, where=f"{_WHERE}.{label}")
        except (ConfigError, PluginError) as e:
            errors.append(e)
    if len(errors) == 1:
        raise errors[0]
    if errors:  # all mistakes at once
        raise ConfigError([problem for e in errors for problem in problems_of(e)])
    kind = WeightedGroup if any(member.by_group for member in members.values()) else Weighted
    return kind(config, members)


class _Combination:
    """What an attempt is worth, from what its judges say."""

    def __init__(self, config: WeightedConfig, members: Mapping[str, Member]) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # the judge that this is mixed into
        self._config, self._members = config, dict(members)
        self.wants_evaluation = any(member.wants_evaluation for member in members.values())
        total = math.fsum(abs(part.weight) for part in config.judges.values())
        self._weights = {
            label: part.weight / total if config.normalise else part.weight for label, part in config.judges.items()
        }

    def _verdict(self, said: Mapping[str, JudgeOutput]) -> JudgeOutput:
        """:raises JudgeFailed: two parts tell other agents apart."""
        metrics = {f"{label}/{name}": value for label, v in said.items() for name, value in v.metrics.items()}
        metrics |= {label: verdict.reward for label, verdict in said.items()}
        is_success = self._is_success(said)
        if names := self._agents(said):
            rewards = {name: self._sum({k: v.rewards.get(name, v.reward) for k, v in said.items()}) for name in names}
            return JudgeOutput.per_agent(rewards, is_success=is_success, metrics=metrics)
        reward = self._sum({label: verdict.reward for label, verdict in said.items()})
        return JudgeOutput(reward=reward, is_success=is_success, metrics=metrics)

    def _sum(self, rewards: Mapping[str, float]) -> float:
        return math.fsum(self._weights[label] * reward for label, reward in rewards.items())

    def _agents(self, said: Mapping[str, JudgeOutput]) -> tuple[str, ...]:
        found = {label: tuple(sorted(v.rewards)) for label, v in said.items() if v.rewards}
        if len(set(found.values())) > 1:
            lists = "; ".join(f"{label}: {', '.join(names)}" for label, names in found.items())
            raise JudgeFailed(f"the parts of the weighted judge give rewards to different agents ({lists})")
        return next(iter(found.values()), ())

    def _is_success(self, said: Mapping[str, JudgeOutput]) -> bool:
        rule = self._config.success
        if rule not in _RULES:
            return said[rule].succeeded
        counted = [v.succeeded for label, v in said.items() if self._config.judges[label].weight > 0]
        return all(counted) if rule == "all" else any(counted)


async def _named(label: str, verdict: Awaitable[JudgeOutput]) -> JudgeOutput:
    try:
        return await verdict
    except JudgeFailed as e:
        raise JudgeFailed(f"{label}: {e}") from e


class Weighted(_Combination, Judge):
    """A combination of judges that judge each attempt alone."""

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> Judge:
        return weighted(section, context)

    async def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        attempt = Attempt(workflow_task=workflow_task, output=output)
        said = await together([_named(label, member.judge(attempt)) for label, member in self._members.items()])
        return self._verdict(dict(zip(self._members, said, strict=True)))


class WeightedGroup(_Combination, GroupJudge):
    """A combination in which some judge compares the attempts of a group."""

    async def judge_group(self, attempts: Sequence[Attempt]) -> list[JudgeOutput | JudgeFailed]:
        said = await together([member.judge_group(attempts) for member in self._members.values()])
        return [self._one(dict(zip(self._members, column, strict=True))) for column in zip(*said, strict=True)]

    def _one(self, said: Mapping[str, JudgeOutput | JudgeFailed]) -> JudgeOutput | JudgeFailed:
        verdicts: dict[str, JudgeOutput] = {}
        for label, verdict in said.items():
            if isinstance(verdict, JudgeFailed):
                return JudgeFailed(f"{label}: {verdict}")
            verdicts[label] = verdict
        try:
            return self._verdict(verdicts)
        except JudgeFailed as e:
            return e
