"""Agents, roles and policies of an experiment, and the models and sampling parameters of its episodes.

If ``astuner.agents`` is empty, all agents share one role and one policy, and all are trained. Otherwise each agent is
identified by the role passed with the model, or by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from astuner.config.capabilities import policies_of
from astuner.config.schema import AgentSection, AstunerSection
from astuner.contracts.errors import UnsupportedRequest
from astuner.contracts.types import DEFAULT_POLICY, DEFAULT_ROLE, Episode, SamplingParams, Split, WorkflowTask

if TYPE_CHECKING:
    from astuner.chat.codec import ChatCodec
    from astuner.config import Config
    from astuner.contracts.backbone import InferenceEngine
    from astuner.rollout.runner import EpisodeRunner

_EVERYBODY = AgentSection()


@dataclass(frozen=True)
class AgentRegistry:
    """The agents of an experiment."""

    agents: Mapping[str, AgentSection] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: AstunerSection) -> AgentRegistry:
        return cls(settings.agents)

    def find(self, agent_name: str, role: str | None) -> tuple[str, AgentSection]:
        """Return the role of an agent and its entry.

        :raises UnsupportedRequest: No entry applies.
        """
        if not self.agents:
            return role or DEFAULT_ROLE, _EVERYBODY
        for name in (role,) if role else (agent_name, DEFAULT_ROLE):
            if name in self.agents:
                return name, self.agents[name]
        who = f"the role {role!r}" if role else f"the agent {agent_name!r}"
        raise UnsupportedRequest(
            f"astuner.agents has no entry for {who} (only {', '.join(self.agents)}). Add one, or give the agent one of "
            "these roles: model_tuner.as_agentscope_model(agent_name=…, role=…)"
        )

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies of all agents, in the order of the config."""
        return policies_of(self.agents) or (DEFAULT_POLICY,)

    @property
    def trained_policies(self) -> tuple[str, ...]:
        """Policies that are trained: at least one trained agent uses them."""
        return policies_of(self.agents, only_trained=True)


@dataclass(frozen=True)
class PolicyModel:
    """An engine with its codec."""

    engine: InferenceEngine
    codec: ChatCodec


Models: TypeAlias = Mapping[str, PolicyModel]
"""Policy name -> model."""


class EpisodeHost(Protocol):
    """Where episodes run: this process, or the workers of a cluster."""

    async def run(self, workflow_task: WorkflowTask, sampling: SamplingParams) -> Episode:
        """Run one attempt, as `EpisodeRunner.run`. Cancellation ends the episode."""

    async def judge_group(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        """Judge a group, as `EpisodeRunner.judge_group`."""


@dataclass(frozen=True)
class EpisodesHere:
    """An `EpisodeHost` that runs episodes in this process."""

    runner: EpisodeRunner
    models: Models

    async def run(self, workflow_task: WorkflowTask, sampling: SamplingParams) -> Episode:
        return await self.runner.run(workflow_task, self.models, sampling)

    async def judge_group(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        return await self.runner.judge_group(episodes)


def one_model(engine: InferenceEngine, codec: ChatCodec) -> Models:
    """Return the models of an experiment with one policy."""
    return {DEFAULT_POLICY: PolicyModel(engine, codec)}


def sampling_for(config: Config, split: Split) -> SamplingParams:
    """Return the sampling parameters of a split.

    Training uses `rollout.temperature`, `top_p` and `top_k`; validation uses the keys in `rollout.val_kwargs`.
    """
    rollout = config.astuner.rollout
    how = rollout if split is Split.TRAIN else rollout.val_kwargs
    return SamplingParams(
        max_tokens=rollout.max_response_length_in_one_turn,
        temperature=how.temperature,
        top_p=how.top_p,
        top_k=how.top_k,
    )
