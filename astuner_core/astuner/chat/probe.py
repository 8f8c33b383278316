"""What kind of chat template one is, found out by rendering with it.

Invariant: a trait that a probe did not see is not assumed.  Where a template writes what follows a reply in one way
in a short conversation and in another way in a longer one, or puts it somewhere else, `find_breaks` says when.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from astuner.chat.shape import Shape
from astuner.contracts.chat_family import CallStyle, Family, ReadReply, Tools
from astuner.contracts.errors import UnsupportedRequest
from astuner.contracts.messages import Message, parse_arguments

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
SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
RESULT = {"role": "tool", "content": "r", "tool_call_id": "call_probe", "name": PROBE}
ANSWER, CALLING = {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}


class Render(Protocol):
    """`astuner.chat.template.ChatTemplate.render`, for a shape of messages."""

    def __call__(
        self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = True, shape: Shape = ...
    ) -> str: ...


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

    def __str__(self) -> str:
        words = ["tool results"] * self.results + ["messages that are no tool results"] * self.others
        words += ["system messages"] * self.systems
        return " and ".join(words) or "nothing"


class Break(NamedTuple):
    """When a template does not write the same behind a reply as behind the same reply in a short conversation."""

    system: bool
    tools: bool
    following: Following

    def __str__(self) -> str:
        before = ["a system message"] * self.system + ["tools"] * self.tools
        with_ = f" in a conversation with {' and '.join(before)}" if before else ""
        return f"when {self.following} follow{'s' if str(self.following) == 'nothing' else ''} a reply{with_}"


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
    arguments = ['{"k": "v"}'] * (len(made) - 1) + [f'{{"k": "{MARK}"}}' if shows_calls else "{}"]
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


def find_calls(render: Render, family: Family, *, asks: str) -> tuple[CallStyle, Shape] | None:
    """How the template shows tools and writes calls; None when it does not, or in no way that is known."""
    for text_arguments in (False, True):
        for style in family.styles:
            shape = Shape(text_arguments, style.short_ids, style.one_call, style.one_text)
            try:
                if PROBE not in render([USER], [TOOL], shape=shape):
                    return None
                text = written(render, family, CALLING, [TOOL], shape, asks=asks)
            except UnsupportedRequest:
                continue
            _, calls, _ = style.read(text, [TOOL])
            if [(c.name, parse_arguments(c.arguments)) for c in calls] == [(PROBE, {"k": "v"})]:
                return style, shape
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
        marked = [stand_in(following, (), shows_calls=tools, one_call=shape.one_call), *following]
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
