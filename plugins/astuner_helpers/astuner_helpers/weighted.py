"""A weighted combination of judges.

Each judge is created and called like the judge of an experiment. An attempt without a verdict from one judge has no
verdict at all, because a sum without one part is a different reward.
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
    """One judge of a weighted combination."""

    judge: str = Field(min_length=1)
    """A registered name, `module->Class` or `path/to/file.py->Class`, as in `task_judge.judge`."""
    weight: float = 1.0
    """Factor of the part's reward. Use a negative weight for a penalty."""
    config: dict[str, Any] | None = None
    """Options of this judge. Default: its section of `astuner.task_judge`."""


class WeightedConfig(Section):
    """Options of the judge `weighted`."""

    judges: dict[str, Part] = Field(min_length=1)
    """Parts by label. The reward of each part is logged as `judge/LABEL`."""
    normalise: bool = True
    """Divide the sum by the sum of the absolute weights, so that rewards from 0 to 1 give a reward from 0 to 1."""
    success: str = "all"
    """Rule of success. `all`: each part with a positive weight must succeed; `any`: one of them must; a label: that
    part must."""

    @model_validator(mode="after")
    def _fits(self) -> WeightedConfig:
        for label in self.judges:
            if label in _RULES or not label or "/" in label:
                raise ValueError(f"{label!r} is not a valid label: use a non-empty text without /, except all and any")
        if not any(part.weight for part in self.judges.values()):
            raise ValueError("all weights are 0; set at least one to another value")
        if self.success not in (*_RULES, *self.judges):
            raise ValueError(f"success: {self.success!r} is unknown; use all, any or one of {', '.join(self.judges)}")
        if self.success in _RULES and not any(part.weight > 0 for part in self.judges.values()):
            raise ValueError("success needs a part with a positive weight; name a part in success: LABEL")
        return self


def weighted(config: WeightedConfig, context: BuildContext) -> Judge:
    """Return the combination: a group judge if one of its parts compares attempts.

    :raises ConfigError, PluginError: A part cannot be found or created, or its options are invalid.
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
    if errors:  # report all errors together
        raise ConfigError([problem for e in errors for problem in problems_of(e)])
    kind = WeightedGroup if any(member.by_group for member in members.values()) else Weighted
    return kind(config, members)


class _Combination:
    """Combine the verdicts of several judges."""

    def __init__(self, config: WeightedConfig, members: Mapping[str, Member]) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # the judge class that this is mixed into
        self._config, self._members = config, dict(members)
        self.wants_evaluation = any(member.wants_evaluation for member in members.values())
        total = math.fsum(abs(part.weight) for part in config.judges.values())
        self._weights = {
            label: part.weight / total if config.normalise else part.weight for label, part in config.judges.items()
        }

    def _verdict(self, said: Mapping[str, JudgeOutput]) -> JudgeOutput:
        """Return the combined verdict.

        :raises JudgeFailed: Two parts give rewards to different agents.
        """
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
            raise JudgeFailed(f"parts of the weighted judge give rewards to different agents ({lists})")
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
    """A combination of judges that judge each attempt separately."""

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> Judge:
        return weighted(section, context)

    async def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        attempt = Attempt(workflow_task=workflow_task, output=output)
        said = await together([_named(label, member.judge(attempt)) for label, member in self._members.items()])
        return self._verdict(dict(zip(self._members, said, strict=True)))


class WeightedGroup(_Combination, GroupJudge):
    """A combination with at least one judge that compares the attempts of a group."""

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
