"""Who is who in an episode: which entry of ``astuner.agents`` applies to an agent, and what follows from it.

While ``astuner.agents`` is empty, all agents have one role and one policy, and all train.  Otherwise an agent must be
told from the others: by a role that it is given where the model is handed out, or by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from astuner.config.consistency import policies_of
from astuner.config.schema import Agent, Astuner
from astuner.contracts.errors import UnsupportedRequest
from astuner.contracts.types import DEFAULT_POLICY, DEFAULT_ROLE

_EVERYBODY = Agent()


@dataclass(frozen=True)
class AgentRegistry:
    """The agents of an experiment."""

    agents: Mapping[str, Agent] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Astuner) -> AgentRegistry:
        return cls(settings.agents)

    def find(self, agent_name: str, role: str | None) -> tuple[str, Agent]:
        """The role of an agent, and its entry.

        :raises UnsupportedRequest: nothing says which entry applies.
        """
        if not self.agents:
            return role or DEFAULT_ROLE, _EVERYBODY
        for name in (role,) if role else (agent_name, DEFAULT_ROLE):
            if name in self.agents:
                return name, self.agents[name]
        who = f"the role {role!r}" if role else f"the agent {agent_name!r}"
        raise UnsupportedRequest(
            f"astuner.agents has no entry for {who} (only {', '.join(self.agents)}); add one, or give the agent one of "
            "these roles: model_tuner.as_agentscope_model(agent_name=…, role=…)"
        )

    @property
    def policies(self) -> tuple[str, ...]:
        """Every policy that speaks for somebody, in the order of the config."""
        return policies_of(self.agents) or (DEFAULT_POLICY,)

    @property
    def trained_policies(self) -> tuple[str, ...]:
        """Those that learn: at least one agent that trains speaks with them."""
        return policies_of(self.agents, only_trained=True)
