"""Implement a player as an AgentScope agent whose conversation only grows.

What others say at the table is kept until the player is asked. Then it becomes one user message ("Player 2: …"),
followed by the player's own answer. So every request begins with the previous request and its answer, and a game is one
training sequence per player. AgentScope's multi-agent formatters rewrite the history at every turn instead, and each
turn becomes a separate sequence: see the README.
"""

from __future__ import annotations

from typing import Any

from astuner.contracts.errors import ContextOverflow, TurnLimitReached
from astuner_agentscope import make_tool_agent

MODERATOR = "Moderator"


class Player:
    """Player with a private conversation.

    :param rules: System prompt, visible only to this player.
    :param model: AgentScope chat model, e.g. ``model_tuner.as_agentscope_model(name, role)``.
    """

    def __init__(self, name: str, rules: str, model: Any) -> None:
        self.name = name
        self.rules = rules
        self.agent = make_tool_agent(model, name=name, system_prompt=rules)
        self.heard: list[str] = []
        self.is_silent = False
        """Whether the player stays silent because its context or its model calls are used up."""

    def hear(self, speaker: str, text: str) -> None:
        """Store a message until this player's next turn."""
        self.heard.append(text if speaker == MODERATOR else f"{speaker}: {text}")

    async def answer(self, question: str) -> str:
        """Answer the moderator, given everything heard since the last answer."""
        self.hear(MODERATOR, question)
        if self.is_silent:
            return ""
        heard, self.heard = "\n".join(self.heard), []
        try:
            return await self.agent.reply(heard, "table")
        except (ContextOverflow, TurnLimitReached):  # the game continues, and the episode's stop reason reports it
            self.is_silent = True
            return ""
