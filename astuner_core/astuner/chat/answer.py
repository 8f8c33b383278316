"""One answer of the model, in the words that agents use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astuner.types import FinishReason, Turn


@dataclass(frozen=True)
class ChatReply:
    """One answer of the model."""

    turn: Turn

    @property
    def message(self) -> Mapping[str, Any]:
        """The OpenAI-style assistant message; ``content`` is always a string."""
        return self.turn.message

    @property
    def text(self) -> str:
        text: str = self.message["content"]
        return text

    @property
    def reasoning(self) -> str:
        """What the model thought, where its family marks that; else empty."""
        reasoning: str = self.message.get("reasoning_content", "")
        return reasoning

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        calls: Sequence[Mapping[str, Any]] = self.message.get("tool_calls", ())
        return calls

    @property
    def unparsed_tool_calls(self) -> Sequence[str]:
        """Tool calls that were begun but cannot be read, as the model wrote them."""
        broken: Sequence[str] = self.message.get("unparsed_tool_calls", ())
        return broken

    @property
    def finish_reason(self) -> str:
        """In OpenAI's words: ``length``, ``tool_calls`` or ``stop``."""
        if self.turn.generation.finish_reason is not FinishReason.STOP:
            return "length"
        return "tool_calls" if self.tool_calls else "stop"

    @property
    def prompt_tokens(self) -> int:
        return len(self.turn.generation.prompt_ids)

    @property
    def completion_tokens(self) -> int:
        return len(self.turn.generation.response_ids)
