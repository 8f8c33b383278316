"""What a helper model gave, and what it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class HelperAnswer:
    """One answer of a helper model."""

    text: str
    data: Any = None
    """The validated instance of the model that was asked for; None where none was."""
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    """Of the request that gave the answer, in the money of `price`; 0 for one that was taken from the cache."""
    cached: bool = False
    seconds: float = 0.0
    """What the request took; 0 for an answer that was taken from the cache."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a scope (a run folder, a command's output folder) used of one helper model."""

    calls: int = 0
    """Requests that were sent, those that failed included."""
    cached: int = 0
    """Answers that were taken from the cache instead."""
    failed: int = 0
    """Requests among `calls` that brought no answer."""
    estimated: int = 0
    """Requests among `calls` whose tokens are estimated, since nobody told them."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __str__(self) -> str:
        """``12 calls (1 failed), 30 from the cache, 4500 tokens, cost 0.021``."""
        failed = f" ({self.failed} failed)" if self.failed else ""
        guessed = f" ({self.estimated} of the calls estimated)" if self.estimated else ""
        cost = f", cost {self.cost:.6g}" if self.cost else ""
        calls = "1 call" if self.calls == 1 else f"{self.calls} calls"
        return f"{calls}{failed}, {self.cached} from the cache, {self.tokens} tokens{guessed}{cost}"
