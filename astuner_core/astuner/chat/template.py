"""A tokenizer's chat template, rendered piece by piece.

A first prompt is rendered completely. Later prompts render only new messages: they are appended to a short stand-in
conversation, and the template's text after the stand-in's last reply is the new piece. When the template is loaded,
probes check for every kind of message after a reply that the piece equals the template's text in the real conversation.
If it does not, `continues` returns False. Invariant: a property that no probe has shown is not assumed. If a template
writes different text after a reply in a longer conversation, or moves it, `find_breaks` finds the conditions.

A `Shape` is the form of messages that one template requires. Invariant: the content of a message is not changed. Parts
that a template does not support are omitted, as the template would omit them, and never moved silently.

Some templates change text before a reply when messages follow it (Qwen3's drops earlier reasoning, Mistral's moves the
tools). This is not done here: recorded tokens are kept, so that the turns of an episode remain one sample.

Messages and tools are text: the name of a control token (``<|im_end|>``) that they contain, or are a part of, is
encoded as ordinary letters. A text therefore cannot open a turn of another role (`astuner.chat.control`).

Invariant: if `continues` returns True, prompt + reply + `continuation_ids` is the template's own text around the reply.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import json
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol

from astuner.chat.control import CUT, JOINT, ControlNames, split_at_cuts, without_cuts
from astuner.chat.history import Context
from astuner.chat.literals import Literals, sources
from astuner.chat.outline import Outlines
from astuner.chat.rendering import fastest_writer, through_transformers
from astuner.chat.reply import (
    END_THINK,
    NO_CALLS,
    THINK,
    can_parse,
    known_families,
    opens_thought,
    read_by_template,
    read_tagged,
)
from astuner.chat.sandbox import quicken
from astuner.chat.token_bytes import TokenBytes
from astuner.contracts.chat_family import CallStyle, Family, Read, ReadReply, Tools
from astuner.contracts.errors import ConfigError, ContextOverflow, UnsupportedRequest
from astuner.contracts.messages import ENCODE, Message, normalise, packed, parse_arguments
from astuner.plugins.loader import PluginManager

REMEMBERED = 512
"""Cached renderings of each kind. A batch has far fewer different first prompts than episodes."""
MAX_VERDICTS = 1 << 16
"""Maximum number of cached structures of conversations."""
LONG = 32 << 10
"""Length of texts, in characters or bytes, from which on a thread (0.1 ms) costs less than tokenization (15 ms)."""
_CHARACTERS = 8
"""Characters of a long text that are encoded first, per token of the context. Prose and code have 3 to 5 per token."""
_UNSETTLED = 256
"""Tokens at the end of a text's start that may differ in the complete text. Observed: 2 with byte pairs (such as
Qwen's),
7 with a unigram model, and 99 if a long word becomes one unknown token."""
_MOST: contextvars.ContextVar[int | None] = contextvars.ContextVar("astuner_most_tokens", default=None)
"""Maximum number of tokens for texts encoded in this context."""
_TAIL = 64
"""Tokens at the end of a prompt that parsers of complete replies get."""
_OPENING = 16
"""Tokens at the end of a prompt that can contain a newly opened thought: a tag, followed by white space."""
_MOST_VARIABLES = 64
"""Maximum number of cached results for variables of requests."""
_MOST_BEGINNINGS = 64
"""Maximum number of prefixes that are rendered to find a refused message."""
_HINT = "set astuner.model.chat_template to a Jinja file, such as Qwen2.5's or Qwen3's template"
_MORE = "Llama, Mistral, DeepSeek, GLM, gpt-oss and Gemma come with: pip install astuner-families"
_TRIED = ("a", " a b", "\n\n a\n", "Zwölf, 十二, 🙂 = 12.", '{"x": [1, -2.5]}', "    return x  # y\t\n")
"""Texts on which a tokenizer's backend is compared with the tokenizer."""
MARK, THOUGHT = (f"astuner-stand-in-{what}-{secrets.token_hex(8)}" for what in ("reply", "thought"))
"""Random marks that no message contains. Text before the mark is cut off."""
PROBE = "astuner_probe"
TOOL = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]},
    },
}
CALL = {"id": "call_probe", "type": "function", "function": {"name": PROBE, "arguments": '{"k": "v"}'}}
SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "?"}
RESULT = {"role": "tool", "content": "r", "tool_call_id": "call_probe", "name": PROBE}
ANSWER, CALLING = {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}


@dataclass(frozen=True)
class Shape:
    """The form of messages that a chat template requires."""

    text_arguments: bool = False
    """Whether arguments are JSON text, for templates that put them between strings; otherwise they are objects."""
    style: CallStyle = NO_CALLS


def shaped(messages: Sequence[Message], shape: Shape) -> list[Message]:
    """Return ``messages`` (normalized) in the form that a template of this shape requires."""
    if shape.style.reshape is not None:
        messages = shape.style.reshape(messages)
    return [_shaped(message, shape) for message in messages]


def _shaped(message: Message, shape: Shape) -> Message:
    calls = message.get("tool_calls")
    if not calls or shape.text_arguments:  # others write ``arguments | tojson``; invalid JSON stays text
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> dict[str, Any]:
    function = call["function"]
    parsed = parse_arguments(function["arguments"])
    return {**call, "function": {**function, "arguments": function["arguments"] if parsed is None else parsed}}


_PLAIN = Shape()


class Render(Protocol):
    """`ChatTemplate.render`, for a shape of messages."""

    def __call__(
        self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = True, shape: Shape = ...
    ) -> str: ...


class Encoded(NamedTuple):
    """A rendered text as token IDs."""

    ids: list[int]
    cuts: int = 0
    """Number of control tokens' names that are encoded as letters."""
    joined: int = 0
    """Number of these names that no single text contains completely."""


class Behind(Enum):
    """The template's text after a reply in a complete conversation."""

    SAME = "same"
    """Equal to the text after the same reply in a short conversation."""
    OWN = "own"
    """Different text, after an unchanged prefix."""
    BRANCH = "branch"
    """Text that cannot follow the recorded tokens."""


class Following(NamedTuple):
    """Kinds of messages after a reply that templates distinguish."""

    results: bool
    """Whether there are tool results."""
    others: bool
    """Whether there are other messages, such as a user's."""
    systems: bool
    """Whether there are system messages, which some templates move to the front."""

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Following:
        roles = {message["role"] for message in messages}
        return cls("tool" in roles, not roles <= {"tool", "system"}, "system" in roles)


class Break(NamedTuple):
    """Conditions under which a template's text after a reply differs from the text in a short conversation."""

    system: bool
    tools: bool
    following: Following


def reply(**more: Any) -> dict[str, Any]:
    """Return a marked reply."""
    return {"role": "assistant", "content": MARK, **more}


def stand_in(
    following: Sequence[Message], calls: Sequence[Any], *, shows_calls: bool, one_call: bool
) -> dict[str, Any]:
    """Return a marked reply that ``following`` may follow: it calls the tools of the results at its start.

    :param calls: Calls of the real reply; if empty, calls are invented for the results.
    :param shows_calls: Whether the template writes calls, so that a call can contain the mark instead of the content.
    """
    made: list[tuple[Any, Any]] = []
    if following and following[0]["role"] == "tool":
        made = [(call["id"], call["function"]["name"]) for call in calls]
        for message in following if not made else ():
            if message["role"] != "tool":
                break
            made.append((message.get("tool_call_id"), message.get("name") or "tool"))
    if not made:
        return reply()
    made = made[:1] if one_call else made
    arguments = ["{}"] * (len(made) - 1) + [f'{{"?": "{MARK}"}}' if shows_calls else "{}"]
    return {
        "role": "assistant",
        "content": "" if shows_calls else MARK,
        "tool_calls": [
            {"id": label, "type": "function", "function": {"name": name, "arguments": text}}
            for (label, name), text in zip(made, arguments, strict=True)
        ],
    }


def behind_mark(text: str, family: Family) -> str:
    """Return the part of ``text`` that starts at the end of the marked reply.

    :raises ValueError: The mark is missing, or the reply has no end token.
    """
    at = text.rindex(MARK)
    ends = [end for token in (family.closes or family.follows) if (end := text.find(token, at)) != -1]
    if not ends:
        raise ValueError("the reply has no end token")
    return text[min(ends) :]


def find_families(
    render: Render, known: Sequence[Family], special: Sequence[str], parser: ReadReply | None
) -> tuple[Sequence[Family], str, str]:
    """Return possible families, the generation prompt, and the template's text after a reply.

    :param known: Known families; several may differ only in their tool calls.
    :param special: Special tokens of the tokenizer.
    :param parser: Parser of the tokenizer's response template, for unknown families.
    """
    asked, prompt = render([USER], generation_prompt=False), render([USER])
    asks = prompt[len(asked) :] if prompt.startswith(asked) else ""
    tail = render([USER, reply(), USER]).partition(MARK)[2]
    found = [
        family
        for family in known
        if tail.startswith(family.closes or family.follows)
        and (asks.startswith(family.asks) if family.asks else not asks and prompt.endswith(family.asked))
    ]
    if found:
        return found, asks, tail
    ends_with = max((token for token in special if token and tail.startswith(token)), key=len, default="")
    if parser is not None and ends_with and asks:
        name = "the tokenizer's own response template"
        styles = (CallStyle.of_replies(name, parser),)
        family = Family(name, asks, closes=(ends_with,), stops=(ends_with,), styles=styles, channels=parser)
        return (family,), asks, tail
    return (), asks, tail


def written(render: Render, family: Family, message: Message, tools: Tools, shape: Shape, *, asks: str) -> str:
    """Return the text that a model would have written for ``message``: the template's text without header and end.

    :param asks: The generation prompt.
    """
    asked = render([USER], tools, generation_prompt=False, shape=shape)
    text = render([USER, message], tools, generation_prompt=False, shape=shape)
    spoken = text[_shared(asked, text) :]
    header = _shared(spoken, asks)
    while 0 < header < len(asks) and asks[header - 1] not in ">\n｜":  # a partial match is not a header
        header -= 1
    spoken = spoken[header:]
    end = max((spoken.rfind(token) for token in family.closes), default=-1)
    return spoken[:end] if end != -1 else spoken


def _shared(one: str, other: str) -> int:
    """Return the length of the common prefix."""
    length = min(len(one), len(other))
    return next((n for n in range(length) if one[n] != other[n]), length)


def find_calls(render: Render, family: Family, *, asks: str) -> Shape | None:
    """Return how the template shows tools and writes calls; None if it does not, or in an unknown format."""
    for text_arguments in (False, True):
        for style in family.styles:
            shape = Shape(text_arguments, style)
            try:
                if PROBE not in render([USER], [TOOL], shape=shape):
                    return None
                text = written(render, family, CALLING, [TOOL], shape, asks=asks)
            except UnsupportedRequest:
                continue
            _, calls, _ = style.read(text, [TOOL])
            if [(c.name, parse_arguments(c.arguments)) for c in calls] == [(PROBE, {"k": "v"})]:
                return shape
    return None


def shape_without_calls(render: Render) -> Shape:
    """Return the shape for a template whose calls cannot be parsed.

    Messages with calls may still come from elsewhere.
    """
    for shape in (Shape(), Shape(text_arguments=True)):
        try:
            render([USER, CALLING, RESULT, USER], shape=shape)
        except UnsupportedRequest:
            continue
        return shape
    return Shape()


_ASKS, _SAYS, _ORDERS, _GETS, _GETS_MORE = (
    {**message, "content": f"astuner-probe-{n}"} for n, message in enumerate((USER, ANSWER, SYSTEM, RESULT, RESULT))
)
_SEEN: tuple[list[Message], ...] = (
    [USER],
    [SYSTEM, USER],
    [USER, {**ANSWER, "reasoning_content": "t"}],
    [SYSTEM, USER, {**ANSWER, "reasoning_content": "t"}, USER],
    [USER, CALLING, RESULT],
)
"""Conversations with which `renders_alike` compares variables."""
_FOLLOWING: tuple[list[Message], ...] = (
    [],
    [_ASKS],
    [_ASKS, _SAYS, _ASKS],
    [_GETS],
    [_GETS, _GETS_MORE],
    [_GETS, _ASKS],
    [_ORDERS],
    [_ORDERS, _ASKS],
    [_ASKS, _ORDERS],
    [_GETS, _ORDERS],
    [_GETS, _ORDERS, _ASKS],
)
"""Messages after a reply: each kind of `Following` at least once."""
_EARLIER: tuple[list[Message], ...] = (
    [USER],
    [USER, ANSWER, USER],
    [USER, CALLING, RESULT],
    [USER, CALLING, RESULT, ANSWER, USER],
)
"""Messages before a reply."""


def find_breaks(render: Render, family: Family, shape: Shape, *, tools: bool) -> frozenset[Break]:
    """Return when the template's text after a reply depends on earlier messages, or lacks later ones.

    Conversations of which the template omits a message are not counted, because they are refused.

    :param tools: Whether the template shows tools.
    """
    breaks: set[Break] = set()
    for following in _FOLLOWING:
        marked = [stand_in(following, (), shows_calls=tools, one_call=shape.style.one_call), *following]
        try:
            expected: str | None = behind_mark(render([USER, *marked], shape=shape), family)
        except ValueError:  # the template refuses even the short conversation (UnsupportedRequest), or hides the reply
            expected = None
        for system in (False, True):
            for offered in ([], [TOOL]) if tools else ([],):
                for earlier in _EARLIER:
                    before = [SYSTEM, *earlier] if system else earlier
                    try:
                        text = render([*before, *marked], offered, shape=shape)
                    except UnsupportedRequest:
                        continue  # such a conversation cannot occur
                    if any(message["content"] not in text for message in following):
                        continue
                    try:
                        behind = behind_mark(text, family)
                        same = behind == expected and all(m["content"] in behind for m in following)
                    except ValueError:
                        same = False
                    if not same:
                        breaks.add(Break(system, bool(offered), Following.of(following)))
    return frozenset(breaks)


class ChatTemplate:
    """Renders messages and converts text to token IDs. Thread-safe."""

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        plugins: PluginManager | None = None,
    ) -> None:
        """Load and probe the template.

        :param chat_template: Jinja text that replaces the tokenizer's template.
        :param chat_template_kwargs: Variables for every rendering, for example ``{"enable_thinking": False}``.
        :param plugins: Plugins with chat families; None for the installed ones.
        :raises astuner.contracts.errors.ConfigError: There is no template, its family is not supported, or it has no
            such variables.
        """
        self._tokenizer = tokenizer
        self._encode, self._decode = fastest(tokenizer)
        self._token_bytes = TokenBytes(tokenizer, self._encode, self._decode)
        self._template = chat_template
        self._lock, self._one_long = threading.Lock(), threading.Lock()
        self._swallows = any(token.lstrip for token in getattr(tokenizer, "added_tokens_decoder", {}).values())
        self.whole = _remembering(lambda messages, tools: self._encoded(self._complete(messages, tools)))
        """Encodes complete conversations (normalized) with tools. Raises `UnsupportedRequest` if the template refuses
        or
        omits a message. Cached, because all attempts of a group start with the same messages."""
        self._behind = _remembering(self._encode_behind)
        self._verdicts: dict[Any, Behind] = {}
        self._families = known_families(plugins)
        self._shape = _PLAIN
        self._control = ControlNames(())
        self._name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        self.tokens_encoded = 0
        """Number of tokens created from text so far, without cached or reused ones."""
        if self._template is None and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(f"the tokenizer of {self._name} has no chat template; {_HINT}")
        self._kwargs = dict(chat_template_kwargs or {})
        self._alike: dict[bytes, bool] = {}
        self._check_kwargs()
        self._write_plain = through_transformers(tokenizer, chat_template, self._kwargs)
        try:
            self._probe()
        except UnsupportedRequest as e:
            raise ConfigError(
                f"the chat template of {self._name} cannot render a plain conversation ({e}); {_HINT}"
            ) from e
        if isinstance(text := self._template or tokenizer.chat_template, str):  # otherwise there are several
            quicken(text)
        tried = [(shaped(messages, self._shape), tools) for messages in _SEEN for tools in ([], [TOOL])]
        self._write_plain = fastest_writer(tokenizer, chat_template, self._kwargs, tried)

    def _probe(self) -> None:
        """Determine the behavior of the template by rendering with it."""
        own = self._parse if can_parse(self._tokenizer) else None
        special = [str(token) for token in getattr(self._tokenizer, "all_special_tokens", ())]
        families, self.generation_prompt, tail = find_families(self._render, self._families, special, own)
        if not families:
            raise ConfigError(
                f"the chat template of {self._name} ends a turn with {tail.strip()[:40]!r} and starts one with "
                f"{self.generation_prompt[:40]!r}, which matches no installed chat family ({_MORE}); {_HINT}"
            )
        literals = Literals.of(sources(self._template or self._tokenizer.chat_template))
        self.outlines = Outlines(literals)
        """Structures of conversations, the keys of `follow`'s cache."""
        ways = ((family, find_calls(self._render, family, asks=self.generation_prompt)) for family in families)
        family, found = next((way for way in ways if way[1]), (families[0], None))
        self.format: Family = family
        """The family, which defines the format of replies."""
        written_end = next(t for t in (family.closes or family.follows) if tail.startswith(t))
        self._id_of(written_end)
        self.end_of_turn_id: int = self._id_of(family.stops[0])
        """The token that usually ends a turn of the model."""
        stops = [i for token in family.stops if (i := self._single_id(token)) is not None]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))
        """All tokens that may end a turn."""
        self._closing = {i for token in family.closes if (i := self._single_id(token)) is not None}
        self.renders_tools: bool = found is not None
        """Whether the template shows tools to the model, and writes calls in a format that can be parsed."""
        self._shape = found or shape_without_calls(self._render)
        self.calls = self._shape.style
        """The format of tool calls."""
        names, changes_case = self._find_control(), literals.changes_case
        self._control = ControlNames(names, literals.separators, changes_case=changes_case)
        self._probe_reasoning()
        self.breaks: frozenset[Break] = find_breaks(self._render, family, self._shape, tools=self.renders_tools)
        """Conditions under which a reply cannot be continued."""

    def _probe_reasoning(self) -> None:
        thoughtful = reply(reasoning_content=THOUGHT)
        before, _, after = self.render([USER, thoughtful], generation_prompt=False).partition(THOUGHT)
        tagged = before.rstrip().endswith(THINK) and after.lstrip().startswith(END_THINK)
        in_content = reply(content=f"{THINK}{THOUGHT}{END_THINK}b")
        self.thinking: bool = opens_thought(self.generation_prompt)
        """Whether the generation prompt has already opened a thought."""
        self.reasons: bool = (
            tagged
            or self.thinking
            or (self.format.channels is not None and bool(after))
            or THOUGHT not in self.render([USER, in_content, USER])
        )
        """Whether the family marks its reasoning, which is then separated from the reply's text."""
        self.drops_reasoning: bool = self.reasons and THOUGHT not in self.render([USER, thoughtful, USER])
        """Whether the template omits earlier reasoning after another user message (as Qwen3's does)."""

    def _find_control(self) -> set[str]:
        """Return the names of control tokens: special tokens, and tokens that the template writes between messages.

        Tags of thoughts are excluded: prompts mention them, and templates search messages for them.
        """
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        between = self.continuation([USER])
        with contextlib.suppress(UnsupportedRequest):  # no support for tool results
            between += self.continuation([RESULT])
        names = {str(token) for token in added if token.special or str(token) in between}
        names |= set(map(str, getattr(self._tokenizer, "all_special_tokens", ())))
        return {n for n in names if len(n.strip()) > 1} - {THINK, END_THINK}  # a single letter cannot be split

    def count_control(self, encoded: Encoded, messages: Sequence[Message], tools: Tools = ()) -> int:
        """Return the number of texts that were prevented from becoming control tokens.

        :param messages: The encoded messages (normalized).
        """
        if not encoded.cuts + encoded.joined:
            return 0
        whole = sum(map(self._control.in_message, messages)) + sum(map(self._control.in_tool, tools))
        return whole + encoded.joined

    @property
    def variables(self) -> dict[str, Any]:
        """A copy of the variables for every rendering."""
        return dict(self._kwargs)

    def mentions(self, variable: str) -> bool:
        """Return whether the template's source contains a variable of this name."""
        own = self._template or self._tokenizer.chat_template
        texts = own.values() if isinstance(own, Mapping) else [own]
        return any(re.search(rf"\b{re.escape(variable)}\b", text) for text in texts)

    def renders_alike(self, variables: Mapping[str, Any]) -> bool:
        """Return whether these variables have no effect on the template, compared with the run's own variables.

        Every kind of message is rendered once with both. The result for the latest variables is cached.
        """
        names = inspect.signature(self._tokenizer.apply_chat_template).parameters
        if not variables.keys().isdisjoint({"messages", *names}):
            return False
        if (plain := packed(dict(variables))) is None:
            return False
        if plain not in self._alike:
            if len(self._alike) >= _MOST_VARIABLES:
                self._alike.clear()
            both = (self._kwargs, {**self._kwargs, **variables})
            own, other = ([self._probe_text(each, kwargs) for each in _SEEN] for kwargs in both)
            self._alike[plain] = own == other
        return self._alike[plain]

    def _probe_text(self, messages: Sequence[Message], kwargs: Mapping[str, Any]) -> str | None:
        try:
            tools = [TOOL] if self.renders_tools else []
            write = through_transformers(self._tokenizer, self._template, kwargs)
            asks = messages[-1]["role"] != "assistant"
            return write(shaped(messages, self._shape), tools, generation_prompt=asks)
        except Exception:  # templates may raise anything for an unexpected value
            return None

    @property
    def incremental(self) -> bool:
        """Whether any reply can be continued, independent of the messages after it."""
        return not self.breaks

    def continues(self, messages: Sequence[Message], *, system: bool, tools: bool) -> bool:
        """Return whether `continuation_ids` may be used for ``messages``.

        :param system: Whether the conversation starts with a system message.
        :param tools: Whether the conversation has tools.
        """
        return not self.breaks or Break(system, tools, Following.of(messages)) not in self.breaks

    def render(self, messages: Sequence[Message], tools: Tools | None = None, *, generation_prompt: bool = True) -> str:
        """Return the template's text for ``messages`` (normalized).

        Names of control tokens that the template did not write contain a `CUT` or `JOINT`.

        :raises UnsupportedRequest: The template refuses them, for example two user messages in a row.
        """
        return self._render(messages, tools or (), generation_prompt=generation_prompt, shape=self._shape)

    def shaped(self, messages: Sequence[Message], *, text_arguments: bool | None = None) -> list[Message]:
        """Return ``messages`` (normalized) in the form that the template requires.

        :param text_arguments: Whether arguments of tool calls are JSON text or objects; None for the template's form.
        """
        shape = self._shape if text_arguments is None else replace(self._shape, text_arguments=text_arguments)
        return shaped(messages, shape)

    def _render(
        self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = True, shape: Shape = _PLAIN
    ) -> str:
        write = partial(self._write, generation_prompt=generation_prompt)
        return self._control.render(write, shaped(messages, shape), tools)

    def _write(self, messages: Sequence[Message], tools: Tools, *, generation_prompt: bool) -> str:
        """Return the template's own text for shaped messages."""
        from jinja2 import TemplateError

        try:
            return self._write_plain(messages, tools, generation_prompt=generation_prompt)
        except (TemplateError, TypeError, AttributeError) as e:  # the last two: unexpected values in a message
            raise UnsupportedRequest(f"the chat template rejects these messages: {type(e).__name__}: {e}") from e

    def continuation(self, messages: Sequence[Message], *, calls: Sequence[Any] = ()) -> str:
        """Return the template's text after a reply, from its end token to the next generation prompt.

        :param calls: Tool calls of the reply.
        :raises UnsupportedRequest: The template refuses ``messages``, or does not show all of them after the reply.
        """
        marked = stand_in(messages, calls, shows_calls=self.renders_tools, one_call=self._shape.style.one_call)

        def behind(following: Sequence[Message]) -> str:
            try:
                return behind_mark(self.render([USER, marked, *following]), self.format)
            except UnsupportedRequest:
                raise
            except ValueError as e:
                raise UnsupportedRequest(f"the chat template does not show a reply before these messages: {e}") from e

        text = behind(messages)
        if lost := _left_out(text, messages, behind):
            raise UnsupportedRequest(f"the chat template does not write {_shown(lost[0])} after the reply")
        return text

    def if_it_fits(self, most: int, messages: Sequence[Message], work: Callable[[], Any]) -> Any:
        """Run ``work`` for long ``messages`` (normalized) and tools in this thread, one at a time.

        Their length is checked before they are copied and rendered: texts of users and tools are part of every
        rendering
        (`_left_out`), except for surrounding white space.

        :raises ContextOverflow: A text has more tokens than ``most``.
        """
        _MOST.set(most)
        with self._one_long:
            self._measured("".join(m["content"].strip() for m in messages if m.get("role") in ("user", "tool")))
            return work()

    def _measured(self, text: str) -> str:
        """Return ``text``. A long text that cannot fit is refused after encoding only its start."""
        if (most := _MOST.get()) is None:
            return text
        size = max(LONG, _CHARACTERS * most)
        while size < len(text):
            beginning = text[:size].rstrip() if self._swallows else text[:size]
            n = len(self.encode(beginning)) - _UNSETTLED
            if n > most:
                raise ContextOverflow(f"its prompt has more than {n} tokens, but the context is {most}")
            size *= 2
        return text

    def _complete(self, messages: Sequence[Message], tools: Tools) -> str:
        """Return `render`, if no message is missing: a model must not be trained on messages that it never saw.

        Some templates show a system message only in some cases (Mistral Nemo's: while the user's message is the last).
        This is accepted, because the model knows it.
        """
        try:
            text = self.render(messages, tools)
        except UnsupportedRequest as e:
            at = self._refused_at(messages, tools)
            raise e if at is None else UnsupportedRequest(f"messages[{at}]: {e}") from e
        lost = _left_out(text, messages, lambda others: self.render(others, tools))
        if [m["role"] for m in messages].count("system") == 1 and messages[0]["role"] == "system":
            lost = [message for message in lost if message is not messages[0]]
        if lost:
            index = next(n for n, message in enumerate(messages) if message is lost[0])
            raise UnsupportedRequest(
                f"the chat template of {self._name} omits {_shown(lost[0])} (messages[{index}]). Send its text in "
                f"another message, or {_HINT}"
            )
        return self._measured(text)

    def _refused_at(self, messages: Sequence[Message], tools: Tools) -> int | None:
        """Return the index of the first message that makes the template refuse the conversation.

        Return None if the template accepts no prefix, or if there are too many messages.
        """
        for end in range(len(messages) - 1, max(0, len(messages) - _MOST_BEGINNINGS), -1):
            with contextlib.suppress(UnsupportedRequest):
                self.render(messages[:end], tools)
                return end
        return None

    def continuation_ids(
        self, messages: Sequence[Message], *, last: int | None, calls: Sequence[Any] = ()
    ) -> list[int]:
        """Return the token IDs of `continuation` after a reply. Cached, because groups repeat tool results.

        :param last: The reply's last token. If it is the end token at the start of the continuation, or an equivalent
            one, it is not repeated. A reply without an end token gets one here.
        """
        named = [(call.get("id"), call["function"]["name"]) for call in calls]
        return self._without_end(self._behind(messages, named).ids, last)

    def follow(self, asked: Context, reply: Mapping[str, Any], context: Context, *, last: int | None) -> Encoded | None:
        """Encode the template's text after a recorded reply in the complete conversation.

        The complete conversation is rendered for the first conversation of each structure (`Outlines`). If the text
        equals the text in a short conversation, `continuation_ids` is sufficient from then on.

        :param asked: The conversation that the reply answers.
        :param reply: The reply, with its tool calls.
        :param context: ``asked``, the reply, and the messages after it.
        :param last: The reply's last token, as in `continuation_ids`.
        :return: None if the template refuses the conversation, or changes earlier text.
        """
        following, calls = context.request, reply.get("tool_calls", ())
        verdict, text = self._verdict(asked, reply, context)
        if verdict is Behind.BRANCH:
            return None
        if verdict is Behind.SAME:
            encoded = self._behind(following, [(call.get("id"), call["function"]["name"]) for call in calls])
        else:
            encoded = self._encoded(self._measured(text))
        return Encoded(self._without_end(encoded.ids, last), encoded.cuts, encoded.joined)

    def _verdict(self, asked: Context, reply: Mapping[str, Any], context: Context) -> tuple[Behind, str]:
        """Return how a conversation continues, and the template's text after the reply if it differs."""
        structure = context.structure
        key = None if structure is None else structure.key(exactly=self.outlines.counts)
        known = None if key is None else self._verdicts.get(key)
        if known is not None and known is not Behind.OWN:
            return known, ""
        found = self._look_behind(asked.messages(), normalise(reply), context.request, context.tools)
        if key is not None:
            if len(self._verdicts) >= MAX_VERDICTS:
                self._verdicts.clear()
            self._verdicts[key] = found[0]
        return found

    def _look_behind(
        self, earlier: Sequence[Message], reply: Message, following: Sequence[Message], tools: Tools
    ) -> tuple[Behind, str]:
        """Return the `_verdict` by rendering the complete conversation."""
        marked = _marked(reply, shows_calls=self.renders_tools)

        def behind(following: Sequence[Message]) -> tuple[str, str]:
            text = self.render([*earlier, marked, *following], tools)
            return text, behind_mark(text, self.format)

        try:
            whole, tail = behind(following)
            with contextlib.suppress(UnsupportedRequest):  # raised for the short conversation
                if tail == self.continuation(following, calls=reply.get("tool_calls", ())):
                    return Behind.SAME, ""
            kept = whole.startswith(self.render(earlier, tools, generation_prompt=False))
            if kept and not _left_out(tail, following, lambda others: behind(others)[1]):
                return Behind.OWN, tail
        except ValueError:  # the template refuses it (UnsupportedRequest), or hides the reply
            pass
        return Behind.BRANCH, ""

    def _without_end(self, ids: list[int], last: int | None) -> list[int]:
        """Return the IDs after a reply, without the end token if the reply has one."""
        ended = last is not None and (last == ids[0] or {last, ids[0]} <= self._closing)
        return ids[1:] if ended else ids

    def _encode_behind(self, messages: Sequence[Message], named: Sequence[tuple[str | None, str]]) -> Encoded:
        calls = [{"id": label, "function": {"name": name}} for label, name in named]
        return self._encoded(self._measured(self.continuation(messages, calls=calls)))

    def _encoded(self, rendered: str) -> Encoded:
        cuts, joined = rendered.count(CUT), rendered.count(JOINT)
        return Encoded(self.encode(rendered), cuts - joined, joined)

    def read(self, text: str, tools: Tools, *, prompt_ids: Sequence[int]) -> Read:
        """Parse a reply (without its end token).

        :param tools: Tools whose calls are parsed; without tools, calls stay text.
        :param prompt_ids: The prompt of the reply.
        """
        if self.format.channels is None:
            thinking = self.reasons and self._opens_thought(prompt_ids)
            return read_tagged(text, self.calls, tools, reasoning=self.reasons, thinking=thinking)
        if self.format.channels == self._parse:
            return self._parse(text, tools, self.decode(prompt_ids[-_TAIL:]))
        return self.format.channels(text, tools)

    def write_reply(
        self,
        content: str,
        tool_calls: Sequence[Mapping[str, Any]] = (),
        reasoning: str = "",
        *,
        prompt_ids: Sequence[int] | None = None,
    ) -> str:
        """Return the text that a model of this family would write for a reply, without its end token.

        It is the template's text for the reply as the last message. Parts that the template does not support are
        missing
        (Llama's and Mistral's omit the content next to a call; Qwen2.5's omits reasoning). White space around the
        content
        is the template's. Parse the result with `read` to see which parts remain.

        :param tool_calls: OpenAI-style calls; ``arguments`` as JSON text or an object.
        :param prompt_ids: The prompt of the reply; None for a plain conversation.
        :raises UnsupportedRequest: The family has no such replies, for example two calls where only one is possible.
        """
        if tool_calls and not self.renders_tools:
            raise UnsupportedRequest(f"{self.format.name}: this chat template has no tool calls that can be parsed")
        if len(tool_calls) > 1 and self._shape.style.one_call:
            raise UnsupportedRequest(f"{self.format.name} supports one call per reply, not {len(tool_calls)}")
        message = normalise({"role": "assistant", "content": content, "tool_calls": [*tool_calls]})
        if reasoning:
            message["reasoning_content"] = reasoning
        text = written(self._render, self.format, message, (), self._shape, asks=self.generation_prompt)
        text = without_cuts(text)
        if (
            self._opens_thought(prompt_ids) and END_THINK not in text
        ):  # the template shows no thought, although the prompt has opened one
            return f"{reasoning}\n{END_THINK}\n\n{text}"
        return text

    def _opens_thought(self, prompt_ids: Sequence[int] | None) -> bool:
        """Return whether a prompt, or the prompt of a plain conversation, has already opened a thought."""
        return self.thinking if prompt_ids is None else opens_thought(self.decode(prompt_ids[-_OPENING:]))

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of ``text``. Special tokens are recognized, except across a cut; none are added."""
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates, for example from undecodable output, which tokenizers reject
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        first, *others = split_at_cuts(text)
        ids = self._encode(first)
        for piece in others:
            ids += self._encode_inside(piece)
        with self._lock:
            self.tokens_encoded += len(ids)
        return ids

    def _encode_inside(self, piece: str) -> list[int]:
        """Return the token IDs of a text after another one, where tokenizers add no leading space."""
        before = self._encode("\n")
        ids = self._encode(f"\n{piece}")
        return ids[len(before) :] if ids[: len(before)] == before else self._encode(piece)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` including special tokens; invalid UTF-8 becomes U+FFFD."""
        return self._decode(list(ids))

    def token_bytes(self, ids: Sequence[int]) -> list[bytes | None]:
        """Return the bytes of each token, as found by `TokenBytes`."""
        return self._token_bytes.of(ids)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end token, which base models use in addition to the template's."""
        eos: int | None = self._tokenizer.eos_token_id
        return eos

    def _parse(self, text: str, tools: Tools, prompt: str | None = None) -> Read:
        prompt = self.generation_prompt if prompt is None else prompt
        return read_by_template(text, self._tokenizer.response_template, prompt=prompt, tools=tools)

    def _check_kwargs(self) -> None:
        taken = {"messages", *inspect.signature(self._tokenizer.apply_chat_template).parameters} - {"documents"}
        for name in self._kwargs:
            if name in taken:
                raise ConfigError(f"astuner.model.chat_template_kwargs: {name!r} is set by ASTuner. Remove it")
            if not self.mentions(name):
                raise ConfigError(
                    f"astuner.model.chat_template_kwargs: the chat template of {self._name} has no variable {name!r}. "
                    "Remove it, or use a name that the template contains"
                )

    def _single_id(self, token: str) -> int | None:
        """Return the ID of ``token`` if it is a single token of the tokenizer."""
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else None

    def _id_of(self, token: str) -> int:
        found = self._single_id(token)
        if found is None:
            raise ConfigError(
                f"the chat template of {self._name} ends a turn with {token!r}, which is not a single token of its "
                f"tokenizer. Add it to the tokenizer's special tokens, or {_HINT}"
            )
        return found


def _shown(message: Message) -> str:
    """Return a message for error texts."""
    return f"the {message['role']} message {message['content'].strip()[:60]!r}"


def _marked(message: Message, *, shows_calls: bool) -> dict[str, Any]:
    """Return ``message`` with the mark at its end: in the arguments of its last call, if calls are shown."""
    calls = message.get("tool_calls")
    if not calls or not shows_calls:
        return {**message, "content": message["content"] + MARK}
    *others, last = calls
    function = {**last["function"], "arguments": json.dumps({"?": MARK})}
    return {**message, "tool_calls": [*others, {**last, "function": function}]}


def _remembering(compute: Callable[[Any, Any], Encoded]) -> Callable[[Any, Any], Encoded]:
    """Return a thread-safe function that caches the latest results of ``compute``. Callers get their own lists.

    Data that does not consist of Python's built-in types (`packed`) is not cached.
    """
    kept: dict[bytes, tuple[tuple[int, ...], int, int]] = {}  # in order of use, latest last
    lock = threading.Lock()

    def ask(messages: Any, other: Any) -> Encoded:
        plain = packed((messages, other))
        if plain is None:
            return compute(messages, other)
        known = kept.get(plain)
        if known is None:
            made = compute(messages, other)
            known = tuple(made.ids), made.cuts, made.joined
        with lock:
            kept.pop(plain, None)
            kept[plain] = known
            if len(kept) > REMEMBERED:
                del kept[next(iter(kept))]
        ids, cuts, joined = known
        return Encoded([*ids], cuts, joined)

    return ask


def _left_out(text: str, messages: Sequence[Message], render: Callable[[list[Message]], str]) -> list[Message]:
    """Return the messages (normalized) that ``text`` does not show.

    Some templates accept only the first or the last system message and silently omit others. A message is considered
    omitted only if its text occurs nowhere in the rendering, in any spelling. Assistant messages are not checked,
    because templates drop earlier reasoning intentionally.

    :param text: The template's text for the messages.
    :param render: Renders messages with other contents. It is used if a text is found neither unchanged nor as JSON (as
        with gpt-oss), for templates with another escaping.
    """
    text = without_cuts(text)
    missing = [n for n, m in enumerate(messages) if m["role"] != "assistant" and not _stands_in(text, m["content"])]
    if not missing:
        return []
    marks = {n: f"shown{secrets.token_hex(8)}" for n in missing}
    again = render([{**m, "content": marks[n]} if n in marks else m for n, m in enumerate(messages)]).lower()
    return [messages[n] for n, mark in marks.items() if mark not in again]


def _stands_in(text: str, content: str) -> bool:
    said = content.strip()
    return said in text or ENCODE(said)[1:-1] in text


def fastest(tokenizer: Any) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Return the fastest functions from text to IDs and back that a tokenizer supports.

    A Hugging Face tokenizer also requests offsets and masks from its Rust backend, which takes nearly as long as the
    IDs, and checks its input for tensors before decoding. The backend is called directly if it gives the same results,
    which is checked on load. It supports several threads at the same time. The tokenizer does not: each call may
    configure it differently, which raises "Already borrowed".

    Invariant: the functions encode like ``tokenizer.encode(text, add_special_tokens=False)`` and decode like
    ``tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)``.
    """
    lock = threading.Lock()

    def encode(text: str) -> list[int]:
        with lock:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def decode(ids: list[int]) -> str:
        with lock:
            text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast"):
        return encode, decode

    def encode_directly(text: str) -> list[int]:
        if backend.truncation is not None or backend.padding is not None:  # set by a call of other code
            return encode(text)
        try:
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException as e:  # Rust's panic, which is not an `Exception` and cannot be imported
            if type(e).__name__ != "PanicException":
                raise
            raise UnsupportedRequest(f"the tokenizer rejects a text of {len(text)} characters: {e}") from e
        return ids

    def decode_directly(ids: list[int]) -> str:
        text: str = backend.decode(ids, skip_special_tokens=False)
        return text

    texts = (*_TRIED, "".join(f"x{token} y" for token in tokenizer.all_special_tokens))
    tried = [encode(text) for text in texts]
    same_ids = [encode_directly(text) for text in texts] == tried
    same_text = all(decode_directly(part) == decode(part) for ids in tried for part in (ids, ids[1:], ids[:-1]))
    return encode_directly if same_ids else encode, decode_directly if same_text else decode
