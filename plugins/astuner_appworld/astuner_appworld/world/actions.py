"""What an agent said -> the code to run.

A model wrote the message, so anything may be in it.  Invariant: the result is code, or one sentence that says what was
missing; nothing is guessed and nothing raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

CODE_FORMATS = ("first_block", "all_blocks", "raw")
TOOL_NAMES = ("appworld", "execute")

_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(?P<language>[\w+-]*)[ \t]*\r?\n(?P<code>.*?)(?:^[ \t]*```[ \t]*\r?$|\Z)",
    re.MULTILINE | re.DOTALL,
)
_PYTHON = {"", "python", "python3", "py"}

NO_CODE = (
    "No code was found in your message, so nothing was run. Write one block that opens with ```python on a line of its "
    "own and closes with ``` on another."
)


class NoCode(Exception):
    """The message holds nothing to run; the text tells the agent why."""


def code_of(action: Mapping[str, Any], code_format: str = "first_block") -> str:
    """The code to run; that of several tool calls as one piece.

    :param code_format: ``first_block`` runs the first fenced block of Python, ``all_blocks`` all of them as one piece,
        ``raw`` takes a text without any fence as code too.
    :raises NoCode: there is none.
    """
    calls = action.get("tool_calls")
    if calls:
        return "\n".join(_code_of_call(call) for call in (calls if isinstance(calls, list) else [calls]))
    content = action.get("content")
    text = content if isinstance(content, str) else ""
    blocks = [m["code"] for m in _FENCE.finditer(text) if m["language"].lower() in _PYTHON]
    blocks = [block for block in blocks if block.strip()]
    if blocks:
        return "\n".join(blocks) if code_format == "all_blocks" else blocks[0]
    if code_format == "raw" and text.strip() and "```" not in text:
        return text
    raise NoCode(NO_CODE)


def _code_of_call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    name, arguments = (
        (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else (None, None)
    )
    if name not in TOOL_NAMES:
        raise NoCode(f"There is no tool named {str(name)[:80]!r}, so nothing was run. The tool is {TOOL_NAMES[1]!r}.")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise NoCode("The tool call's arguments are not JSON, so nothing was run.") from None
    code = arguments.get("code") if isinstance(arguments, Mapping) else None
    if not isinstance(code, str) or not code.strip():
        raise NoCode('The tool call has no code, so nothing was run. Its arguments are {"code": "..."}.')
    return code
