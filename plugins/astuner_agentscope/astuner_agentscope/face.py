"""Implement ``model=model_tuner`` and ``as_agentscope_model()`` for the installed AgentScope.

1.x passes dictionaries to a model and 2.x passes message objects, so each has its own adapter (`agentscope1`,
`agentscope2`). The metadata of the installed package selects the adapter; AgentScope is imported only when a model is
requested.

Invariant: an adapter only translates. Every argument is passed to `ModelTuner.chat` or rejected by name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import MissingDependency, UnsupportedRequest
from astuner.contracts.parts import AgentScopePart

if TYPE_CHECKING:
    from collections.abc import Callable

    from astuner import ModelTuner, WorkflowOutput
    from astuner.contracts.parts import Waiting

HONOURED = ("max_tokens", "seed", "stop", "temperature", "top_p")
"""Keywords that are passed on. `ModelTuner.chat` checks which of them training forbids."""

_INSTALL = (
    "Install one: pip install 'astuner-agentscope[agentscope2]' (AgentScope 2.x: Agent; Python 3.11 or newer), or "
    "pip install 'astuner-agentscope[agentscope1]' (AgentScope 1.x: ReActAgent)"
)


class AgentScopeModels(AgentScopePart):
    """Implement the part ``agentscope``."""

    def make_model(self, tuner: ModelTuner, agent_name: str, role: str | None) -> Any:
        return adapter().model_class()(tuner, agent_name, role)

    def find_waiting(self, model: Any, output: WorkflowOutput) -> Waiting | None:
        find: Callable[[WorkflowOutput], Waiting | None] | None = getattr(model, "find_waiting", None)  # not in 1.x
        return None if find is None else find(output)


def wanted(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call that are set.

    :raises UnsupportedRequest: A keyword would change the answer and is not supported.
    """
    said = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(said.keys() - set(HONOURED)):
        raise UnsupportedRequest(
            f"model_tuner does not support {', '.join(unknown)} (only {', '.join(HONOURED)}). "
            f"Leave it out, or set it for the entire run under astuner.rollout"
        )
    return said


@functools.cache
def adapter() -> ModuleType:
    """Return the module for the installed AgentScope.

    :raises MissingDependency: AgentScope is not installed, or is neither 1.x nor 2.x.
    """
    try:
        version = metadata.version("agentscope")
    except metadata.PackageNotFoundError:
        raise MissingDependency(f"model=model_tuner needs AgentScope, which is not installed. {_INSTALL}") from None
    major = version.partition(".")[0]
    if major == "1":
        from astuner_agentscope import agentscope1

        return agentscope1
    if major == "2":
        from astuner_agentscope import agentscope2

        return agentscope2
    raise MissingDependency(f"model=model_tuner supports AgentScope 2.x and 1.x, not {version}. {_INSTALL}")
