"""A tokenizer's own chat template, rendered piece by piece.

The whole conversation is rendered once, for a first prompt.  After that only what is new is: it is put behind a
short stand-in conversation, and what the template writes behind the stand-in's last reply is the piece.  That this
is what the template would have written in the real conversation is probed when the template is loaded, on every kind of
message that can follow a reply; where it is not, `continues` says no.  Invariant: a trait that a probe did not see is
not assumed.  Where a template writes what follows a reply in one way in a short conversation and in another way in a
longer one, or puts it somewhere else, `find_breaks` says when.

A `Shape` is the form that messages must have for one template.  Invariant: what a message says is not changed; where a
template has no place for something, it is left out here as the template itself would leave it out, and never silently
put elsewhere.

What a template would do to the part before the reply once something follows (Qwen3's leaves earlier reasoning out,
Mistral's moves the tools) is not done: recorded tokens are kept, so that the turns of an episode stay one sample.

What messages and tools say is text: the name of a control token (``<|im_end|>``) that it holds, or takes part in, is
encoded as ordinary letters, so that a text cannot open a turn of another role (`astuner.chat.control`).

Invariant: where `continues` holds, prompt + reply + `continuation_ids` is the template's own text around the reply.
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
"""Renderings kept of each kind; a batch has far fewer different first prompts than episodes."""
MAX_VERDICTS = 1 << 16
"""Structures of conversations that are remembered."""
LONG = 32 << 10
"""Bytes of messages, or characters, that are long: to tokenise them takes 15 ms, and a thread for it 0.1 ms."""
_CHARACTERS = 8
"""Of the beginning by which a long text is measured, for each token of the context; prose and code have 3 to 5."""
_UNSETTLED = 256
"""Tokens at the end of a beginning that the whole may not have. Seen were 2 with byte pairs (Qwen's among them), 7 with
a unigram model, and 99 where a long word becomes one unknown token."""
_MOST: contextvars.ContextVar[int | None] = contextvars.ContextVar("astuner_most_tokens", default=None)
"""Tokens that a text may have which is encoded here."""
_TAIL = 64
"""Tokens of a prompt's end that the readers of whole replies look at."""
_OPENING = 16
"""Tokens of a prompt's end that can hold a thought just opened: a tag, and white space behind it."""
_MOST_VARIABLES = 64
"""Variables of requests whose effect is kept."""
_MOST_BEGINNINGS = 64
"""Beginnings of refused messages that are rendered to find the one that is refused."""
_HINT = "set astuner.model.chat_template to a Jinja file, such as Qwen2.5's or Qwen3's template"
_MORE = "Llama, Mistral, DeepSeek, GLM, gpt-oss and Gemma come with: pip install astuner-families"
_TRIED = ("a", " a b", "\n\n a\n", "Zwölf, 十二, 🙂 = 12.", '{"x": [1, -2.5]}', "    return x  # y\t\n")
"""Texts on which the backend of a tokenizer is compared with the tokenizer."""
MARK, THOUGHT = (f"astuner-stand-in-{what}-{secrets.token_hex(8)}" for what in ("reply", "thought"))
"""Random, so that no message holds them by chance or on purpose: what stands in front of the mark is cut off."""
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
    """What a chat template wants of messages."""

    text_arguments: bool = False
    """Arguments as JSON text, for templates that put them between strings; else as the object."""
    style: CallStyle = NO_CALLS


def shaped(messages: Sequence[Message], shape: Shape) -> list[Message]:
    """``messages`` (normalised), as a template of this shape takes them."""
    if shape.style.reshape is not None:
        messages = shape.style.reshape(messages)
    return [_shaped(message, shape) for message in messages]


def _shaped(message: Message, shape: Shape) -> Message:
    calls = message.get("tool_calls")
    if not calls or shape.text_arguments:  # others write ``arguments | tojson``; text that is no object stays as it is
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
    """A rendered text as token ids."""

    ids: list[int]
    cuts: int = 0
    """Names of control tokens that are letters."""
    joined: int = 0
    """Of these, the ones that no text holds completely."""


class Behind(Enum):
    """What a template writes after a reply in a complete conversation."""

    SAME = "same"
    """The same as after that reply in a short conversation."""
    OWN = "own"
    """Something else, behind an unchanged beginning."""
    BRANCH = "branch"
    """Something that cannot follow the recorded tokens."""


class Following(NamedTuple):
    """What comes behind a reply, as far as templates care."""

    results: bool
    """There are tool results."""
    others: bool
    """There are other messages, such as a user's."""
    systems: bool
    """There are system messages, which some templates move to the front."""

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Following:
        roles = {message["role"] for message in messages}
        return cls("tool" in roles, not roles <= {"tool", "system"}, "system" in roles)


class Break(NamedTuple):
    """When a template does not write the same behind a reply as behind the same reply in a short conversation."""

    system: bool
    tools: bool
    following: Following


def reply(**more: Any) -> dict[str, Any]:
    """A marked reply."""
    return {"role": "assistant", "content": MARK, **more}


def stand_in(
    following: Sequence[Message], calls: Sequence[Any], *, shows_calls: bool, one_call: bool
) -> dict[str, Any]:
    """A marked reply that ``following`` may follow: one that calls the tools whose results are the first messages.

    :param calls: the calls of the real reply; those that the results ask for are made up where there are none.
    :param shows_calls: the template writes calls, so that a call can carry the mark; else the content does.
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
    """What ``text`` holds from the end of the marked reply on.

    :raises ValueError: the mark is not there, or nothing ends the reply.
    """
    at = text.rindex(MARK)
    ends = [end for token in (family.closes or family.follows) if (end := text.find(token, at)) != -1]
    if not ends:
        raise ValueError("nothing ends the reply")
    return text[min(ends) :]


def find_families(
    render: Render, known: Sequence[Family], special: Sequence[str], parser: ReadReply | None
) -> tuple[Sequence[Family], str, str]:
    """The families that it may be, the generation prompt, and what the template writes behind a reply.

    :param known: those that are looked for; several may differ in how they write calls alone.
    :param special: the tokenizer's special tokens.
    :param parser: reads replies as the tokenizer itself says, for families that ASTuner does not know.
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
    """The text that a model would have written for ``message``, as the template writes it: no header, no end token.

    :param asks: the generation prompt.
    """
    asked = render([USER], tools, generation_prompt=False, shape=shape)
    text = render([USER, message], tools, generation_prompt=False, shape=shape)
    spoken = text[_shared(asked, text) :]
    header = _shared(spoken, asks)
    while 0 < header < len(asks) and asks[header - 1] not in ">\n｜":  # what both begin with by chance is no header
        header -= 1
    spoken = spoken[header:]
    end = max((spoken.rfind(token) for token in family.closes), default=-1)
    return spoken[:end] if end != -1 else spoken


def _shared(one: str, other: str) -> int:
    """How many characters both begin with."""
    length = min(len(one), len(other))
    return next((n for n in range(length) if one[n] != other[n]), length)


def find_calls(render: Render, family: Family, *, asks: str) -> Shape | None:
    """How the template shows tools and writes calls; None when it does not, or in no way that is known."""
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
    """The shape for a template whose calls cannot be read: messages with calls may come from elsewhere all the same."""
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
"""Conversations by which `renders_alike` compares variables."""
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
"""What may follow a reply: each kind of `Following` at least once."""
_EARLIER: tuple[list[Message], ...] = (
    [USER],
    [USER, ANSWER, USER],
    [USER, CALLING, RESULT],
    [USER, CALLING, RESULT, ANSWER, USER],
)
"""What may come before it."""


def find_breaks(render: Render, family: Family, shape: Shape, *, tools: bool) -> frozenset[Break]:
    """When what the template writes behind a reply depends on what came before it, or is not all that follows.

    A conversation of which the template leaves a message out altogether does not count: it is refused.

    :param tools: whether the template shows tools.
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
                        continue  # such a conversation cannot come about
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
    """Renders messages and turns text into token ids. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        plugins: PluginManager | None = None,
    ) -> None:
        """Load and probe.

        :param chat_template: the Jinja text to use instead of the tokenizer's own.
        :param chat_template_kwargs: variables for every rendering, e.g. ``{"enable_thinking": False}``.
        :param plugins: those whose families are known; None: whatever is installed here.
        :raises astuner.contracts.errors.ConfigError: there is no template, it is of no family that ASTuner reads, or it
            has no such variables.
        """
        self._tokenizer = tokenizer
        self._encode, self._decode = fastest(tokenizer)
        self._token_bytes = TokenBytes(tokenizer, self._encode, self._decode)
        self._template = chat_template
        self._lock, self._one_long = threading.Lock(), threading.Lock()
        self._swallows = any(token.lstrip for token in getattr(tokenizer, "added_tokens_decoder", {}).values())
        self.whole = _remembering(lambda messages, tools: self._encoded(self._complete(messages, tools)))
        """Whole messages (normalised) with tools, encoded; `UnsupportedRequest` where the template refuses them or
        leaves one out. Remembered: all attempts of a group begin with the same ones."""
        self._behind = _remembering(self._encode_behind)
        self._verdicts: dict[Any, Behind] = {}
        self._families = known_families(plugins)
        self._shape = _PLAIN
        self._control = ControlNames(())
        self._name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        self.tokens_encoded = 0
        """How many tokens were made of text so far; what is remembered or spliced is not made again."""
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
        if isinstance(text := self._template or tokenizer.chat_template, str):  # else it has several
            quicken(text)
        tried = [(shaped(messages, self._shape), tools) for messages in _SEEN for tools in ([], [TOOL])]
        self._write_plain = fastest_writer(tokenizer, chat_template, self._kwargs, tried)

    def _probe(self) -> None:
        """Find out how the template behaves by rendering with it."""
        own = self._parse if can_parse(self._tokenizer) else None
        special = [str(token) for token in getattr(self._tokenizer, "all_special_tokens", ())]
        families, self.generation_prompt, tail = find_families(self._render, self._families, special, own)
        if not families:
            raise ConfigError(
                f"the chat template of {self._name} ends a turn with {tail.strip()[:40]!r} and asks for one with "
                f"{self.generation_prompt[:40]!r}, as no family does that is installed ({_MORE}); {_HINT}"
            )
        literals = Literals.of(sources(self._template or self._tokenizer.chat_template))
        self.outlines = Outlines(literals)
        """Structures of conversations, by which `follow` remembers what it found out."""
        ways = ((family, find_calls(self._render, family, asks=self.generation_prompt)) for family in families)
        family, found = next((way for way in ways if way[1]), (families[0], None))
        self.format: Family = family
        """How the family writes its replies."""
        written_end = next(t for t in (family.closes or family.follows) if tail.startswith(t))
        self._id_of(written_end)
        self.end_of_turn_id: int = self._id_of(family.stops[0])
        """The token at which a turn of the model is usually over."""
        stops = [i for token in family.stops if (i := self._single_id(token)) is not None]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))
        """All tokens at which it may be."""
        self._closing = {i for token in family.closes if (i := self._single_id(token)) is not None}
        self.renders_tools: bool = found is not None
        """Whether the template shows tools to the model, and writes calls in a way that can be read."""
        self._shape = found or shape_without_calls(self._render)
        self.calls = self._shape.style
        """How calls are written."""
        names, changes_case = self._find_control(), literals.changes_case
        self._control = ControlNames(names, literals.separators, changes_case=changes_case)
        self._probe_reasoning()
        self.breaks: frozenset[Break] = find_breaks(self._render, family, self._shape, tools=self.renders_tools)
        """When a reply cannot be continued."""

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
        """Whether the family marks its reasoning, which is then split off the reply's text."""
        self.drops_reasoning: bool = self.reasons and THOUGHT not in self.render([USER, thoughtful, USER])
        """Whether the template leaves earlier reasoning out once the user speaks again (Qwen3's does)."""

    def _find_control(self) -> set[str]:
        """The names of control tokens: special ones, and those that the template writes between messages.

        Tags of thoughts are none: prompts ask for them, and templates look for them in a message.
        """
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        between = self.continuation([USER])
        with contextlib.suppress(UnsupportedRequest):  # it has no tool results
            between += self.continuation([RESULT])
        names = {str(token) for token in added if token.special or str(token) in between}
        names |= set(map(str, getattr(self._tokenizer, "all_special_tokens", ())))
        return {n for n in names if len(n.strip()) > 1} - {THINK, END_THINK}  # of one letter nothing can be cut

    def count_control(self, encoded: Encoded, messages: Sequence[Message], tools: Tools = ()) -> int:
        """Return how many texts were kept from being control tokens.

        :param messages: those that were encoded (normalised).
        """
        if not encoded.cuts + encoded.joined:
            return 0
        whole = sum(map(self._control.in_message, messages)) + sum(map(self._control.in_tool, tools))
        return whole + encoded.joined

    @property
    def variables(self) -> dict[str, Any]:
        """A copy of the variables that every rendering gets."""
        return dict(self._kwargs)

    def mentions(self, variable: str) -> bool:
        """Return whether the template's text has a variable of this name."""
        own = self._template or self._tokenizer.chat_template
        texts = own.values() if isinstance(own, Mapping) else [own]
        return any(re.search(rf"\b{re.escape(variable)}\b", text) for text in texts)

    def renders_alike(self, variables: Mapping[str, Any]) -> bool:
        """Return whether these variables change nothing: the template renders as it does with the run's own.

        Every kind of message is rendered once with both; the answer is kept for the latest variables.
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
        except Exception:  # whatever a template raises for a value that it does not expect
            return None

    @property
    def incremental(self) -> bool:
        """Whether any reply can be continued, whatever follows it."""
        return not self.breaks

    def continues(self, messages: Sequence[Message], *, system: bool, tools: bool) -> bool:
        """Whether `continuation_ids` may be used for ``messages``.

        :param system: the conversation begins with a system message.
        :param tools: the conversation has tools.
        """
        return not self.breaks or Break(system, tools, Following.of(messages)) not in self.breaks

    def render(self, messages: Sequence[Message], tools: Tools | None = None, *, generation_prompt: bool = True) -> str:
        """The template's text for ``messages`` (normalised), with a `CUT` or `JOINT` in each name of a control token
        that is not the template's own.

        :raises UnsupportedRequest: the template refuses them, for instance two user messages in a row.
        """
        return self._render(messages, tools or (), generation_prompt=generation_prompt, shape=self._shape)

    def shaped(self, messages: Sequence[Message], *, text_arguments: bool | None = None) -> list[Message]:
        """Return ``messages`` (normalised) in the form that the template takes.

        :param text_arguments: Whether arguments of tool calls are JSON text or objects; None: what the template takes.
        """
        shape = self._shape if text_arguments is None else replace(self._shape, text_arguments=text_arguments)
        return shaped(messages, shape)

    def _render(
        self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = True, shape: Shape = _PLAIN
    ) -> str:
        write = partial(self._write, generation_prompt=generation_prompt)
        return self._control.render(write, shaped(messages, shape), tools)

    def _write(self, messages: Sequence[Message], tools: Tools, *, generation_prompt: bool) -> str:
        """Return what the template itself writes for shaped messages."""
        from jinja2 import TemplateError

        try:
            return self._write_plain(messages, tools, generation_prompt=generation_prompt)
        except (TemplateError, TypeError, AttributeError) as e:  # the latter two: it met what it does not expect
            raise UnsupportedRequest(f"the chat template does not take these messages: {type(e).__name__}: {e}") from e

    def continuation(self, messages: Sequence[Message], *, calls: Sequence[Any] = ()) -> str:
        """What the template writes behind a reply when ``messages`` follow, from the reply's end token to the next
        generation prompt.

        :param calls: the reply's tool calls.
        :raises UnsupportedRequest: the template refuses them, or does not show all of them behind the reply.
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
            raise UnsupportedRequest(f"the chat template does not write {_shown(lost[0])} behind the reply")
        return text

    def if_it_fits(self, most: int, messages: Sequence[Message], work: Callable[[], Any]) -> Any:
        """What ``work`` makes of long ``messages`` (normalised) and tools, in this thread alone, one at a time.

        They are measured before they are copied and rendered: what users and tools say stands in every rendering
        (`_left_out`), but for white space around it.

        :raises ContextOverflow: a text has more tokens than ``most``.
        """
        _MOST.set(most)
        with self._one_long:
            self._measured("".join(m["content"].strip() for m in messages if m.get("role") in ("user", "tool")))
            return work()

    def _measured(self, text: str) -> str:
        """``text``; a long one that cannot fit is refused by its beginning, at the cost of what may fit."""
        if (most := _MOST.get()) is None:
            return text
        size = max(LONG, _CHARACTERS * most)
        while size < len(text):
            beginning = text[:size].rstrip() if self._swallows else text[:size]
            n = len(self.encode(beginning)) - _UNSETTLED
            if n > most:
                raise ContextOverflow(f"its prompt has more than {n} tokens, and the context only {most}")
            size *= 2
        return text

    def _complete(self, messages: Sequence[Message], tools: Tools) -> str:
        """`render`, if all is there: no model is to be trained for what it never saw.

        Where a template shows its one system message only sometimes (Mistral Nemo's: while the user speaks last), that
        is its own way, which the model knows.
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
                f"the chat template of {self._name} leaves out {_shown(lost[0])} (messages[{index}]); send what it "
                f"says in another message, or {_HINT}"
            )
        return self._measured(text)

    def _refused_at(self, messages: Sequence[Message], tools: Tools) -> int | None:
        """Return the index of the first message with which the template refuses the conversation.

        None: it takes no beginning of them, or they are many.
        """
        for end in range(len(messages) - 1, max(0, len(messages) - _MOST_BEGINNINGS), -1):
            with contextlib.suppress(UnsupportedRequest):
                self.render(messages[:end], tools)
                return end
        return None

    def continuation_ids(
        self, messages: Sequence[Message], *, last: int | None, calls: Sequence[Any] = ()
    ) -> list[int]:
        """Token ids of `continuation` behind a reply. Remembered: in a group, the same tool results come again.

        :param last: the reply's last token.  If it is the end token with which the continuation begins, or one that
            means the same, it is not repeated; a reply without one is ended here.
        """
        named = [(call.get("id"), call["function"]["name"]) for call in calls]
        return self._without_end(self._behind(messages, named).ids, last)

    def follow(self, asked: Context, reply: Mapping[str, Any], context: Context, *, last: int | None) -> Encoded | None:
        """Encode what the template writes after a recorded reply in the complete conversation.

        The complete conversation is rendered for the first conversation of each structure (`Outlines`).  Where the
        template writes there what it writes in a short one, `continuation_ids` is enough from then on.

        :param asked: what the reply answers.
        :param reply: the reply, with its tool calls.
        :param context: ``asked``, the reply, and the messages that follow it.
        :param last: the reply's last token, as in `continuation_ids`.
        :return: None where the template refuses the conversation, or writes what came before in another way.
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
        """Return how a conversation continues, and what the template writes after the reply if that differs."""
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
        """`_verdict`, by rendering the complete conversation."""
        marked = _marked(reply, shows_calls=self.renders_tools)

        def behind(following: Sequence[Message]) -> tuple[str, str]:
            text = self.render([*earlier, marked, *following], tools)
            return text, behind_mark(text, self.format)

        try:
            whole, tail = behind(following)
            with contextlib.suppress(UnsupportedRequest):  # in a short conversation
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
        """Take a reply apart (without its end token).

        :param tools: the tools whose calls are to be read; none: calls stay text.
        :param prompt_ids: what the model was asked with.
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
        """The text that a model of this family would write for such a reply, without its end token.

        It is what the template writes for it as the last message.  What the template has no place for is missing
        (Llama's and Mistral's leave out the content beside a call; Qwen2.5's leaves out reasoning); white space around
        the content is the template's.  Read it again with `read` to see what is left.

        :param tool_calls: OpenAI-style, ``arguments`` as JSON text or an object.
        :param prompt_ids: what the model is asked with; None: a plain conversation.
        :raises UnsupportedRequest: the family has no such replies, e.g. two calls where it makes one at a time.
        """
        if tool_calls and not self.renders_tools:
            raise UnsupportedRequest(f"{self.format.name}: this chat template has no tool calls that can be read")
        if len(tool_calls) > 1 and self._shape.style.one_call:
            raise UnsupportedRequest(f"{self.format.name} makes one call in a reply, not {len(tool_calls)}")
        message = normalise({"role": "assistant", "content": content, "tool_calls": [*tool_calls]})
        if reasoning:
            message["reasoning_content"] = reasoning
        text = written(self._render, self.format, message, (), self._shape, asks=self.generation_prompt)
        text = without_cuts(text)
        if (
            self._opens_thought(prompt_ids) and END_THINK not in text
        ):  # the template shows no thought, but the prompt has opened one
            return f"{reasoning}\n{END_THINK}\n\n{text}"
        return text

    def _opens_thought(self, prompt_ids: Sequence[int] | None) -> bool:
        """Return whether a prompt, or that of a plain conversation, has already opened a thought."""
        return self.thinking if prompt_ids is None else opens_thought(self.decode(prompt_ids[-_OPENING:]))

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, special tokens in it recognised and none added; between pieces at a cut is none."""
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates, e.g. from a tool's undecodable output: no tokenizer takes them
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        first, *others = split_at_cuts(text)
        ids = self._encode(first)
        for piece in others:
            ids += self._encode_inside(piece)
        with self._lock:
            self.tokens_encoded += len(ids)
        return ids

    def _encode_inside(self, piece: str) -> list[int]:
        """Token ids of a text that stands behind another, where a tokenizer puts no space before it."""
        before = self._encode("\n")
        ids = self._encode(f"\n{piece}")
        return ids[len(before) :] if ids[: len(before)] == before else self._encode(piece)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, every special token visible; bytes that are no UTF-8 become U+FFFD."""
        return self._decode(list(ids))

    def token_bytes(self, ids: Sequence[int]) -> list[bytes | None]:
        """Return the bytes of each token, as `TokenBytes` finds them."""
        return self._token_bytes.of(ids)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end token, which base models use beside the template's."""
        eos: int | None = self._tokenizer.eos_token_id
        return eos

    def _parse(self, text: str, tools: Tools, prompt: str | None = None) -> Read:
        prompt = self.generation_prompt if prompt is None else prompt
        return read_by_template(text, self._tokenizer.response_template, prompt=prompt, tools=tools)

    def _check_kwargs(self) -> None:
        taken = {"messages", *inspect.signature(self._tokenizer.apply_chat_template).parameters} - {"documents"}
        for name in self._kwargs:
            if name in taken:
                raise ConfigError(f"astuner.model.chat_template_kwargs: {name!r} is set by ASTuner; leave it out")
            if not self.mentions(name):
                raise ConfigError(
                    f"astuner.model.chat_template_kwargs: the chat template of {self._name} knows no {name!r}; "
                    "leave it out, or look into the template for the name it uses"
                )

    def _single_id(self, token: str) -> int | None:
        """The id of ``token``, if it is one token of the tokenizer."""
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else None

    def _id_of(self, token: str) -> int:
        found = self._single_id(token)
        if found is None:
            raise ConfigError(
                f"the chat template of {self._name} ends a turn with {token!r}, which is not one token of its "
                f"tokenizer; add it to the tokenizer's special tokens, or {_HINT}"
            )
        return found


def _shown(message: Message) -> str:
    """A message, for people."""
    return f"the {message['role']} message {message['content'].strip()[:60]!r}"


def _marked(message: Message, *, shows_calls: bool) -> dict[str, Any]:
    """``message``, with the mark at its end: in the arguments of its last call, where calls are shown."""
    calls = message.get("tool_calls")
    if not calls or not shows_calls:
        return {**message, "content": message["content"] + MARK}
    *others, last = calls
    function = {**last["function"], "arguments": json.dumps({"?": MARK})}
    return {**message, "tool_calls": [*others, {**last, "function": function}]}


def _remembering(compute: Callable[[Any, Any], Encoded]) -> Callable[[Any, Any], Encoded]:
    """``compute``, whose latest answers to plain data are kept, for several threads; who asks gets a list of their own.

    What is not made of Python's own types (`packed`) is not remembered.
    """
    kept: dict[bytes, tuple[tuple[int, ...], int, int]] = {}  # the latest last
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
    """Those of ``messages`` (normalised) that ``text`` does not show.

    Some templates take only the first or the last system message, and say nothing about the others.  A message is said
    to be left out only when its text is nowhere in the rendering, in no spelling.  Assistant messages are not looked
    at: templates drop earlier reasoning on purpose.

    :param text: what the template wrote for them.
    :param render: writes again, for other contents.  It is used where a text is found neither as it stands nor as JSON
        (gpt-oss), as in a template that escapes it in another way.
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
    """Two functions, from text to ids and back, by the shortest way that a tokenizer has.

    A Hugging Face tokenizer asks its Rust backend for offsets and masks too, which takes nearly as long as the ids, and
    nobody here needs them; what it is to decode it looks through first, for tensors.  The backend is asked directly
    where that gives the same, which is tried on load. It answers several threads at once; a tokenizer may be set up
    differently by each call, and then raises "Already borrowed".

    Invariant: what is returned encodes as ``tokenizer.encode(text, add_special_tokens=False)`` does, and decodes as
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
        if backend.truncation is not None or backend.padding is not None:  # somebody else's call left them behind
            return encode(text)
        try:
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException as e:  # Rust's panic, which is no `Exception` and has no name to import
            if type(e).__name__ != "PanicException":
                raise
            raise UnsupportedRequest(f"the tokenizer does not take a text of {len(text)} characters: {e}") from e
        return ids

    def decode_directly(ids: list[int]) -> str:
        text: str = backend.decode(ids, skip_special_tokens=False)
        return text

    texts = (*_TRIED, "".join(f"x{token} y" for token in tokenizer.all_special_tokens))
    tried = [encode(text) for text in texts]
    same_ids = [encode_directly(text) for text in texts] == tried
    same_text = all(decode_directly(part) == decode(part) for ids in tried for part in (ids, ids[1:], ids[:-1]))
    return encode_directly if same_ids else encode, decode_directly if same_text else decode
