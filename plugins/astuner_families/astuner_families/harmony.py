"""gpt-oss: a reply is a row of messages, each with a channel (the "harmony" format).

``analysis`` is reasoning, ``final`` is the answer, ``commentary`` is text for the user or, with a recipient
``functions.NAME``, a tool call.  The generation prompt has already begun the first message's header.

Invariant: a message whose header or call cannot be read stays in the text as the model wrote it.
"""

from __future__ import annotations

import re

from astuner.contracts.chat_family import Read, ToolCall, Tools
from astuner.contracts.messages import parse_arguments

_START, _MESSAGE, _END = "<|start|>", "<|message|>", "<|end|>"
_HEADER = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?[ ]*(?:to=(?P<to>[^\s<]+))?[ ]*<\|channel\|>(?P<channel>analysis|commentary|final)"
    r"(?:[ ]+to=(?P<later>[^\s<]+))?[ ]*(?P<kind>(?:<\|constrain\|>)?json)?[ ]*"
)
_FUNCTIONS = "functions."


def read_reply(text: str, tools: Tools) -> Read:
    """Take a reply apart. Without ``tools``, calls stay in the text."""
    thoughts: list[str] = []
    said: list[str] = []
    calls: list[ToolCall] = []
    broken: list[str] = []
    for raw in _messages(text):
        header, begun, body = raw.partition(_MESSAGE)
        body = body.removesuffix(_END)
        found = _HEADER.fullmatch(header) if begun else None
        to = (found["to"] or found["later"] or "") if found else ""
        if found is None:
            said.append(raw)
            if tools and ("to=" in header or _START in header):
                broken.append(raw)
        elif to:
            name = to.removeprefix(_FUNCTIONS)
            if tools and name != to and name and parse_arguments(body) is not None:
                calls.append(ToolCall(name, body.strip()))
            else:
                said.append(raw)
                if tools:
                    broken.append(raw)
        elif found["channel"] == "analysis":
            thoughts.append(body)
        else:
            said.append(body)
    return Read("\n".join(filter(None, thoughts)), "\n".join(filter(None, said)), calls, broken)


def _messages(text: str) -> list[str]:
    """The messages of ``text``, each with the token that begins it and the token that ends it, where it has them."""
    pieces: list[str] = []
    for piece in re.split(r"(?<=<\|end\|>)|(?=<\|start\|>)", text):
        if piece:
            pieces.append(piece)
    return pieces
