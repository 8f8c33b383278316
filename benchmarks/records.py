"""Scripted conversation: search calls of the model, and results of a few lines.

It is the same for every side of a comparison.  Texts contain the number of their conversation, so conversations differ
and caches cannot help.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

SYSTEM = "You look things up in the records of a warehouse. Call one tool at a time, and answer when you are sure."
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the records and return the lines that match, oldest first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "Words that a line must hold."},
                    "limit": {"type": "integer", "description": "Lines to return."},
                },
                "required": ["query"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "note",
            "description": "Keep a line for later.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        },
    },
]
ANSWER = "None of the boxes was opened."


def first_messages(number: int) -> list[dict[str, Any]]:
    """Return the messages of the first model call of conversation ``number``."""
    question = f"Which box of delivery {number} was never opened? Search, then answer."
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def arguments(turn: int) -> dict[str, Any]:
    """Return the arguments of the model's search."""
    return {"query": f"box {turn * 37 % 101}, not opened", "limit": 3}


def call(turn: int) -> dict[str, Any]:
    """Return the model's call, with arguments as an object.

    Its ID has nine characters, as Mistral's template requires.
    """
    return {"type": "function", "id": f"call{turn:05}", "function": {"name": "search", "arguments": arguments(turn)}}


def result(number: int, turn: int) -> str:
    """Return the result of the search."""
    return "\n".join(
        f"{number:06}-{turn:03}-{line} | shelf {turn * 7 % 40}, row {line} | seen {turn + line} times, not opened"
        for line in range(3)
    )


def openai_reply(turn: int, turns: int) -> dict[str, Any]:
    """Return the model's reply as an OpenAI message: a search, or the answer at the last turn (counted from 0)."""
    if turn >= turns - 1:
        return {"role": "assistant", "content": ANSWER}
    function = {"name": "search", "arguments": json.dumps(arguments(turn))}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "id": f"call{turn:05}", "function": function}],
    }


def results(message: Mapping[str, Any], number: int, turn: int) -> list[dict[str, Any]]:
    """Return the tool messages that follow a reply; none after the answer."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    return [{"role": "tool", "tool_call_id": c["id"], "content": result(number, turn)} for c in calls]
