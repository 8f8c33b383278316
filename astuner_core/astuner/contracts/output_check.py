"""Input of output checks: one reply and the tools offered for it.

Invariant: a view never raises. A field that is missing or has an unexpected type reads as empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

_TAGS = {"<tool_call>": "</tool_call>", "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>"}
"""Opening -> closing tag of calls, in families with tags. In other families, the JSON itself delimits calls."""
_JSON = re.compile(r"\{|\[(?![A-Z_])")
"""Start of a JSON value, but not Mistral's ``[TOOL_CALLS]``."""


@dataclass(frozen=True, eq=False)
class OutputView(Mapping[str, Any]):
    """One reply of the model.

    The view is also a mapping with the contents of the message, so a check can treat it as an OpenAI-style message.
    """

    message: Mapping[str, Any]
    """OpenAI-style assistant message. `unparsed_tool_calls` lists calls that could not be parsed, and calls inside
    reasoning that ends the reply."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """OpenAI-style descriptions of the offered tools; None if unknown."""
    cut_off: bool = False
    """Whether the token limit or the caller's stop string, not the model, ended the reply.

    An incomplete last call is then in neither `text` nor `unparsed_tool_calls`, because it is not the model's error.
    The same applies to calls inside truncated reasoning, which the model may only have considered.
    """

    def __getitem__(self, key: str) -> Any:
        return self.message[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.message)

    def __len__(self) -> int:
        return len(self.message)

    @property
    def text(self) -> str:
        """Return the text of the reply, without reasoning and tool calls."""
        text = _text(self.message.get("content"))
        return text.rstrip().removesuffix(unfinished) if (unfinished := self._unfinished) else text

    @property
    def reasoning(self) -> str:
        """Return the reasoning, if the model's family marks it."""
        return _text(self.message.get("reasoning_content"))

    @property
    def written(self) -> tuple[str, ...]:
        """Return the nonempty texts of the reply: reasoning and text.

        Arguments of valid tool calls are excluded, because the tool checks them.
        """
        return tuple(text for text in (self.reasoning, self.text) if text)

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """Return the parsed calls in OpenAI's format."""
        return _mappings(self.message.get("tool_calls"))

    @property
    def unparsed_tool_calls(self) -> Sequence[str]:
        """Return calls that could not be parsed, as the model wrote them."""
        return self._broken[:-1] if self._unfinished else self._broken

    @property
    def _broken(self) -> list[str]:
        if self.cut_off and self.reasoning and not _text(self.message.get("content")).strip():
            return []
        broken = self.message.get("unparsed_tool_calls")
        return [str(text) for text in broken] if isinstance(broken, (list, tuple)) else []

    @property
    def _unfinished(self) -> str:
        """Return the incomplete call at the end of a truncated reply, or an empty string."""
        last = "".join(self._broken[-1:]).strip() if self.cut_off else ""
        return last if last and _is_unfinished(last, _text(self.message.get("content"))) else ""


Check: TypeAlias = Callable[[OutputView], "str | None"]
"""Returns a description of the problem, starting with the check's name and a colon, or None."""


def _is_unfinished(call: str, text: str) -> bool:
    """Return whether ``call`` ends ``text`` and lacks its closing tag or, without tags, its last bracket."""
    if not text.rstrip().endswith(call):
        return False
    for opening, closing in _TAGS.items():
        if call.startswith(opening):
            return not call.endswith(closing)
    start = _JSON.search(call)
    try:
        json.loads(call[start.start() :].removesuffix("<|end|>") if start else "")
    except (ValueError, RecursionError):
        return True
    return False


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, (list, tuple)) else []
