"""Find tools that a model could not call because its format cannot express their names.

JSON can express any name. But a name between tags must not look like a tag, an end token ends the reply, and some
tokenizers normalize characters. Each name is therefore tried once: the chat template writes a call, which is encoded,
decoded and parsed again.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

from astuner.chat.template import PROBE, REMEMBERED, ChatTemplate
from astuner.contracts.chat_family import Tools, tool_names
from astuner.contracts.errors import UnsupportedRequest
from astuner.contracts.messages import parse_arguments

_MAX_CACHED_CALLS = 4096
_ARGUMENTS = {"k": "v"}
_ID = "call_probe"
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")


class ToolNames:
    """The names that one chat template can express. Thread-safe."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._prompt_ids = template.encode(template.generation_prompt)
        self._stops = [template.decode([token]) for token in template.stop_token_ids]
        self._written = lru_cache(_MAX_CACHED_CALLS)(self._write)
        self._unreadable = lru_cache(REMEMBERED)(self._find_unreadable)

    def check(self, tools: Tools) -> None:
        """Check that calls of ``tools`` can be parsed. The result is cached for each list of names.

        :raises UnsupportedRequest: A name cannot be expressed.
        """
        name = self._unreadable(tool_names(tools))
        if name is not None:
            raise UnsupportedRequest(
                f"tools: the tool {name!r} could not be called, because {self._template.calls.name} cannot express its "
                "name. Rename it; letters, digits, '_', '-' and '.' work in every format"
            )

    def _find_unreadable(self, names: tuple[str, ...]) -> str | None:
        """Return the first of ``names`` whose call is not parsed correctly."""
        tools = [_tool(name) for name in names]
        unreadable = next((name for name in names if not self._is_read(name, tools)), None)
        if unreadable is None or not self._is_read(PROBE, [_tool(PROBE)]):  # the names are not the reason
            return None
        return unreadable

    def _is_read(self, name: str, tools: Tools) -> bool:
        for text in self._calls_of(name):
            calls = self._template.read(text, tools, prompt_ids=self._prompt_ids).calls
            if [(call.name, parse_arguments(call.arguments)) for call in calls] == [(name, _ARGUMENTS)]:
                return True
        return False

    def _calls_of(self, name: str) -> tuple[str, ...]:
        """Return the texts of a call of ``name``: as the template writes it, and with JSON escapes.

        Many templates put names between quotes without escaping them, but models write correct JSON.
        """
        probe = self._written(PROBE) or ""
        texts = {self._written(name), probe.replace(PROBE, json.dumps(name, ensure_ascii=False)[1:-1])}
        possible = [text for text in texts if text and not any(stop in text for stop in self._stops)]
        if _PLAIN.fullmatch(name):  # tokenizers may normalize other characters
            return tuple(possible)
        return tuple(self._template.decode(self._template.encode(text)) for text in possible)

    def _write(self, name: str) -> str | None:
        """Return a call as the chat template writes it, or None if the template refuses it."""
        function = {"name": name, "arguments": _ARGUMENTS}
        try:
            return self._template.write_reply("", [{"id": _ID, "type": "function", "function": function}])
        except UnsupportedRequest:
            return None


def _tool(name: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {key: {"type": "string"} for key in _ARGUMENTS}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
