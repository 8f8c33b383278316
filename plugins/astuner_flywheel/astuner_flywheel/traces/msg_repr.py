"""AgentScope's ``Msg(...)`` as Python prints it, read without running anything.

Older AgentScope writes nothing else about a reply into its span.  The text is parsed to a syntax tree, and only
literals are taken from it (`ast.literal_eval` on ``role`` and ``content``): a name, a call or an expression in their
place is no message.
"""

from __future__ import annotations

import ast
from typing import Any

from astuner_flywheel.traces.messages import Message, Unreadable, read_messages

LONGEST = 1 << 20
"""Characters; parsing takes about a hundred bytes for each."""
DEEPEST = 100
"""Brackets within brackets."""


def parse(text: str) -> list[Message]:
    """The messages in the text of one ``Msg``, or of a list of them.

    :raises Unreadable: there are none.
    """
    if len(text) > LONGEST:
        raise Unreadable(f"a Msg as text has more than {LONGEST:,} characters")
    if _depth(text) > DEEPEST:
        raise Unreadable(f"a Msg as text is nested more than {DEEPEST} levels deep")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unreadable("a Msg as text cannot be parsed; perhaps it was cut off") from None
    nodes = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
    return [message for node in nodes for message in _message(node)]


def _message(node: ast.expr) -> list[Message]:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Msg"):
        raise Unreadable("the text is no Msg(...)")
    found: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg in ("role", "content"):
            try:
                found[keyword.arg] = ast.literal_eval(keyword.value)
            except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
                raise Unreadable(f"{keyword.arg} of a Msg as text is no literal") from None
    return read_messages([found])


def _depth(text: str) -> int:
    """The deepest nesting, brackets within texts counted too: never too low."""
    deepest = depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}" and depth:
            depth -= 1
    return deepest
