"""The families that are known: ChatML with Hermes calls, what plugins register, and the tokenizer's own word.

A family that nobody registers is read by transformers where the tokenizer has a ``response_template``; that gives
arguments as objects, which are written as JSON again here, so they are not the model's own spelling, and a reply that
it cannot read is text.
"""

from __future__ import annotations

import json
from typing import Any

from astuner.contracts.chat_family import HERMES, CallStyle, Family, Read, ToolCall, Tools
from astuner.contracts.errors import PluginError
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager, load_plugins

NO_CALLS = CallStyle("no tool calls", lambda text, tools: (text, [], []))
CHATML = Family(
    "ChatML",
    "<|im_start|>assistant",
    closes=("<|im_end|>",),
    stops=("<|im_end|>",),
    styles=(HERMES,),
)


def known_families(manager: PluginManager | None = None) -> tuple[Family, ...]:
    """Every family of the plugins that are on, the core's own first.

    :param manager: None: whatever is installed here.
    :raises PluginError: a plugin registers something else.
    """
    manager = manager or load_plugins()
    found = [CHATML]
    for plugin, name, provider in manager.offers("chat family"):
        family = registry.import_target(provider.target)
        if not isinstance(family, Family):
            raise PluginError(
                f"the chat family {name!r} of {plugin.dist} is {family!r}; it must be an "
                "astuner.contracts.chat_family.Family"
            )
        found.append(family)
    return tuple(found)


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
