"""What a check gets to see: one reply, and the tools that were offered for it.

Invariant: a view never raises.  A field that the message lacks, or that is not of the usual type, reads as empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

_TAGS = {"<tool_call>": "</tool_call>", "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>"}
"""What begins and ends a call, or a row of calls, in the families that write it; in the others, the JSON does."""
_JSON = re.compile(r"\{|\[(?![A-Z_])")
"""Not Mistral's ``[TOOL_CALLS]``."""


@dataclass(frozen=True, eq=False)
class OutputView(Mapping[str, Any]):
    """One reply of the model.

    It is also the message itself, as a mapping, so a check may be written for a plain OpenAI-style message.
    """

    message: Mapping[str, Any]
    """The OpenAI-style assistant message; `unparsed_tool_calls` lists calls that were begun but cannot be read, and
    calls inside a thought that nothing follows."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """The OpenAI-style descriptions of the tools that were offered; None when nobody said which."""
    cut_off: bool = False
    """Whether something else than the model ended the reply: the limit of tokens, or the caller's stop string.

    A last call that was still being written then is in neither `text` nor `unparsed_tool_calls`: it is no mistake.
    Nor are the calls inside a thought that was cut off: the model may have only considered them.
    """

    def __getitem__(self, key: str) -> Any:
        return self.message[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.message)

    def __len__(self) -> int:
        return len(self.message)

    @property
    def text(self) -> str:
        """What the model said, without reasoning and tool calls."""
        text = _text(self.message.get("content"))
        return text.rstrip().removesuffix(unfinished) if (unfinished := self._unfinished) else text

    @property
    def reasoning(self) -> str:
        """What the model thought, where its family marks that."""
        return _text(self.message.get("reasoning_content"))

    @property
    def written(self) -> tuple[str, ...]:
        """The texts that the model wrote freely: its reasoning and what it said, those that are not empty.

        Not the arguments of tool calls that can be read: they are data, and the tool's to judge.
        """
        return tuple(text for text in (self.reasoning, self.text) if text)

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """The calls that could be read, as OpenAI writes them."""
        return _mappings(self.message.get("tool_calls"))

    @property
    def unparsed_tool_calls(self) -> Sequence[str]:
        """The calls that were begun but cannot be read, as the model wrote them."""
        return self._broken[:-1] if self._unfinished else self._broken

    @property
    def _broken(self) -> list[str]:
        if self.cut_off and self.reasoning and not _text(self.message.get("content")).strip():
            return []
        broken = self.message.get("unparsed_tool_calls")
        return [str(text) for text in broken] if isinstance(broken, (list, tuple)) else []

    @property
    def _unfinished(self) -> str:
        """The call that was still being written when the reply was cut off."""
        last = "".join(self._broken[-1:]).strip() if self.cut_off else ""
        return last if last and _is_unfinished(last, _text(self.message.get("content"))) else ""


Check: TypeAlias = Callable[[OutputView], "str | None"]
"""Says what is wrong with a reply, beginning with the check's name and a colon, or returns None."""


def _is_unfinished(call: str, text: str) -> bool:
    """Whether ``call`` is at the end of ``text`` and nothing ends it: no closing tag, or else no last bracket."""
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
