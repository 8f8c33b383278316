"""A tokenizer's own chat template, rendered piece by piece.

The whole conversation is rendered once, for a first prompt.  After that only what is new is: it is put behind a
short stand-in conversation, and what the template writes behind the stand-in's last reply is the piece.  That this
is what the template would have written in the real conversation is probed when the template is loaded, on every
kind of message that can follow a reply; a template that fails the probe is not `incremental`.

Invariant: where `incremental` holds, prompt + reply + `continuation` is the template's own text around the reply.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from astuner.chat.errors import UnsupportedRequest
from astuner.chat.memo import RecentlyUsed
from astuner.chat.messages import Message, parse_arguments
from astuner.chat.reply import END_THINK, FORMATS, THINK, ReplyFormat
from astuner.errors import ConfigError

_MARK, _THOUGHT = "astuner-stand-in-reply", "astuner-stand-in-thought"
_TOOL = {
    "type": "function",
    "function": {
        "name": "astuner_probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"k": {"type": "string"}}},
    },
}
_CALL = {"id": "call_probe", "type": "function", "function": {"name": "astuner_probe", "arguments": '{"k": "v"}'}}
_USER = {"role": "user", "content": "u"}
_RESULT = {"role": "tool", "content": "r", "tool_call_id": "call_probe", "name": "astuner_probe"}
_FOLLOWING: tuple[list[Message], ...] = (
    [],
    [_USER],
    [_RESULT],
    [_RESULT, _RESULT],
    [_RESULT, _USER],
    [_USER, {"role": "assistant", "content": "b"}, _USER],
)
"""What may follow a reply, each rendered in several conversations by the probe."""
REMEMBERED = 512
"""Renderings kept; a batch has far fewer different first prompts than episodes."""
_HINT = "set astuner.model.chat_template to a Jinja file, such as Qwen2.5's or Qwen3's template"


class ChatTemplate:
    """Renders messages and turns text into token ids. Safe to use from several threads."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        """Load and probe.

        :param chat_template: the Jinja text to use instead of the tokenizer's own.
        :raises astuner.errors.ConfigError: there is no template, or it is of no family that ASTuner reads.
        """
        self._tokenizer = tokenizer
        self._template = chat_template
        self._lock = threading.Lock()  # a fast tokenizer that two threads use at once raises "Already borrowed"
        self._remembered = RecentlyUsed(REMEMBERED)
        self._name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        if self._template is None and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(f"the tokenizer of {self._name} has no chat template; {_HINT}")
        try:
            self._probe()
        except UnsupportedRequest as e:
            raise ConfigError(
                f"the chat template of {self._name} cannot render a plain conversation ({e}); {_HINT}"
            ) from e

    def _probe(self) -> None:
        """Find out how the template behaves by rendering with it."""
        asked = self.render([_USER], generation_prompt=False)
        self.generation_prompt = self.render([_USER])[len(asked) :]
        """What asks the model to speak."""
        self.format: ReplyFormat = self._find_format()
        """How the family writes its replies."""
        self.end_of_turn_id: int = self._id_of(self.format.end_of_turn)
        self.renders_tools: bool = self._probe_tools()
        """Whether the template shows tools to the model, and writes calls in the way `format` reads them."""
        thoughtful = _reply(reasoning_content=_THOUGHT)
        before, _, after = self.render([_USER, thoughtful], generation_prompt=False).partition(_THOUGHT)
        self.reasons: bool = before.rstrip().endswith(THINK) and after.lstrip().startswith(END_THINK)
        """Whether the template has a place for reasoning, which is then split off the reply's text."""
        self.drops_reasoning: bool = self.reasons and _THOUGHT not in self.render([_USER, thoughtful, _USER])
        """Whether the template leaves earlier reasoning out once the user speaks again (Qwen3's does).

        Recorded tokens are kept all the same, so that the turns of an episode stay one sample.
        """
        _, opened, thought = self.generation_prompt.rpartition(THINK)
        self.thinking: bool = bool(opened) and END_THINK not in thought
        """Whether the generation prompt has already opened a thought."""
        self.incremental: bool = self._probe_increments()
        """Whether `continuation` may be used."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """The template's text for ``messages`` (normalised).

        :raises UnsupportedRequest: the template refuses them, for instance two user messages in a row.
        """
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [_for_template(m) for m in messages],
                tools=list(tools) if tools else None,
                chat_template=self._template,
                add_generation_prompt=generation_prompt,
                tokenize=False,
            )
        except (TemplateError, TypeError) as e:  # TypeError: an expression in the template met what it did not expect
            raise UnsupportedRequest(f"the chat template does not take these messages: {type(e).__name__}: {e}") from e
        assert isinstance(text, str)  # tokenize=False
        return text

    def continuation(self, messages: Sequence[Message], *, ended: bool) -> str:
        """What the template writes behind a reply when ``messages`` follow, the next generation prompt included.

        :param ended: the reply has its end-of-turn token; otherwise the text begins with it.
        """
        text = self.render([_USER, _stand_in(messages), *messages])
        tail = text[text.index(self.format.end_of_turn, text.index(_MARK)) :]
        return tail[len(self.format.end_of_turn) :] if ended else tail

    def whole_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a whole conversation. Remembered: all attempts of a group begin with the same one."""
        key = _key("whole", messages, tools)
        return self._remembered.get(key, lambda: self.encode(self.render(messages, tools)))

    def continuation_ids(self, messages: Sequence[Message], *, ended: bool) -> list[int]:
        """Token ids of `continuation`. Remembered: in a group, the same tool results come again and again."""
        key = _key("continuation", messages, ended)
        return self._remembered.get(key, lambda: self.encode(self.continuation(messages, ended=ended)))

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, special tokens in it recognised and none added."""
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates, e.g. from a tool's undecodable output: no tokenizer takes them
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        with self._lock:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, every special token visible; bytes that are no UTF-8 become U+FFFD."""
        with self._lock:
            text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # one sequence of ids is one text
        return text

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end token, which base models use beside the template's."""
        eos: int | None = self._tokenizer.eos_token_id
        return eos

    def _find_format(self) -> ReplyFormat:
        text = self.render([_USER, _reply()], generation_prompt=False)
        tail = text.partition(_MARK)[2]
        for known in FORMATS:
            if tail.startswith(known.end_of_turn) and self.generation_prompt.startswith(known.prompt_start):
                return known
        raise ConfigError(
            f"the chat template of {self._name} ends a turn with {tail.strip()[:40]!r}, which no known family does "
            f"({', '.join(f.name for f in FORMATS)}); {_HINT}"
        )

    def _id_of(self, token: str) -> int:
        ids = self.encode(token)
        if len(ids) != 1:
            raise ConfigError(
                f"the chat template of {self._name} ends a turn with {token!r}, which is not one token of its "
                f"tokenizer; add it to the tokenizer's special tokens, or {_HINT}"
            )
        return ids[0]

    def _probe_tools(self) -> bool:
        try:
            offered = self.render([_USER], [_TOOL])
            text = self.render([_USER, _reply(tool_calls=[_CALL])], [_TOOL], generation_prompt=False)
        except UnsupportedRequest:
            return False
        if "astuner_probe" not in offered:
            return False
        written = text[text.index(_MARK) :] if _MARK in text else ""
        _, calls, _ = self.format.read_tool_calls(written.partition(self.format.end_of_turn)[0])
        return [(c.name, parse_arguments(c.arguments)) for c in calls] == [("astuner_probe", {"k": "v"})]

    def _probe_increments(self) -> bool:
        """Render each follow-up in a short, a long and a tool-using conversation; all must agree behind the reply."""
        system = {"role": "system", "content": "s"}
        earlier = [system, _USER, {"role": "assistant", "content": "a"}, _USER]
        for following in _FOLLOWING:
            try:
                expected = self.continuation(following, ended=False)
                for before, tools in ((earlier, None), ([_USER], [_TOOL]), (earlier, [_TOOL])):
                    text = self.render([*before, _stand_in(following), *following], tools)
                    if text[text.index(_MARK) + len(_MARK) :].partition(self.format.end_of_turn)[1:] != (
                        self.format.end_of_turn,
                        expected[len(self.format.end_of_turn) :],
                    ):
                        return False
            except ValueError:  # the mark or the end of turn is missing, or the template refuses the conversation
                return False
        return True


def _reply(**more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": _MARK, **more}


def _stand_in(following: Sequence[Message]) -> dict[str, Any]:
    """A marked reply that ``following`` may follow: one that calls the tools whose results are the first messages."""
    calls = []
    for message in following:
        if message["role"] != "tool":
            break
        call_id, name = message.get("tool_call_id"), message.get("name") or "tool"
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}})
    return _reply(tool_calls=calls) if calls else _reply()


def _for_template(message: Message) -> Message:
    """Templates write ``arguments | tojson``, so they need the object; text that is none stays as it is."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        parsed = parse_arguments(function["arguments"])
        calls.append(
            {**call, "function": {**function, "arguments": function["arguments"] if parsed is None else parsed}}
        )
    return {**message, "tool_calls": calls}


def _key(*parts: Any) -> str | None:
    """What tells one rendering from another; None for messages that are not plain data, which are not remembered."""
    try:
        return json.dumps(parts, ensure_ascii=False)
    except (TypeError, ValueError):
        return None
