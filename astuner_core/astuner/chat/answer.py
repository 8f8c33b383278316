"""One answer of a model, in the words that agents use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from astuner.contracts.types import Turn


class TokenLogprob(NamedTuple):
    """One token of an answer."""

    text: str
    """Bytes that are no UTF-8 by themselves read as U+FFFD."""
    logprob: float


@dataclass(frozen=True, kw_only=True)
class ChatReply:
    """One answer, of the model in training or (`turn` is None) of a model outside of the run."""

    message: Mapping[str, Any]
    """The OpenAI-style assistant message; ``content`` is always a string."""
    finish_reason: str
    """In OpenAI's words: ``length``, ``tool_calls`` or ``stop``."""
    prompt_tokens: int
    completion_tokens: int
    turn_index: int
    """Its place in the episode."""
    reply_id: str
    """Episode and turn; an attempt that was started over uses its ids again."""
    turn: Turn | None = None
    """What was recorded."""
    stop_sequence: str | None = None
    """The caller's stop string that ended the answer."""
    structured: Mapping[str, Any] | None = None
    """What the model gave in the structure that was asked for (``response_schema``); None if it did not."""
    _decode: Callable[[Sequence[int]], str] = field(default=lambda ids: "", repr=False, compare=False)
    """The text of token ids; needed where there is a `turn`."""

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

    def beginning(self, tokens: int) -> str:
        """The text of the first ``tokens`` tokens that were generated; empty for a model outside of the run."""
        return "" if self.turn is None else self._decode(self.turn.generation.response_ids[:tokens])

    def token_logprobs(self) -> list[TokenLogprob]:
        """Every token that was generated, the end token included; empty for a model outside of the run."""
        if self.turn is None:
            return []
        made = self.turn.generation
        pairs = zip(made.response_ids, made.logprobs, strict=True)
        return [TokenLogprob(self._decode([token]), logprob) for token, logprob in pairs]
