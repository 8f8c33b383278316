"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_diagnoses() -> dict[str, Provider]:
    return {"agentscope": Provider(target="astuner_agentscope.diagnosis:findings", summary="AgentScope, what it needs")}


@hookimpl
def register_parts() -> dict[str, Provider]:
    return {
        "agentscope": Provider(
            target="astuner_agentscope.face:AgentScopeModels",
            summary="an episode's model as an AgentScope agent takes one, 1.x and 2.x",
        ),
    }
