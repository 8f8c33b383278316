"""Replies of families that only the tokenizer's own ``response_template`` describes, read by transformers.

Transformers gives arguments as objects; here they are written as JSON again, so they are not the model's own
spelling.  A reply that it cannot read is text.
"""

from __future__ import annotations

import json
from typing import Any

from astuner.chat.families.style import Read
from astuner.chat.tool_calls import ToolCall, Tools


def can_parse(tokenizer: Any) -> bool:
    """Whether the tokenizer says how its model's replies are read, and transformers is new enough to do it."""
    if not getattr(tokenizer, "response_template", None):
        return False
    try:
        from transformers.utils.chat_parsing import parse_response  # noqa: F401
    except ImportError:
        return False
    return True


def read_by_template(text: str, response_template: Any, *, prompt: str, tools: Tools) -> Read:
    """Take a reply apart as ``response_template`` says.

    :param prompt: the end of the prompt, from the generation prompt on.
    """
    from transformers.utils.chat_parsing import parse_response

    try:
        parsed = parse_response(text, response_template, prefix=prompt, tools=[dict(t) for t in tools] or None)
        calls = [_call(call) for call in parsed.get("tool_calls") or ()]
        content, thought = parsed.get("content") or "", parsed.get("reasoning_content") or ""
    except (ValueError, TypeError, KeyError):  # what it raises for text that is not as the template says
        return Read("", text, [], [text] if tools else [])
    if not (isinstance(content, str) and isinstance(thought, str)):
        return Read("", text, [], [])
    return Read(thought, content, calls, []) if tools or not calls else Read("", text, [], [])


def _call(call: Any) -> ToolCall:
    function = call["function"]
    name, arguments = function["name"], function["arguments"]
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise TypeError(f"a call of {name!r} with {type(arguments).__name__} arguments")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
