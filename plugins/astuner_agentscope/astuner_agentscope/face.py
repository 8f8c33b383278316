"""``model=model_tuner`` and ``as_agentscope_model()``, for whichever AgentScope is installed.

1.x hands a model dictionaries and 2.x hands it message objects, so each has an adapter of its own (`agentscope1`,
`agentscope2`); which one applies is read from the installed package's metadata, and nothing of AgentScope is
imported before a model is asked for.

Invariant: an adapter translates and nothing else.  Whatever it is asked with goes to `ModelTuner.chat`, or is
refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from astuner.chat.errors import UnsupportedRequest
from astuner.contracts.errors import MissingDependency

if TYPE_CHECKING:
    from astuner.rollout.model_tuner import ModelTuner

HONOURED = ("max_tokens", "seed", "stop", "temperature", "top_p")
"""The keywords of a call that are passed on; `ModelTuner.chat` says which of them training forbids."""

_INSTALL = (
    "install one: pip install 'astuner-agentscope[v1]' (AgentScope 1.x: ReActAgent), or "
    "pip install 'astuner-agentscope[v2]' (AgentScope 2.x: Agent; Python 3.11 or newer)"
)


class AgentScopeFace:
    """What an AgentScope agent looks for on its model, so that `ModelTuner` itself can be one.

    1.x asks for ``model_name``, ``stream`` and a call; the other names are 2.x's.
    """

    agent_name: str
    model_name = model = "astuner"
    stream = False
    """True is honoured: the answer then comes as a stream, all of it in one piece."""

    async def __call__(self, *args: Any, **options: Any) -> Any:
        """Answer as the model of an AgentScope agent: ``model=model_tuner``.

        :returns: an ``agentscope.model.ChatResponse`` whose id names the turn.
        :raises astuner.contracts.errors.MissingDependency: AgentScope is not installed, or a package that it needs is
            not.
        """
        face = self._face
        face.stream = self.stream
        return await face(*args, **options)

    def as_agentscope_model(self, agent_name: str | None = None, role: str | None = None) -> Any:
        """An ``agentscope.model.ChatModelBase``, of 1.x or 2.x, that speaks for one agent of this episode.

        On 2.x its ``formatter`` may be replaced, as with any model there.

        :param agent_name: whose conversation this is; the tuner's own name by default.
        :param role: the entry of ``astuner.agents`` that applies; the agent's name by default.
        :raises astuner.contracts.errors.MissingDependency: AgentScope is not installed, or a package that it needs is
            not.
        """
        return _adapter().make_model(cast("ModelTuner", self), agent_name or self.agent_name, role)

    @property
    def formatter(self) -> Any:
        """AgentScope 2.x: turns its messages into the dictionaries that `ModelTuner.chat` takes."""
        return self._face.formatter

    @property
    def context_size(self) -> int:
        """AgentScope 2.x: in tokens; so large that the agent never shortens its history by itself."""
        size: int = self._face.context_size
        return size

    async def count_tokens(self, *args: Any, **options: Any) -> int:
        """AgentScope 2.x: its own estimate of a request's length."""
        count: int = await self._face.count_tokens(*args, **options)
        return count

    async def generate_structured_output(self, *args: Any, **options: Any) -> Any:
        """AgentScope 2.x: one attempt at an object of a schema, which is never enforced."""
        face = self._face
        face.stream = self.stream
        return await face.generate_structured_output(*args, **options)

    @functools.cached_property
    def _face(self) -> Any:
        return self.as_agentscope_model()


def wanted(options: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call that say something.

    :raises UnsupportedRequest: there is one that would change the answer and is not honoured.
    """
    said = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(said.keys() - set(HONOURED)):
        raise UnsupportedRequest(
            f"model_tuner does not honour {', '.join(unknown)} (only {', '.join(HONOURED)}); "
            f"leave it out, or set it for the whole run under astuner.rollout"
        )
    return said


@functools.cache
def _adapter() -> ModuleType:
    try:
        version = metadata.version("agentscope")
    except metadata.PackageNotFoundError:
        raise MissingDependency(f"model=model_tuner needs AgentScope, which is not installed; {_INSTALL}") from None
    major = version.partition(".")[0]
    if major == "1":
        from astuner_agentscope import agentscope1

        return agentscope1
    if major == "2":
        from astuner_agentscope import agentscope2

        return agentscope2
    raise MissingDependency(f"model=model_tuner speaks to AgentScope 1.x and 2.x, not to {version}; {_INSTALL}")
