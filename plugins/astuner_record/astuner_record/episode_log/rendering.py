"""Write conversations of the log so that their chat template renders the recorded text.

Other software trains a conversation by rendering its messages with the model's chat template, but the engine received
token IDs. Each conversation is therefore rendered with the run's tokenizer, template and template variables, and
compared with the text of the recorded IDs. If the parsed form of a reply renders to different text (the template
strips white space, spells JSON differently, or drops empty reasoning), the reply's literal text is written instead.

Invariant: a conversation without a `difference` renders to the recorded text, followed by white space at most.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from astuner import AgentRegistry, ChatCodec, Config, PluginManager, load_config
from astuner.contracts.errors import AstunerError
from astuner.contracts.messages import parse_arguments
from astuner.contracts.types import Turn
from astuner_record.episode_log.rows import json_text

Message = dict[str, Any]

_THOUGHT = ("<think>", "</think>")
_REPLY = "astuner_reply"
"""Marks replies while messages are converted to the template's form, which may insert messages before them."""
_BEFORE, _SHOWN = 8, 40
"""Characters shown before a difference, and from it on."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages of one trained agent along one branch, from the first message to the last reply."""

    agent: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    """Tools offered in the last turn."""
    turns: int
    policy: str = ""
    path: tuple[Turn, ...] = ()
    """Turns, in order."""
    replies: tuple[int, ...] = ()
    """Index in `messages` of the reply of each turn."""
    difference: str = ""
    """Why the chat template does not render the recorded text; empty if it does."""
    same_tokens: bool = False
    """Whether tokenizing the rendered text gives the recorded IDs."""


class RunTemplates:
    """Chat templates of a run with their tokenizers, by policy."""

    def __init__(self, codecs: Mapping[str, tuple[Any, ChatCodec]], config: Config | None = None, missing: str = ""):
        """Create the templates.

        :param codecs: Policy -> tokenizer and codec.
        :param missing: Why there are no codecs.
        """
        self._fitters = {policy: Fitter(tokenizer, codec) for policy, (tokenizer, codec) in codecs.items()}
        self._missing = missing
        model = config.astuner.model if config else None
        self.kwargs: Mapping[str, Any] = dict(model.chat_template_kwargs) if model else {}
        """Template variables."""
        self.named: str = (model.chat_template or "") if model else ""
        """Template that the run used instead of the tokenizer's default; empty for the default."""

    @classmethod
    def of(cls, run: Path, plugins: PluginManager | None = None) -> RunTemplates:
        """Load the tokenizers that the settings of a run folder name.

        A failure to load is not an error. The conversations are then not compared, and report the reason.
        """
        from astuner_models.serving import make_codec, policy_tokenizer

        try:
            config = load_config(run / "resolved.yaml", backbone="debug", plugins=plugins)
            codecs: dict[str, tuple[Any, ChatCodec]] = {}
            for policy in AgentRegistry.of(config.astuner).policies:
                tokenizer = policy_tokenizer(config, policy)
                codecs[policy] = tokenizer, make_codec(config, tokenizer)
        except (AstunerError, OSError, ValueError, ImportError) as e:
            return cls({}, missing=f"cannot load its chat template ({type(e).__name__}: {e})")
        return cls(codecs, config)

    def fitted(self, chat: Conversation) -> Conversation:
        """Return the conversation in the form that its template renders to the recorded text, if possible."""
        if (fitter := self._fitters.get(chat.policy)) is not None:
            return fitter.fitted(chat)
        why = self._missing or f"the run's settings contain no policy {chat.policy!r}"
        messages = tuple(_with_objects(message) for message in chat.messages)
        return replace(chat, messages=messages, difference=f"not compared with the recorded text: {why}")


class Fitter:
    """Search for messages that a chat template renders to recorded text."""

    def __init__(self, tokenizer: Any, codec: ChatCodec) -> None:
        self._tokenizer, self._codec, self._template = tokenizer, codec, codec.template
        self._forms: Counter[int] = Counter()
        """Number of times each form of a reply matched. The most frequent form is tried first."""

    def fitted(self, chat: Conversation) -> Conversation:
        """Return ``chat`` with messages that render to its recorded text, or with the remaining difference."""
        recording = _Recording(chat.path, self._template.decode)
        messages = self._shaped(chat)
        replies = [n for n, message in enumerate(messages) if message.pop(_REPLY, False)]
        text = self._rendered(messages, chat.tools)
        if text is not None and len(replies) == len(chat.path):
            while (at := _shared(text, recording.text)) < len(recording.text):
                turn = recording.turn_at(at, len(self._opened))
                better = self._with_other_reply(chat, messages, replies[turn], turn, recording)
                if better is None:
                    break
                messages, text = better
        written = replace(chat, messages=tuple(messages))
        if text is None:
            return replace(written, difference=self._refusal(messages, chat.tools))
        return self._compared(written, recording, text, replies)

    @cached_property
    def _opened(self) -> str:
        """Reasoning that the generation prompt opens or writes as empty; empty if it does neither."""
        _, tag, rest = self._template.generation_prompt.partition(_THOUGHT[0])
        return tag + rest

    def _shaped(self, chat: Conversation, **more: Any) -> list[Message]:
        marked = [{**m, _REPLY: True} if n in set(chat.replies) else m for n, m in enumerate(chat.messages)]
        return [dict(message) for message in self._template.shaped(_kept(marked), **more)]

    def _with_other_reply(
        self, chat: Conversation, messages: Sequence[Message], place: int, turn: int, recording: _Recording
    ) -> tuple[list[Message], str] | None:
        """Return the messages with another form of one reply, and their text, if that renders the reply as recorded."""
        for number, form in sorted(self._reply_forms(chat, turn), key=lambda item: -self._forms[item[0]]):
            if form == messages[place]:
                continue
            changed = [*messages[:place], form, *messages[place + 1 :]]
            text = self._rendered(changed, chat.tools)
            if text is not None and _shared(text, recording.text) >= recording.ends[turn]:
                self._forms[number] += 1
                return changed, text
        return None

    def _reply_forms(self, chat: Conversation, turn: int) -> Iterator[tuple[int, Message]]:
        """Yield the possible forms of a reply: as parsed, with its literal reasoning, and as plain text."""
        parsed, said = chat.messages[chat.replies[turn]], self._said(chat.path[turn])
        whole = f"{self._opened}{said}" if _THOUGHT[0] not in said else said
        lead, opened, rest = whole.partition(_THOUGHT[0])
        thought, closed, answer = rest.partition(_THOUGHT[1])
        thoughtful = {"reasoning_content": thought} if opened and closed and not lead.strip() else None
        structured = [parsed] if thoughtful is None else [parsed, {**parsed, **thoughtful}]
        plain = [{"role": "assistant", "content": answer, **thoughtful}] if thoughtful else []
        plain += [{"role": "assistant", "content": text} for text in dict.fromkeys((said, whole))]
        forms = [self._template.shaped([m], text_arguments=text) for text in (False, True) for m in structured]
        yield from ((n, dict(form[0])) for n, form in enumerate(forms) if len(form) == 1)
        yield from enumerate(plain, start=len(forms))

    def _said(self, turn: Turn) -> str:
        ids = turn.generation.response_ids
        return self._template.decode(ids[:-1] if ids and ids[-1] in self._codec.stop_token_ids else ids)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the text that other software trains, or None if the template rejects the messages."""
        try:
            return self._template.decode(self._ids(messages, tools))
        except _refusals():
            return None

    def _refusal(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            self._ids(messages, tools)
        except _refusals() as e:
            return f"the chat template rejects the complete conversation: {type(e).__name__}: {e}"
        raise AssertionError("the template rejected these messages before")

    def _ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(
            _kept(messages),
            tools=_kept(tools) or None,
            tokenize=True,
            return_dict=True,
            **self._template.variables,
        )
        return list(rendered["input_ids"])

    def _compared(self, chat: Conversation, recording: _Recording, text: str, replies: Sequence[int]) -> Conversation:
        at = _shared(text, recording.text)
        if at < len(recording.text) or text[at:].strip():
            return replace(chat, difference=self._difference(chat, recording, text, at, replies))
        made, ids = self._ids(chat.messages, chat.tools), recording.ids
        same = made[: len(ids)] == ids
        return replace(chat, same_tokens=same, difference="" if same else self._forged(made, ids))

    def _difference(self, chat: Conversation, recording: _Recording, text: str, at: int, replies: Sequence[int]) -> str:
        if at == len(recording.text):
            return f"the last reply has no end token, and the chat template writes {text[at:][:_SHOWN]!r} there"
        turn = recording.turn_at(at, len(self._opened))
        place = f"messages[{replies[turn]}]" if turn < len(replies) else "the messages"
        begin = max(0, at - _BEFORE)
        run, other = recording.text[begin : at + _SHOWN], text[begin : at + _SHOWN]
        where = place if at < recording.ends[turn] else f"the messages after {place}"
        earlier = turn < len(recording.ends) - 1 and _THOUGHT[0] in recording.text[begin : recording.ends[turn]]
        why = "; it removes the reasoning of earlier replies" if earlier and self._template.drops_reasoning else ""
        return f"{where}: the run has {run!r}, the chat template writes {other!r}{why}"

    def _forged(self, made: Sequence[int], ids: Sequence[int]) -> str:
        """Return an error if the tokenizer makes a control token of text that is plain in the run, otherwise ""."""
        control = {n for n, token in self._tokenizer.added_tokens_decoder.items() if str(token) not in _THOUGHT}
        counts, recorded = Counter(i for i in made if i in control), Counter(i for i in ids if i in control)
        if counts == recorded:
            return ""
        name = self._template.decode([next(i for i in counts | recorded if counts[i] != recorded[i])])
        return f"{name!r} is plain text in the run, and other software encodes it as a control token"


class _Recording:
    """Recorded text of a conversation."""

    def __init__(self, path: Sequence[Turn], decode: Any) -> None:
        last = path[-1].generation
        self.ids = [*last.prompt_ids, *last.response_ids]
        self.text: str = decode(self.ids)
        self._path, self._decode = path, decode

    @cached_property
    def ends(self) -> list[int]:
        """End of each turn's reply, in characters."""
        made = (turn.generation for turn in self._path)
        return [len(self._decode([*g.prompt_ids, *g.response_ids])) for g in made]

    @cached_property
    def starts(self) -> list[int]:
        """Start of each turn's reply, in characters."""
        return [len(self._decode(list(turn.generation.prompt_ids))) for turn in self._path]

    def turn_at(self, at: int, opened: int) -> int:
        """Return the last turn whose reply starts at or before a character.

        :param opened: Number of characters of the reply's reasoning that are part of the prompt.
        """
        return max((n for n, start in enumerate(self.starts) if start - opened <= at), default=0)


def _refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions that a template raises for messages it does not accept."""
    from jinja2 import TemplateError

    return TemplateError, TypeError, AttributeError, ValueError, LookupError


def _kept(values: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return a copy in the form that readers of the exported file get."""
    return list(json.loads(json_text(list(values))))


def _shared(one: str, other: str) -> int:
    """Return the number of leading characters that are equal."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    low, high = 0, length  # the first `low` characters are equal, the first `high` characters are not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


def _with_objects(message: Message) -> Message:
    """Return the message with tool call arguments as objects, which most templates expect."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        parsed = parse_arguments(function["arguments"]) if isinstance(function["arguments"], str) else None
        calls.append({**call, "function": {**function, **({} if parsed is None else {"arguments": parsed})}})
    return {**message, "tool_calls": calls}
