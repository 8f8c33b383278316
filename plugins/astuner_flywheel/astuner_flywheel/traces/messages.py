"""Convert messages in traces to OpenAI's format, and represent spans.

Three formats are known: OpenTelemetry's (a role and parts), AgentScope's (a role and blocks) and OpenAI's. Text, tool
calls and tool results are kept. Reasoning is removed, because it belongs to the other model. Other contents (images,
files) are named in brackets. Older AgentScope versions record a reply only as the Python text of its ``Msg(...)``: it
is parsed to a syntax tree, from which only literals are read, so nothing is executed.

AgentScope Studio stores attributes as a tree (``{"gen_ai": {"input": …}}``), OTLP sends them flat
(``"gen_ai.input.messages"``), and both send lists and objects as JSON text. Invariants: a lookup by dotted name returns
the same value for every form; the result is a list of valid OpenAI messages with text contents.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

INVOKE_AGENT, CHAT, STEP = "invoke_agent", "chat", "step"
"""Operations of spans. A step is between an agent and its model; in a trace without both, its outermost step is the
reply."""
_CHATS = {"chat", "text_completion", "generate_content"}
_MODEL_CALL = "Model.__call__"  # AgentScope before 1.0.9, which had no operation names
_REPLY = ".reply"


@dataclass(frozen=True, kw_only=True)
class Span:
    """A span. IDs are lower-case hexadecimal; times are nanoseconds since 1970."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    """Empty for a root span."""
    name: str = ""
    start: int = 0
    end: int = 0
    attributes: Mapping[str, Any]
    scope: str = ""
    """Instrumentation that created the span."""
    scope_version: str = ""
    conversation_id: str = ""
    """Value of the database's column."""
    model: str = ""
    events: Sequence[Any] = ()
    kind: str = "span"
    """Convention and kind, for counting."""
    unread: tuple[str, ...] = ()
    """Attributes with contents that could not be converted."""

    def get(self, name: str) -> Any:
        """Return the attribute ``name``, or None."""
        return lookup(self.attributes, name)

    def text(self, name: str) -> str:
        """Return the attribute as text. AgentScope quotes some texts as JSON."""
        value = decoded(self.get(name))
        return "" if value is None or isinstance(value, (dict, list)) else str(value)

    @property
    def operation(self) -> str:
        """Return ``invoke_agent``, ``chat``, or the name in the convention or in an older AgentScope."""
        named = self.text("gen_ai.operation.name")
        if named in _CHATS or (not named and self.name.endswith(_MODEL_CALL)):
            return CHAT
        if not named and self.name.endswith(_REPLY):
            return INVOKE_AGENT
        return named


def lookup(attributes: Mapping[str, Any], name: str) -> Any:
    """Return the value of a dotted name from a tree, a flat mapping, or a mixture."""
    if name in attributes:
        return attributes[name]
    head, _, rest = name.partition(".")
    while rest:
        inner = decoded(attributes.get(head))
        if isinstance(inner, Mapping) and (found := lookup(inner, rest)) is not None:
            return found
        part, _, rest = rest.partition(".")
        head = f"{head}.{part}"
    return None


def decoded(value: Any) -> Any:
    """Return the value of JSON text of a list, an object or a text, or the value itself."""
    if isinstance(value, str) and value[:1] in ("[", "{", '"'):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def nanoseconds(value: Any) -> int:
    """Return a time in nanoseconds from any unit (detected by size) or ISO 8601, or 0."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        try:
            at = datetime.fromisoformat(str(value).replace("Z", "+00:00"))
        except ValueError:
            return 0
        return int((at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp() * 1e9)
    if not 0 < number < 1e20:
        return 0
    for unit, smallest in ((1, 1e17), (10**3, 1e14), (10**6, 1e11)):  # nano-, micro-, milliseconds since 1970
        if number >= smallest:
            return int(value) * unit if isinstance(value, (int, str)) and str(value).isdigit() else int(number * unit)
    return int(number * 1e9)


DEEPEST_NAME = 50
"""Maximum depth of names that become a tree and of nested values. Deeper ones could not be written as JSON."""


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"a.b": 1}`` as ``{"a": {"b": 1}}``.

    A key that would have to be a value and a tree stays flat, and so does a key with more than 50 parts.
    """
    found: dict[str, Any] = {}
    for name in sorted(flat, key=len):  # values are set before trees
        if name.count(".") >= DEEPEST_NAME:
            found[name] = flat[name]
            continue
        *path, last = name.split(".")
        inner: Any = found
        for part in path:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and last not in inner:
            inner[last] = flat[name]
        else:
            found[name] = flat[name]
    return found


Message = dict[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_ROLES |= {"human": "user", "ai": "assistant", "model": "assistant", "function": "tool"}  # LangChain, Gemini
_THOUGHTS = {"reasoning", "thinking", "redacted_thinking"}
_TEXTS = {"text", "input_text", "output_text", "refusal"}
_CALLS = {"tool_call", "tool_use"}
_RESULTS = {"tool_call_response", "tool_result"}


class Unreadable(ValueError):
    """The value is not a list of messages. The message has the reason; the caller adds the place."""


def read_messages(value: Any) -> list[Message]:
    """Return messages from any of the three formats, also as JSON text.

    :raises Unreadable: The value has no messages.
    """
    value = decoded(value)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise Unreadable(f"messages are {_kind(value)}, not a list")
    found: list[Message] = []
    for message in value:
        found.extend(_read(message))
    return found


def system_message(instructions: Any) -> list[Message]:
    """Return ``gen_ai.system_instructions`` (parts or text) as a system message, or an empty list without text."""
    value = decoded(instructions)
    text = value if isinstance(value, str) else shown(value)
    return [{"role": "system", "content": text}] if text.strip() else []


def shown(content: Any) -> str:
    """Return a content as text. Other parts are named, reasoning is removed."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        return json.dumps(content, ensure_ascii=False, default=str)
    return "\n".join(text for part in content if (text := _shown_part(part)) is not None)


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, or an empty text."""
    return str(message.get("content") or "")


def _read(message: Any) -> list[Message]:
    if not isinstance(message, Mapping):
        raise Unreadable(f"a message is {_kind(message)}, not an object")
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise Unreadable(f"a message has the role {str(message.get('role'))[:40]!r}")
    parts = message["parts"] if "parts" in message else message.get("content")
    if role == "tool" and "tool_call_id" in message:
        return [_result(message["tool_call_id"], parts, message.get("name"))]
    if not isinstance(parts, (list, tuple)):
        parts = [parts] if parts is not None else []
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)):
        raise Unreadable(f"tool_calls are {_kind(calls)}, not a list")
    return _assembled(role, [*parts, *map(_as_part, calls)])


def _assembled(role: str, parts: Sequence[Any]) -> list[Message]:
    """Return the messages in one: an agent may combine calls, their results and more text in one message."""
    found: list[Message] = []
    texts: list[str] = []
    calls: list[Message] = []

    def flush() -> None:
        if texts or calls:
            content = "\n".join(texts)
            # The role may be wrong in framework code: only assistants call tools.
            of = "assistant" if calls else role
            found.append({"role": of, "content": content, **({"tool_calls": list(calls)} if calls else {})})
            texts.clear()
            calls.clear()

    for part in parts:
        kind = str(part.get("type")) if isinstance(part, Mapping) else None
        if kind in _CALLS:
            calls.append(_call(part))
        elif kind in _RESULTS:
            flush()
            content = next((part[k] for k in ("response", "result", "output", "content") if k in part), "")
            found.append(_result(part.get("id") or part.get("tool_use_id"), content, part.get("name")))
        elif (text := _shown_part(part)) is not None:
            if calls:
                flush()
            texts.append(text)
    flush()
    return found


def _as_part(call: Any) -> Message:
    """Return a call in OpenAI's format as a part."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise Unreadable("a tool call has no function")
    return {
        "type": "tool_call",
        "id": call.get("id"),
        "name": function.get("name"),
        "arguments": function.get("arguments"),
    }


def _call(part: Mapping[str, Any]) -> Message:
    arguments: Any = next((part[k] for k in ("arguments", "input") if part.get(k) is not None), {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, default=str)
    function = {"name": str(part.get("name") or ""), "arguments": arguments}
    return {"id": str(part.get("id") or ""), "type": "function", "function": function}


def _result(of: Any, content: Any, name: Any) -> Message:
    parts = _printed_blocks(decoded(content))
    is_parts = isinstance(parts, list) and parts and all(isinstance(p, Mapping) and "type" in p for p in parts)
    text = shown(parts) if is_parts else shown(content)
    return {"role": "tool", "tool_call_id": str(of or ""), "content": text, **({"name": str(name)} if name else {})}


def _shown_part(part: Any) -> str | None:
    """Return a part as text, or None if it has none."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return None if part is None else str(part)
    kind = None if part.get("type") is None else str(part["type"])
    if kind in _THOUGHTS:
        return None
    text = next((part[k] for k in ("text", "content", "refusal") if isinstance(part.get(k), str)), None)
    if kind in _TEXTS or (kind is None and text is not None):
        return text
    return f"[{(kind or 'part')[:40]}]"


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null", int: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")


LONGEST_MSG = 1 << 20
"""Maximum characters. Parsing takes about a hundred bytes per character."""
DEEPEST_MSG = 100
"""Maximum nesting of brackets."""


def parse_msg(text: str) -> list[Message]:
    """Return the messages in the Python text of a ``Msg`` or a list of them.

    :raises Unreadable: There are none.
    """
    tree = _parsed(text, "a Msg as text")
    nodes = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
    return [message for node in nodes for message in _printed(node)]


def _printed(node: ast.expr) -> list[Message]:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Msg"):
        raise Unreadable("the text is not Msg(...)")
    return read_messages([_literals(node, ("role", "content"))])


def _printed_blocks(value: Any) -> Any:
    """Return the parts in a list of blocks as Python text; any other value unchanged.

    AgentScope 2.x traces the result of a tool in this form: ``["TextBlock(type='text', text='14', ...)"]``.
    """
    if not isinstance(value, list) or not all(isinstance(item, str) and item.startswith(_BLOCKS) for item in value):
        return value
    try:
        return [
            {"type": text[: text.index("Block")].lower(), **_literals(_parsed(text, "a block as text"), ("text",))}
            for text in value
        ]
    except Unreadable:
        return value


_BLOCKS = ("TextBlock(", "DataBlock(")


def _parsed(text: str, what: str) -> ast.expr:
    if len(text) > LONGEST_MSG:
        raise Unreadable(f"{what} has more than {LONGEST_MSG:,} characters")
    if _depth(text) > DEEPEST_MSG:
        raise Unreadable(f"{what} is nested more than {DEEPEST_MSG} levels deep")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unreadable(f"{what} cannot be parsed; perhaps it was cut off") from None


def _literals(node: ast.expr, names: Sequence[str]) -> dict[str, Any]:
    """Return the literal keyword arguments of a call in Python text; nothing is executed."""
    found: dict[str, Any] = {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise Unreadable("the text is not a call")
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg in names:
            try:
                found[keyword.arg] = ast.literal_eval(keyword.value)
            except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
                raise Unreadable(f"{keyword.arg} of a {node.func.id} as text is not a literal") from None
    return found


def _depth(text: str) -> int:
    """Return the deepest nesting, including brackets in texts, so it is never too low."""
    deepest = depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}" and depth:
            depth -= 1
    return deepest
