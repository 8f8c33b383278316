"""Create an agent of the installed AgentScope version that answers text with text.

Invariant: importing this module imports nothing that the plugin registers, so listing plugins stays fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

Tool = Callable[..., Any]
"""A function with type hints and a docstring, plain or async, that returns text for the model."""


class ToolAgent(ABC):
    """An agent of the installed AgentScope that calls tools and answers text with text."""

    @abstractmethod
    async def reply(self, text: str, sender: str = "user") -> str:
        """Return the answer to a message; the agent remembers earlier messages."""


def make_tool_agent(
    model: Any, *, name: str, system_prompt: str, tools: Sequence[Tool] = (), max_iters: int = 10
) -> ToolAgent:
    """Create AgentScope's own ReAct agent: `ReActAgent` of 1.x, `Agent` of 2.x.

    It prints nothing, calls its tools without asking for permission, and has no access to the time.

    :param model: Model in training, `ModelTuner`, or any model of the installed AgentScope.
    :param max_iters: Maximum rounds of reasoning and tool calls in a reply; afterwards the agent must answer without
        tools.
    :raises MissingDependency: AgentScope is not installed, or a package that it needs is missing.
    """
    from astuner_agentscope.face import adapter

    agent: ToolAgent = adapter().ReActToolAgent(model, name, system_prompt, tools, max_iters)
    return agent
