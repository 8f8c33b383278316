"""Scripted model: write replies as the token IDs that a model of the family would generate, and record requests.

A scenario covers the model's side only; the agent is free in what it does with the replies. Arguments of tool calls are
generated from the tool's JSON schema, as small as possible and with the required types; a tool may still reject them.
An engine sees token IDs only, so the tools of a request come from the codec.

Invariant: the codec's own parser reads back each written reply. If the family cannot express a reply, or parses it as a
different one, a note reports this.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml

from astuner import STRUCTURED_TOOL, ChatCodec, ChatTemplate, Conversation, EncodedPrompt
from astuner.contracts.backbone import InferenceEngine
from astuner.contracts.chat_family import Tools
from astuner.contracts.errors import TurnLimitReached, UnsupportedRequest
from astuner.contracts.messages import Message, call_parts, mapping_of, normalise, parse_arguments, same_arguments
from astuner.contracts.types import FinishReason, Generation, SamplingParams

PLAIN = "2 + 2"
"""Text that is valid as arithmetic, as code and as a search query."""
_DEEPEST = 8


def parameters_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """Return the JSON schema of the parameters of one of ``tools``, or an empty mapping without parameters."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            return schema if isinstance(schema, Mapping) else {}
    return {}


def make_arguments(schema: Mapping[str, Any], text: str = PLAIN) -> dict[str, Any]:
    """Return arguments that are valid for ``schema``, the schema of an object.

    :param text: Value of every free-form string.
    """
    return _object(schema, text, schema, 0)


def _object(schema: Mapping[str, Any], text: str, root: Mapping[str, Any], depth: int) -> dict[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    required = schema.get("required")
    names = [n for n in properties if n in required] if isinstance(required, list) else []
    return {name: _value(properties[name], text, root, depth + 1) for name in names or list(properties)[:1]}


def _value(schema: Any, text: str, root: Mapping[str, Any], depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return text
    if isinstance(reference := schema.get("$ref"), str):
        return _value(_follow(reference, root), text, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    for word in ("enum", "examples"):
        if isinstance(values := schema.get(word), list) and values:
            return values[0]
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(ways := schema.get(word), list) and ways:
            typed = [w for w in ways if isinstance(w, Mapping) and w.get("type") != "null"]
            return _value((typed or ways)[0], text, root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((k for k in kind if k != "null"), "null")
    if kind in ("integer", "number"):
        limits = (schema.get(word) for word in ("minimum", "maximum"))
        return next((n for n in limits if isinstance(n, (int, float)) and not isinstance(n, bool)), 2)
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    if kind == "array":
        at_least = schema.get("minItems")
        n = at_least if isinstance(at_least, int) and at_least > 0 else 1
        return [_value(schema.get("items"), text, root, depth + 1) for _ in range(min(n, 4))]
    if kind == "object" or "properties" in schema:
        return _object(schema, text, root, depth)
    longest = schema.get("maxLength")
    return text[:longest] if isinstance(longest, int) else text


def _follow(reference: str, root: Mapping[str, Any]) -> Any:
    """Resolve ``#/$defs/Name``."""
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


SPELLINGS: Mapping[str, Callable[[Any], str]] = {
    "compact": lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    "spaced": lambda value: json.dumps(value, ensure_ascii=False, indent=1),
    "escaped": lambda value: json.dumps(value),
}
"""JSON styles: compact, with line breaks, and with non-ASCII characters escaped."""


def respelled(text: str, spellings: Iterable[str]) -> str:
    """Replace JSON objects in ``text`` by equal objects in the given spellings, in order.

    Objects that do not occur as JSON are skipped, because some families write arguments in another format.
    """
    start = 0
    for spelling in spellings:
        value = parse_arguments(spelling)
        span = None if value is None else find_object(text, value, start)
        if span is not None:
            text = text[: span[0]] + spelling + text[span[1] :]
            start = span[0] + len(spelling)
    return text


def find_object(text: str, value: Mapping[str, Any], start: int = 0) -> tuple[int, int] | None:
    """Return the span of the first occurrence of the JSON object ``value`` in ``text``, from ``start`` on."""
    decoder = json.JSONDecoder()
    at = text.find("{", start)
    while at != -1:
        try:
            found, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            found, end = None, at
        if isinstance(found, dict) and found == value:
            return at, end
        at = text.find("{", at + 1)
    return None


@dataclass(frozen=True, kw_only=True)
class Move:
    """One reply."""

    text: str = ""
    calls: int = 0
    """Number of offered tools that the reply calls."""
    arguments: str = PLAIN
    """Value of string arguments of the calls."""
    spelling: str = "compact"
    """JSON style of the arguments, of `SPELLINGS`, in families that write arguments as JSON."""
    thought: str = ""
    """Reasoning, in families that mark it."""
    end: Literal["stop", "cut", "broken"] = "stop"
    """``cut``: a length limit truncates the reply; ``broken``: the last call is malformed."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Replies of one agent, in order, followed by `DONE`."""

    name: str
    summary: str
    moves: tuple[Move, ...]

    def move(self, number: int) -> Move:
        """Return the reply with index ``number``."""
        return self.moves[number] if number < len(self.moves) else DONE


def _scenarios() -> dict[str, Scenario]:
    text = Path(__file__).with_name("scenarios.yaml").read_text(encoding="utf-8")
    return {
        name: Scenario(name=name, summary=row["summary"], moves=tuple(Move(**move) for move in row["moves"]))
        for name, row in yaml.safe_load(text).items()
    }


SCENARIOS = _scenarios()
"""All scenarios by name."""
DONE = SCENARIOS["text"].moves[0]
"""Reply after the end of a scenario, repeated for each further request."""


Written: TypeAlias = tuple[Generation, str]
"""A reply, and a note on how and why it differs from the intended reply; the note is empty if it does not."""


def _written(prompt_ids: Sequence[int], ids: Sequence[int], finish_reason: FinishReason) -> Generation:
    return Generation(
        prompt_ids=tuple(prompt_ids),
        response_ids=tuple(ids),
        logprobs=(LOGPROB,) * len(ids),
        finish_reason=finish_reason,
        policy_version=0,
    )


def write_move(template: ChatTemplate, move: Move, tools: Tools, number: int, prompt_ids: Sequence[int]) -> Written:
    """Write a scripted reply.

    :param tools: Tools of the request. If they include a tool for structured answers, the reply calls that tool.
    :param number: Index of the reply among the replies of its agent, which selects the tool to call.
    """
    names = [str(tool.get("function", tool).get("name")) for tool in tools]
    note = ""
    if STRUCTURED_TOOL in names:
        move, names = Move(calls=1), [STRUCTURED_TOOL]
    if move.calls and not names:
        move, note = replace(move, calls=0, text=move.text or "Let me see."), "no tools are offered: replies with text"
    if move.thought and not template.reasons:
        move = replace(move, thought="")
        note = note or f"{template.format.name} marks no reasoning here: replies without reasoning"
    spell = SPELLINGS[move.spelling]
    chosen = [names[(number + n) % len(names)] for n in range(move.calls)]
    calls = [
        {
            "id": f"say{number % 1000:03d}{n:03d}",
            "type": "function",
            "function": {"name": name, "arguments": spell(make_arguments(parameters_of(tools, name), move.arguments))},
        }
        for n, name in enumerate(chosen)
    ]
    try:
        text = _text(template, move.text, calls, move.thought, prompt_ids)
    except UnsupportedRequest:
        if len(calls) < 2:
            raise
        calls, note = calls[:1], note or "the family allows one call per reply: makes one call"
        text = _text(template, move.text, calls, move.thought, prompt_ids)
    if move.end == "broken" and calls:
        text = _broken(text, calls[-1])
    elif move.end == "stop":
        note = note or misread(template, text, calls, tools, prompt_ids, said=(move.text, move.thought))
    ids = template.encode(text)
    if move.end == "cut":
        return _written(prompt_ids, ids[: max(1, 2 * len(ids) // 3)], FinishReason.LENGTH), note
    return _written(prompt_ids, [*ids, _end(template, calls)], FinishReason.STOP), note


def write_message(
    template: ChatTemplate, message: Mapping[str, Any], tools: Tools, prompt_ids: Sequence[int], *, cut: bool
) -> Written:
    """Write a recorded assistant message (normalized), with its arguments spelled as recorded.

    :param cut: Whether a length limit truncated the message.
    :raises UnsupportedRequest: The family cannot express this reply.
    """
    calls = list(message.get("tool_calls") or ())
    text = _text(template, message["content"], calls, message.get("reasoning_content", ""), prompt_ids)
    ids = template.encode(text)
    if cut:
        return _written(prompt_ids, ids, FinishReason.LENGTH), ""
    said = message["content"], message.get("reasoning_content", "")
    note = misread(template, text, calls, tools, prompt_ids, said=said)
    return _written(prompt_ids, [*ids, _end(template, calls)], FinishReason.STOP), note


def misread(
    template: ChatTemplate,
    text: str,
    calls: Sequence[Any],
    tools: Tools,
    prompt_ids: Sequence[int],
    *,
    said: tuple[str, str],
) -> str:
    """Return what the codec parses from ``text`` instead of the intended reply, or an empty string if it matches.

    :param said: Content and reasoning.
    """
    read = template.read(text, tools, prompt_ids=prompt_ids)
    wanted = [call_parts(call) for call in calls]
    found = [(call.name, call.arguments) for call in read.calls]
    same = len(wanted) == len(found) and all(
        name == other and same_arguments(arguments, others)
        for (name, arguments), (other, others) in zip(wanted, found, strict=True)
    )
    if not same:
        return f"calls {_names(wanted)} are parsed as {_names(found)}"
    for what, meant, came in zip(("text", "reasoning"), said, (read.content, read.reasoning), strict=True):
        if meant.strip() != came.strip():
            return f"the family writes this reply differently: its {what} is parsed as {came.strip()[:40]!r}"
    return ""


def _names(calls: Sequence[tuple[str, str]]) -> str:
    return ", ".join(name for name, _ in calls) or "none"


def _text(template: ChatTemplate, content: str, calls: Sequence[Any], thought: str, prompt_ids: Sequence[int]) -> str:
    """Return the text of a reply, with the arguments of its calls spelled as in ``calls``."""
    text = template.write_reply(content, calls, thought, prompt_ids=prompt_ids)
    if not calls:
        stripped = content.strip()  # some templates strip the content, but a model may generate white space
        return text.replace(stripped, content, 1) if stripped and content not in text else text
    return respelled(text, [call_parts(call)[1] for call in calls])


def _broken(text: str, call: Any) -> str:
    """Make the last call in ``text`` malformed by removing a brace, or the last tag if there are no braces."""
    value = parse_arguments(call_parts(call)[1])
    span = None if value is None else find_object(text, value)
    if span is not None:
        return text[: span[1] - 1] + text[span[1] :]
    return text[: text.rindex("<")] if "<" in text else text[:-1]


def _end(template: ChatTemplate, calls: Sequence[Any]) -> int:
    """Return the token that ends such a reply: the first token that the template writes after it."""
    results = [
        {"role": "tool", "content": "r", "tool_call_id": call["id"], "name": call_parts(call)[0]} for call in calls
    ]
    try:
        first = template.continuation_ids(results or [{"role": "user", "content": "u"}], last=None, calls=calls)[0]
    except UnsupportedRequest:
        return template.end_of_turn_id
    return first if first in template.stop_token_ids else template.end_of_turn_id


LOGPROB = -0.5
CONTEXT = 1 << 24
"""Context length in tokens. The check is independent of lengths."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request as received, its encoding, and the reply."""

    messages: tuple[Mapping[str, Any], ...]
    """All messages, normalized."""
    tools: tuple[Mapping[str, Any], ...]
    encoded: EncodedPrompt
    turn: int
    reply: Mapping[str, Any]
    text: str
    """Complete reply as generated."""


@dataclass
class Ear:
    """Recorder of requests, in the order of their replies."""

    asked: list[Asked] = field(default_factory=list)
    offered: dict[tuple[int, ...], Tools] = field(default_factory=dict)
    """Prompt -> tools of the request it was built from."""


class ListeningCodec(ChatCodec):
    """Codec of an experiment that records every conversation, otherwise unchanged."""

    def __init__(self, codec: ChatCodec, ear: Ear) -> None:
        vars(self).update(vars(codec))
        self._ear = ear

    def conversation(self) -> Conversation:
        return ListeningConversation(self, self._ear)


class ListeningConversation(Conversation):
    """Conversation that records requests and replies."""

    def __init__(self, codec: ChatCodec, ear: Ear) -> None:
        super().__init__(codec)
        self._ear = ear
        self._requests: dict[int, tuple[EncodedPrompt, list[dict[str, Any]], list[Mapping[str, Any]]]] = {}
        """Keyed by the identity of the prompt. The prompt is kept alive so that its identity is not reused."""

    async def encode_within(
        self,
        most: int | None,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        callable_tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> EncodedPrompt:
        encoded = await super().encode_within(most, messages, tools, callable_tools=callable_tools)
        offered = [] if self._codec.disable_tool_calls else list(deepcopy(tools or ()))
        self._ear.offered[tuple(encoded.prompt_ids)] = encoded.callable_tools
        self._requests[id(encoded)] = encoded, [normalise(mapping_of(m)) for m in messages], offered
        return encoded

    def accept(
        self,
        encoded: EncodedPrompt,
        generation: Generation,
        turn_index: int,
        **how: Any,
    ) -> dict[str, Any]:
        message = super().accept(encoded, generation, turn_index, **how)
        _, messages, tools = self._requests.pop(id(encoded))
        ends = self._codec.stop_token_ids
        text = self._codec.template.decode([token for token in generation.response_ids if token not in ends])
        self._ear.asked.append(
            Asked(
                messages=tuple(messages), tools=tuple(tools), encoded=encoded, turn=turn_index, reply=message, text=text
            )
        )
        return message


class ScriptedEngine(InferenceEngine):
    """Engine that plays ``scenario`` for every agent of an episode."""

    max_model_len = CONTEXT

    def __init__(self, codec: ChatCodec, ear: Ear, scenario: Scenario, *, most: int) -> None:
        """Create the engine.

        :param most: Maximum number of replies. The next request ends the episode as truncated.
        """
        self._codec, self._ear, self._scenario, self._most = codec, ear, scenario, most
        self._said: Counter[str] = Counter()
        self.notes: dict[str, None] = {}
        """Unique notes on replies that differ from the scenario."""

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        """Return the next reply of the scenario.

        :raises TurnLimitReached: The maximum number of replies is reached.
        """
        if self._said.total() >= self._most:
            raise TurnLimitReached(f"the check ends after {self._most} replies")
        number = self._said[session]
        self._said[session] += 1
        tools = self._ear.offered[tuple(prompt_ids)]
        said, note = write_move(self._codec.template, self._scenario.move(number), tools, number, prompt_ids)
        if note:
            self.notes[note] = None
        return said
