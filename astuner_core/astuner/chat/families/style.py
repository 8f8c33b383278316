"""The words in which a family is described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from astuner.chat.tool_calls import ReadCalls, ToolCall, Tools

ReadReply: TypeAlias = Callable[[str, Tools], "Read"]


@dataclass(frozen=True)
class Read:
    """A reply, taken apart."""

    reasoning: str
    content: str
    calls: list[ToolCall]
    broken: list[str]
    """Blocks that look like calls and cannot be read; they are part of `content` as well."""


@dataclass(frozen=True)
class CallStyle:
    """One way to write tool calls."""

    name: str
    read: Callable[[str, Tools], ReadCalls]
    """Given a reply without its reasoning, and the tools that may be called."""
    one_call: bool = False
    """Whether a reply holds at most one call."""
    one_text: bool = False
    """Whether the chat template takes only one of content and reasoning beside a call."""
    short_ids: bool = False
    """Whether the chat template wants ids of nine letters or digits."""

    @classmethod
    def of_replies(cls, name: str, read: ReadReply, *, one_call: bool = False, one_text: bool = False) -> CallStyle:
        """The style of a family that reads whole replies."""

        def calls(text: str, tools: Tools) -> ReadCalls:
            found = read(text, tools)
            return found.content, found.calls, found.broken

        return cls(name, calls, one_call=one_call, one_text=one_text)


@dataclass(frozen=True)
class Family:
    """The conventions of a model family."""

    name: str
    asks: str
    """What the generation prompt begins with; empty where the template writes none."""
    closes: tuple[str, ...] = ()
    """Tokens that close a turn. One of them stands behind a reply in history; they mean the same there."""
    follows: tuple[str, ...] = ()
    """Where nothing closes a turn: the tokens that what follows begins with."""
    stops: tuple[str, ...] = ()
    """Tokens at which the model's turn is over; those that the tokenizer does not have are left out."""
    asked: str = ""
    """What the text in front of a reply ends with, where there is no generation prompt."""
    styles: tuple[CallStyle, ...] = ()
    """Ways to write calls that are tried on what the template renders; none: calls are not supported."""
    channels: ReadReply | None = None
    """Reads whole replies, in families that write reasoning, text and calls as messages of their own."""
