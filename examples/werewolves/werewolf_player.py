"""A player: an AgentScope agent whose conversation only ever grows.

What others say at the table arrives by `observe` and is kept until the player is asked; then all of it becomes one
user message ("Player 2: …"), followed by the player's own answer.  So every request begins with the whole previous
request and its answer, and a game is one training sequence per player.  AgentScope's multi-agent formatters write
the history anew at every turn instead, and each turn becomes a sequence of its own: see the README.
"""

from __future__ import annotations

import asyncio
from typing import Any

from agentscope.agent import AgentBase
from agentscope.formatter import FormatterBase, OpenAIChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg, TextBlock

from astuner.contracts.errors import ContextOverflow, TurnLimitReached

MODERATOR = "Moderator"


class Player(AgentBase):
    """One seat at the table.

    :param rules: the system prompt; nobody else sees it.
    :param model: an AgentScope chat model, e.g. ``model_tuner.as_agentscope_model(name, role)``.
    """

    def __init__(self, name: str, rules: str, model: Any, formatter: FormatterBase | None = None) -> None:
        super().__init__()
        self.name = name
        self.model = model
        self.formatter = formatter or OpenAIChatFormatter()
        self.rules = Msg("system", rules, "system")
        self.memory = InMemoryMemory()
        self.heard: list[str] = []
        self.is_silent = False
        """The context is full, or all model calls are used up: nothing more comes from this player."""
        self.set_console_output_enabled(False)

    async def observe(self, msg: Msg | list[Msg] | None) -> None:
        """Hear what somebody said."""
        for one in [msg] if isinstance(msg, Msg) else msg or []:
            text = one.get_text_content() or ""
            self.heard.append(text if one.name == MODERATOR else f"{one.name}: {text}")

    async def reply(self, question: Msg) -> Msg:
        """Answer the moderator, knowing all that was heard."""
        await self.observe(question)
        answer = "" if self.is_silent else await self._ask()
        return Msg(self.name, [TextBlock(type="text", text=answer)], "assistant")

    async def _ask(self) -> str:
        history = [*await self.memory.get_memory(), Msg("table", "\n".join(self.heard), "user")]
        try:
            response = await self.model(await self.formatter.format([self.rules, *history]))
        except (ContextOverflow, TurnLimitReached):  # the game goes on, and the episode's stop reason says it
            self.is_silent = True
            return ""
        answer = "".join(block["text"] for block in response.content if block["type"] == "text")
        self.heard.clear()
        # Kept as a block even if it is empty: an answer that is missing from the history would begin a new branch.
        await self.memory.add([history[-1], Msg(self.name, [TextBlock(type="text", text=answer)], "assistant")])
        return answer

    async def handle_interrupt(self, *args: Any, **kwargs: Any) -> Msg:
        """AgentScope calls this when the task is cancelled, i.e. the episode is over: then it stays cancelled."""
        raise asyncio.CancelledError
