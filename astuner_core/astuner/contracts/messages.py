"""Normalize OpenAI-style messages.

Agent frameworks write the same message in several ways (``content`` as text, a list of parts or null; mappings or
objects of a library). This module provides two views: `key_of` identifies a message and is cheap enough for the
complete history at every turn; `normalise` returns a complete copy and is used for new messages only.

Invariant: messages with equal keys render to the same text. For assistant messages, this applies to `full_key` only.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from math import isfinite
from typing import Any, NamedTuple, TypeAlias

from astuner.contracts.errors import UnsupportedRequest
from astuner.contracts.types import Turn

Message: TypeAlias = Mapping[str, Any]
Key: TypeAlias = tuple[Any, ...]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI's role -> role in chat templates. ``developer`` is OpenAI's newer name of ``system``."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of text parts: the first in OpenAI's Chat Completions, the others in its Responses."""


def mapping_of(value: Any) -> Any:
    """Return ``value`` if it is a mapping, otherwise its ``model_dump()`` (pydantic, OpenAI's SDK) if it has one."""
    if isinstance(value, (dict, Mapping)):  # dict first, which is faster than the abstract class
        return value
    dump = getattr(value, "model_dump", None)
    return dump() if callable(dump) else value


def copied(value: Any) -> Any:
    """Return a deep copy, faster than `deepcopy` for JSON types."""
    kind = type(value)
    if kind is dict:
        return {key: copied(member) for key, member in value.items()}
    if kind is list:
        return [copied(member) for member in value]
    return value if value is None or kind in (str, int, float, bool) else deepcopy(value)


def text_of(content: Any, field: str = "content") -> str:
    """Return the text of a message's ``content``: a string, None, or text parts (joined by newlines, as in vLLM).

    :param field: Name of the field, for errors.
    :raises UnsupportedRequest: The content has a part that is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UnsupportedRequest(f"{field} is of type {type(content).__name__}; send text, or a list of text parts")
    return "\n".join(_text_of_part(part, f"{field}[{n}]") for n, part in enumerate(content))


def _text_of_part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    part = mapping_of(part)
    if not isinstance(part, Mapping):
        raise UnsupportedRequest(f"{path} is of type {type(part).__name__}; send text, or parts of type 'text'")
    kind = part.get("type", "text")
    if kind not in _TEXT_PARTS:
        raise UnsupportedRequest(f"{path}.type is {kind!r}; ASTuner reads text only, so send parts of type 'text'")
    text = part.get("text")
    if text is not None and not isinstance(text, str):
        raise UnsupportedRequest(f"{path}.text is of type {type(text).__name__}; send text")
    return text or ""


def role_of(message: Message) -> str:
    """Return the role of a message, as used in chat templates.

    :raises UnsupportedRequest: The role is missing or unknown.
    """
    try:
        return _ROLES[message["role"]]
    except (KeyError, TypeError):
        if not isinstance(message, Mapping):
            what = f"is {repr(message)[:80]}; a message is a mapping with a role and content"
            raise UnsupportedRequest(what) from None
        known = ", ".join(_ROLES)
        raise UnsupportedRequest(f"role is {message.get('role')!r}; it must be one of {known}") from None


def refused_message(messages: Sequence[Any]) -> UnsupportedRequest | None:
    """Return the error for the first message that cannot be rendered as text, with its path, or None."""
    for n, message in enumerate(messages):
        try:
            normalise(mapping_of(message))
        except UnsupportedRequest as e:
            why = str(e)
            return UnsupportedRequest(f"messages[{n}]{' ' if why.startswith('is ') else '.'}{why}")
    return None


def key_of(message: Message) -> Key:
    """Return a key that identifies a message: its tool-call IDs if it has any, otherwise role and text."""
    role = role_of(message)
    if role == "assistant":
        if calls := message.get("tool_calls"):
            return ("calls", *(call_id(call) for call in calls))
        return (role, text_of(message.get("content")))
    if role == "tool":
        return (role, text_of(message.get("content")), _label(message.get("tool_call_id")))
    return (role, text_of(message.get("content")), _label(message.get("name")))


def full_key(message: Message) -> Key:
    """Return `key_of` extended, for assistant messages, by the complete tool calls and the reasoning."""
    key = key_of(message)
    if key[0] not in ("assistant", "calls"):
        return key
    calls = tuple(call_parts(call) for call in message.get("tool_calls") or ())
    thought = reasoning_of(message)
    return ("told", key, calls, text_of(message.get("content")), thought) if calls or thought else key


def brief(key: Key) -> Key:
    """Return the `key_of` of a message, given its `full_key`."""
    return key[1] if key[0] == "told" else key


def reasoning_of(message: Message) -> str:
    """Return the reasoning of a message, or an empty string. White space around it is removed, as frameworks do."""
    return text_of(message.get("reasoning_content"), "reasoning_content").strip()


def normalise(message: Message) -> dict[str, Any]:
    """Return a JSON-serializable deep copy of a message with text content.

    :raises UnsupportedRequest: The message cannot be rendered as text.
    """
    role = role_of(message)
    if message.get("function_call"):
        raise UnsupportedRequest("function_call is not supported; send tool_calls, which replaced it in OpenAI's API")
    out: dict[str, Any] = {"role": role, "content": text_of(message.get("content"))}
    if role == "assistant":
        if reasoning := message.get("reasoning_content"):
            out["reasoning_content"] = text_of(reasoning, "reasoning_content")
        if calls := message.get("tool_calls"):
            out["tool_calls"] = _normalise_calls(calls)
        return out
    if role == "tool":
        out["tool_call_id"] = _label(message.get("tool_call_id"))
    if name := message.get("name"):
        out["name"] = _label(name)
    return out


def _normalise_calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise UnsupportedRequest(f"tool_calls is of type {type(calls).__name__}; send a list of calls")
    made = []
    for n, call in enumerate(calls):
        try:
            made.append(_normalise_call(call))
        except UnsupportedRequest as e:
            raise UnsupportedRequest(f"tool_calls[{n}] {e}") from None
    return made


def _normalise_call(call: Any) -> dict[str, Any]:
    name, arguments = call_parts(call)
    return {"id": call_id(call), "type": "function", "function": {"name": name, "arguments": arguments}}


def call_parts(call: Any) -> tuple[str, str]:
    """Return the name and the arguments (as text) of an entry of ``tool_calls``."""
    call = mapping_of(call)
    function = mapping_of(call.get("function")) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UnsupportedRequest(f"is {repr(call)[:200]}; it must have function.name and function.arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return function["name"], arguments
    return function["name"], json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def has_text_arguments(message: Message) -> bool:
    """Return whether all calls have their arguments as text.

    Arguments as objects cannot be compared exactly, because Python treats 1 and true as equal.
    """
    functions = (mapping_of(mapping_of(call)["function"]) for call in message.get("tool_calls") or ())
    return all(isinstance(function.get("arguments"), str) for function in functions)


def call_id(call: Any) -> str | None:
    """Return the ID of an entry of ``tool_calls``."""
    call = mapping_of(call)
    return _label(call.get("id")) if isinstance(call, Mapping) else None


def same_arguments(one: str, other: str) -> bool:
    """Return whether two texts of arguments denote the same JSON object.

    The order of members does not matter. Numbers are compared by value, in any notation (``105.0``, ``105`` and
    ``1.05e2``; ``-0.0`` and ``0``). ``1``, ``true`` and ``"1"`` differ.
    """
    if one == other:
        return True
    try:
        a, b = _EXACT_DECODER.decode(one), _EXACT_DECODER.decode(other)
        both_objects = isinstance(a, dict) and isinstance(b, dict)
        return both_objects and json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    except (ValueError, RecursionError):
        return False


def spelling(value: Any) -> str:
    """Return a text that differs for values that render differently, such as 1, 1.0 and true, or another order."""
    try:
        return ENCODE(value)
    except (TypeError, ValueError):  # not JSON; a template may still render it
        return repr(value)


def packed(value: Any) -> bytes | None:
    """Return bytes that distinguish values like `spelling`, in a fifth of the time.

    None for values that do not consist of Python's built-in types.
    """
    try:
        return marshal.dumps(value, 2)  # later versions also encode object identity
    except ValueError:
        return None


def _label(value: Any) -> str | None:
    """Return an ID or name as text, or None."""
    return value if value is None or isinstance(value, str) else str(value)


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Return the object that ``text`` denotes in strict JSON (RFC 8259: no NaN), or None."""
    value = parse_value(text)
    return value if isinstance(value, dict) else None


def parse_value(text: str) -> Any:
    """Return the value that ``text`` denotes in strict JSON, or None if it is not valid."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def parse_number(text: str) -> int | float:
    """Return the number that ``text`` denotes in JSON, as an int if it is an integer in any notation.

    Integers are exact; other numbers are rounded to a double.

    :raises ValueError: The text is not a number, or the number exceeds the range of a double.
    """
    rounded = _finite(text)
    if not rounded.is_integer():
        return rounded
    try:
        exact = Decimal(text)
    except InvalidOperation:  # an exponent of more than 18 digits
        return rounded
    return int(exact) if exact == exact.to_integral_value() else rounded


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} exceeds the range of a double")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


ENCODE = json.JSONEncoder(ensure_ascii=False).encode
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
_EXACT_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=parse_number)


class TokenLogprob(NamedTuple):
    """One token of a reply."""

    text: str
    """Text of the token; bytes that are not valid UTF-8 become U+FFFD."""
    logprob: float
    raw: bytes | None = None
    """Bytes of the token; a character may span several tokens. None if the vocabulary does not provide them."""


@dataclass(frozen=True, kw_only=True)
class ChatReply:
    """A reply of the model in training, or of an external model (then `turn` is None)."""

    message: Mapping[str, Any]
    """The OpenAI-style assistant message; ``content`` is always a string."""
    finish_reason: str
    """OpenAI's finish reason: ``length``, ``tool_calls`` or ``stop``."""
    prompt_tokens: int
    completion_tokens: int
    turn_index: int
    """Index of the reply in the episode."""
    reply_id: str
    """Episode and turn. A restarted attempt reuses the IDs."""
    turn: Turn | None = None
    """The recorded turn."""
    stop_sequence: str | None = None
    """The caller's stop string that ended the reply."""
    structured: Mapping[str, Any] | None = None
    """The reply in the requested structure (``response_schema``); None if the model did not produce it."""
    _decode: Callable[[Sequence[int]], str] = field(default=lambda ids: "", repr=False, compare=False)
    """Decodes token IDs; required if `turn` is set."""
    _bytes_of: Callable[[Sequence[int]], Sequence[bytes | None]] = field(
        default=lambda ids: [None] * len(ids), repr=False, compare=False
    )
    """Returns the bytes of each token ID."""

    @property
    def text(self) -> str:
        text: str = self.message["content"]
        return text

    @property
    def reasoning(self) -> str:
        """Return the reasoning of the model, if its family marks it; otherwise an empty string."""
        reasoning: str = self.message.get("reasoning_content", "")
        return reasoning

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        calls: Sequence[Mapping[str, Any]] = self.message.get("tool_calls", ())
        return calls

    @property
    def unparsed_tool_calls(self) -> Sequence[str]:
        """Return tool calls that could not be parsed, as the model wrote them."""
        broken: Sequence[str] = self.message.get("unparsed_tool_calls", ())
        return broken

    def beginning(self, tokens: int) -> str:
        """Return the text of the first ``tokens`` generated tokens; empty for an external model."""
        return "" if self.turn is None else self._decode(self.turn.generation.response_ids[:tokens])

    def token_logprobs(self) -> list[TokenLogprob]:
        """Return all generated tokens, including the end token; empty for an external model."""
        if self.turn is None:
            return []
        made = self.turn.generation
        tokens = zip(made.response_ids, made.logprobs, self._bytes_of(made.response_ids), strict=True)
        return [
            TokenLogprob(self._decode([token]) if raw is None else raw.decode("utf-8", "replace"), logprob, raw)
            for token, logprob, raw in tokens
        ]


_FINISH_TOOL, _FINISHED = "generate_response", "Successfully generated response."


def finish_call(messages: Sequence[Message], at: int) -> tuple[str, int] | None:
    """Return the answer behind AgentScope's artificial finish call at ``at`` and the number of its messages, or None.

    AgentScope 1.0.7 stores a plain answer X of the model as a tool call: an assistant message that calls
    ``generate_response`` with ``{"response": X}`` and a new ID, a tool message that confirms it, and X again. All three
    messages together mean X.
    """
    calls = messages[at]["tool_calls"]
    if len(calls) != 1 or at + 1 >= len(messages):
        return None
    name, arguments = call_parts(calls[0])
    given = parse_arguments(arguments)
    if name != _FINISH_TOOL or given is None or given.keys() != {"response"} or not isinstance(given["response"], str):
        return None
    said: str = given["response"]
    if key_of(messages[at + 1]) != ("tool", _FINISHED, key_of(messages[at])[1]):
        return None
    repeated = at + 2 < len(messages) and key_of(messages[at + 2]) == ("assistant", said)
    return said, 3 if repeated else 2
