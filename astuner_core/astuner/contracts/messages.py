"""OpenAI-style messages in one shape.

Agent frameworks write the same message in several ways (``content`` as text, as a list of parts, as null; mappings
or objects of some library).  Two
views are taken of it here: `key_of`, cheap enough to be taken of the whole history at every turn, by which a
message is recognised; and `normalise`, a complete copy, taken only of what is new.

Invariant: messages with equal keys render to the same text, except assistant messages, of which `full_key` takes a
complete view.
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
"""``developer`` is OpenAI's newer word for ``system``; chat templates know only the latter."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Part types that hold text: OpenAI's chat completions have the first, its responses the others."""


def mapping_of(value: Any) -> Any:
    """``value`` itself if it is a mapping, else what its ``model_dump`` (pydantic, OpenAI's SDK) gives."""
    if isinstance(value, (dict, Mapping)):  # a plain one is told apart without asking its abstract class
        return value
    dump = getattr(value, "model_dump", None)
    return dump() if callable(dump) else value


def copied(value: Any) -> Any:
    """`deepcopy`, in a fraction of the time for what JSON has."""
    kind = type(value)
    if kind is dict:
        return {key: copied(member) for key, member in value.items()}
    if kind is list:
        return [copied(member) for member in value]
    return value if value is None or kind in (str, int, float, bool) else deepcopy(value)


def text_of(content: Any, field: str = "content") -> str:
    """The text of a message's ``content``: a string, None, or a list of text parts (joined by newlines, as vLLM does).

    :param field: Its name in the message, for errors.
    :raises UnsupportedRequest: it holds a part that is not text.
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
    """The role, in a chat template's words.

    :raises UnsupportedRequest: the message has no role that chat templates know.
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
    """Return the refusal of the first message that cannot be rendered as text, with its path; None if all can be."""
    for n, message in enumerate(messages):
        try:
            normalise(mapping_of(message))
        except UnsupportedRequest as e:
            why = str(e)
            return UnsupportedRequest(f"messages[{n}]{' ' if why.startswith('is ') else '.'}{why}")
    return None


def key_of(message: Message) -> Key:
    """What a message is recognised by: its tool-call ids if it has any, else role and text."""
    role = role_of(message)
    if role == "assistant":
        if calls := message.get("tool_calls"):
            return ("calls", *(call_id(call) for call in calls))
        return (role, text_of(message.get("content")))
    if role == "tool":
        return (role, text_of(message.get("content")), _label(message.get("tool_call_id")))
    return (role, text_of(message.get("content")), _label(message.get("name")))


def full_key(message: Message) -> Key:
    """`key_of`, with all that an assistant message says beside its text: the calls themselves, and the reasoning."""
    key = key_of(message)
    if key[0] not in ("assistant", "calls"):
        return key
    calls = tuple(call_parts(call) for call in message.get("tool_calls") or ())
    thought = reasoning_of(message)
    return ("told", key, calls, text_of(message.get("content")), thought) if calls or thought else key


def brief(key: Key) -> Key:
    """The `key_of` of a message whose `full_key` is given."""
    return key[1] if key[0] == "told" else key


def reasoning_of(message: Message) -> str:
    """The reasoning in a message, without the white space around it, which frameworks strip; empty when it has none."""
    return text_of(message.get("reasoning_content"), "reasoning_content").strip()


def normalise(message: Message) -> dict[str, Any]:
    """A JSON-serialisable copy with text content; shares nothing with the caller's message.

    :raises UnsupportedRequest: it cannot be rendered as text.
    """
    role = role_of(message)
    if message.get("function_call"):
        raise UnsupportedRequest("function_call was replaced by tool_calls in OpenAI's API; send those")
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
    """Name and arguments (as text) of one entry of ``tool_calls``."""
    call = mapping_of(call)
    function = mapping_of(call.get("function")) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UnsupportedRequest(f"is {repr(call)[:200]}; it must have function.name and function.arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return function["name"], arguments
    return function["name"], json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def has_text_arguments(message: Message) -> bool:
    """Whether all calls have their arguments as text; objects that are equal for Python need not be, as 1 and true."""
    functions = (mapping_of(mapping_of(call)["function"]) for call in message.get("tool_calls") or ())
    return all(isinstance(function.get("arguments"), str) for function in functions)


def call_id(call: Any) -> str | None:
    """The id of one entry of ``tool_calls``."""
    call = mapping_of(call)
    return _label(call.get("id")) if isinstance(call, Mapping) else None


def same_arguments(one: str, other: str) -> bool:
    """Return whether two texts of arguments denote the same JSON object.

    The order of members does not matter. Numbers are equal if their values are, however they are written (``105.0``,
    ``105`` and ``1.05e2``; ``-0.0`` and ``0``); ``1``, ``true`` and ``"1"`` differ.
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
    """What tells one value from another in a prompt, the order of members and 1, 1.0 and true included."""
    try:
        return ENCODE(value)
    except (TypeError, ValueError):  # no JSON; a template may write it all the same
        return repr(value)


def packed(value: Any) -> bytes | None:
    """Bytes that tell values from each other as `spelling` does, in a fifth of the time; None for what is not made of
    Python's own types."""
    try:
        return marshal.dumps(value, 2)  # later versions say which parts are one object, too
    except ValueError:
        return None


def _label(value: Any) -> str | None:
    """An id or a name: text, whatever the framework made of it."""
    return value if value is None or isinstance(value, str) else str(value)


def parse_arguments(text: str) -> dict[str, Any] | None:
    """The object that ``text`` denotes in strict JSON (RFC 8259: no NaN), or None when it denotes none."""
    value = parse_value(text)
    return value if isinstance(value, dict) else None


def parse_value(text: str) -> Any:
    """What ``text`` denotes in strict JSON; None also when it denotes nothing."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def parse_number(text: str) -> int | float:
    """Return the number that ``text`` denotes in JSON: an int for an integer in any spelling.

    Integers are exact; other numbers are rounded to a double, as everywhere in JSON.

    :raises ValueError: it is not a number, or no double is as large.
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
        raise ValueError(f"{text} is larger than any double")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


ENCODE = json.JSONEncoder(ensure_ascii=False).encode
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
_EXACT_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=parse_number)


class TokenLogprob(NamedTuple):
    """One token of an answer."""

    text: str
    """Bytes that are no UTF-8 by themselves read as U+FFFD."""
    logprob: float
    raw: bytes | None = None
    """Its bytes; a character may need those of several tokens. None where the vocabulary does not show them."""


@dataclass(frozen=True, kw_only=True)
class ChatReply:
    """One answer, of the model in training or (`turn` is None) of a model outside of the run."""

    message: Mapping[str, Any]
    """The OpenAI-style assistant message; ``content`` is always a string."""
    finish_reason: str
    """In OpenAI's words: ``length``, ``tool_calls`` or ``stop``."""
    prompt_tokens: int
    completion_tokens: int
    turn_index: int
    """Its place in the episode."""
    reply_id: str
    """Episode and turn; an attempt that was started over uses its ids again."""
    turn: Turn | None = None
    """What was recorded."""
    stop_sequence: str | None = None
    """The caller's stop string that ended the answer."""
    structured: Mapping[str, Any] | None = None
    """What the model gave in the structure that was asked for (``response_schema``); None if it did not."""
    _decode: Callable[[Sequence[int]], str] = field(default=lambda ids: "", repr=False, compare=False)
    """The text of token ids; needed where there is a `turn`."""
    _bytes_of: Callable[[Sequence[int]], Sequence[bytes | None]] = field(
        default=lambda ids: [None] * len(ids), repr=False, compare=False
    )
    """The bytes of each of the token ids."""

    @property
    def text(self) -> str:
        text: str = self.message["content"]
        return text

    @property
    def reasoning(self) -> str:
        """What the model thought, where its family marks that; else empty."""
        reasoning: str = self.message.get("reasoning_content", "")
        return reasoning

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        calls: Sequence[Mapping[str, Any]] = self.message.get("tool_calls", ())
        return calls

    @property
    def unparsed_tool_calls(self) -> Sequence[str]:
        """Tool calls that were begun but cannot be read, as the model wrote them."""
        broken: Sequence[str] = self.message.get("unparsed_tool_calls", ())
        return broken

    def beginning(self, tokens: int) -> str:
        """The text of the first ``tokens`` tokens that were generated; empty for a model outside of the run."""
        return "" if self.turn is None else self._decode(self.turn.generation.response_ids[:tokens])

    def token_logprobs(self) -> list[TokenLogprob]:
        """Every token that was generated, the end token included; empty for a model outside of the run."""
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
    """The answer that the made-up finish call at ``at`` stands for, and how many messages it takes up.

    AgentScope 1.0.7 stores a plain answer X of the model as if the model had called a tool: an assistant message that
    calls ``generate_response`` with ``{"response": X}`` under an id of its own, a tool message saying that it worked,
    and X again.  All three together mean no more than X.
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
