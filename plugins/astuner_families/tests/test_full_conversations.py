"""What follows a recorded reply is what the template writes there for the full conversation, or the turn branches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest

from astuner.chat.codec import ChatCodec
from astuner.contracts.errors import UnsupportedRequest
from astuner.contracts.messages import normalise
from astuner.contracts.types import FinishReason, Generation
from astuner.testing import make_tokenizer
from plugins.astuner_families.tests.test_chat_families import FAMILIES, call_end, tokenizer
from tests.table import table

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "d",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}
CHATML = """
{%- set s = namespace(quiet=false, at=-1, n=0) %}BEFORE
{%- for m in messages %}EACH
{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ '<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}AFTER
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{{- '<think>\n\n</think>\n\n' if s.quiet else '' }}{% endif %}"""
QUIET = "{% set s.quiet = true %}"
TOOLS_AT_LAST_USER = (
    "{% for m in messages %}{% if m.role == 'user' %}{% set s.at = loop.index0 %}{% endif %}{% endfor %}",
    "{% if tools and loop.index0 == s.at %}{{ tools | tojson }}{% endif %}",
)


def chatml(before: str = "", each: str = "", after: str = "") -> str:
    """Return a ChatML template with something more before the messages, before each, and after all."""
    return CHATML.replace("BEFORE", before).replace("EACH", each).replace("AFTER", after)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


HAND_OFF = {"role": "assistant", "content": "Back to the supervisor."}
CALL, RESULT, LATE = "CALL", "RESULT", "LATE"


class Case(NamedTuple):
    """A template, what an agent says in turn, and what becomes of the turns."""

    template: str
    """Jinja, or the name of a family of `FAMILIES`."""
    script: Sequence[Any]
    """Lists of messages that are asked with; a text is a reply, ``CALL`` a call, ``RESULT`` and ``LATE`` its result."""
    turns: str
    """``=`` continues, ``b`` branches, ``x`` is refused; the first turn is not counted.

    A template of which the probes saw that it counts, or looks at messages further back, branches always."""
    tools: bool = False


ASK = [user("Where?")]
MORE = [user("And now?")]
CASES = {
    "a switch in the system message": Case(
        chatml("{% if '/quiet' in messages[0].content %}" + QUIET + "{% endif %}"),
        [[system("Sort. /quiet"), user("Where?")], "a", MORE, "b", MORE],
        "==",
    ),
    "a switch in any message, the last one wins": Case(
        chatml(
            each="{% if '/no' in m.content or '/yes' in m.content %}{% set s.quiet = '/no' in m.content %}{% endif %}"
        ),
        [[user("Where? /no")], "a", MORE, "b", [user("x /yes")], "c", MORE, "d", [user("y /no")], "e", MORE],
        "=====",
    ),
    "a switch that is a variable": Case(
        chatml("{% set off = '/off' %}", "{% if off in m.content %}{% set s.quiet = true %}{% endif %}"),
        [[user("a /off")], "a", MORE, "b", MORE],
        "==",
    ),
    "a switch that is all of a message": Case(
        chatml(each="{% if m.content == 'quiet' %}{% set s.quiet = true %}{% endif %}"),
        [[user("quiet")], "a", MORE],
        "=",
    ),
    "a switch that begins a message": Case(
        chatml(each="{% if m.content.startswith('#!') %}{% set s.quiet = true %}{% endif %}"),
        [[user("#! hm")], "a", MORE, "b", MORE],
        "==",
    ),
    "a switch in the first message only, where it is in a later one": Case(
        chatml("{% if '/no' in messages[0].content %}" + QUIET + "{% endif %}"),
        [ASK, "a", [user("a /no")], "b", MORE],
        "==",
    ),
    "a switch in the first message only": Case(
        chatml("{% if '/no' in messages[0].content %}" + QUIET + "{% endif %}"),
        [[user("a /no")], "a", MORE, "b", MORE],
        "==",
    ),
    "a switch in a tool's result": Case(
        chatml("{{ tools | tojson if tools else '' }}", "{% if 'HURRY' in m.content %}" + QUIET + "{% endif %}"),
        [ASK, CALL, [(RESULT, "HURRY up")], "a", MORE],
        "==",
        tools=True,
    ),
    "a word that is written in the system message only": Case(
        chatml("{% if messages[0].content.endswith('!') %}" + QUIET + "{% endif %}"),
        [[system("Sort!"), user("Where?")], "a", MORE],
        "=",
    ),
    "a reminder in long conversations": Case(
        chatml(after="{% if messages | length > 6 %}{{ 'Be brief.\n' }}{% endif %}"),
        [ASK, "a", MORE, "b", MORE, "c", MORE, "d", MORE],
        "bbbb",
    ),
    "a reminder in very long conversations": Case(
        chatml(after="{% if messages | length > 40 %}{{ 'Be brief.\n' }}{% endif %}"),
        [ASK, *["a", MORE] * 22],
        "=" * 20 + "bb",
    ),
    "a reminder at every third question": Case(
        chatml(each="{% if m.role == 'user' %}{% set s.n = s.n + 1 %}{{ '!' if s.n % 3 == 0 else '' }}{% endif %}"),
        [ASK, "a", MORE, "b", MORE, "c", MORE, "d", MORE, "e", MORE],
        "bbbbb",
    ),
    "tools at the last user message": Case(
        chatml(*TOOLS_AT_LAST_USER), [ASK, CALL, [(RESULT, "7")], "a", MORE, CALL, [(RESULT, "8")]], "=b=", tools=True
    ),
    "tools at the last user message, and a hand-off": Case(
        chatml(*TOOLS_AT_LAST_USER), [ASK, CALL, [(RESULT, "7"), HAND_OFF, *MORE]], "b", tools=True
    ),
    "Mistral Small 3.2, a hand-off": Case(
        "mistral-small-3.2", [ASK, CALL, [(RESULT, "7"), HAND_OFF, *MORE]], "b", tools=True
    ),
    "Mistral Nemo, a hand-off": Case("mistral-nemo", [ASK, CALL, [(RESULT, "7"), HAND_OFF, *MORE]], "b", tools=True),
    "Qwen2.5, a hand-off": Case("qwen2.5", [ASK, CALL, [(RESULT, "7"), HAND_OFF, *MORE]], "=", tools=True),
    "Llama 3.1, a hand-off": Case("llama-3.1", [ASK, CALL, [(RESULT, "7"), HAND_OFF, *MORE]], "=", tools=True),
    "GLM 4.5, a hand-off": Case("glm-4.5", [ASK, CALL, [(RESULT, "7"), HAND_OFF, *MORE]], "=", tools=True),
    "gpt-oss, a late result": Case("gpt-oss", [ASK, CALL, [(RESULT, "on")], "a", [(LATE, "7")]], "=x", tools=True),
    "Qwen3, a late result": Case(
        "qwen3", [ASK, CALL, [(RESULT, "on")], "a", [(LATE, "7")], "b", MORE], "===", tools=True
    ),
    "GLM 4.5, a late result": Case("glm-4.5", [ASK, CALL, [(RESULT, "on")], "a", [(LATE, "7")]], "==", tools=True),
    "results that name their tool, a late one": Case(
        chatml(
            "{{ tools | tojson if tools else '' }}",
            "{% if m.role == 'tool' %}{% for o in messages %}{% for c in o.tool_calls or [] %}"
            "{% if c.id == m.tool_call_id %}{{ c.function.name + ': ' }}{% endif %}{% endfor %}{% endfor %}{% endif %}",
        ),
        [ASK, CALL, [(RESULT, "on")], "a", [(LATE, "7")], "b", [(LATE, "8")], "c", MORE],
        "bbb=",
        tools=True,
    ),
    "speakers that must take turns": Case(
        chatml(
            each="{% if m.role != 'system' %}{% if (m.role == 'user') != (s.n % 2 == 0) %}"
            "{{ raise_exception('must take turns') }}{% endif %}{% set s.n = s.n + 1 %}{% endif %}"
        ),
        [ASK, "a", [user("1"), {"role": "assistant", "content": "2"}, user("3")], "b", [user("4"), user("5")]],
        "=x",
    ),
    "a template that moves later system messages to the front": Case(
        chatml(
            "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}", "{% if m.role != 'system' %}"
        ).replace("\n' }}{% endfor %}", "\n' }}{% endif %}{% endfor %}"),
        [[system("One."), user("Where?")], "a", [system("Two."), *MORE], "b", MORE],
        "b=",
    ),
}  # fmt: skip


@cache
def codec(template: str) -> ChatCodec:
    return ChatCodec(tokenizer(template) if template in FAMILIES else make_tokenizer(template))


class Player:
    """Plays a script, and checks each prompt against the template's own rendering."""

    def __init__(self, case: Case) -> None:
        self.codec, self.tools = codec(case.template), [TOOL] if case.tools else []
        self.end = FAMILIES[case.template]["stops"][0] if case.template in FAMILIES else "<|im_end|>"
        self.call_end = call_end(case.template) if case.template in FAMILIES else "<|im_end|>"
        self.conversation, self.messages = self.codec.conversation(), list[Mapping[str, Any]]()
        self.generations: list[Generation] = []
        self.label = ""

    def play(self, script: Sequence[Any]) -> str:
        turns = ""
        for step in script:
            if isinstance(step, str):
                self.reply(step)
                continue
            self.messages += [self.heard(m) if isinstance(m, tuple) else m for m in step]
            turns += self.ask()
            if turns.endswith("x"):
                break
        return turns[1:]

    def heard(self, result: tuple[str, str]) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.label, "content": result[1]}

    def ask(self) -> str:
        template = self.codec.template
        try:
            whole = template.render([normalise(m) for m in self.messages], self.tools)
        except UnsupportedRequest:
            with pytest.raises(UnsupportedRequest):
                self.conversation.encode(self.messages, self.tools)
            return "x"
        self.encoded = self.conversation.encode(self.messages, self.tools)
        if self.encoded.continues is None:
            assert template.decode(self.encoded.prompt_ids) == whole
            return "b"
        before = self.generations[self.encoded.continues]
        n = len(before.prompt_ids) + len(before.response_ids)
        assert self.encoded.prompt_ids[:n] == [*before.prompt_ids, *before.response_ids]
        assert whole.endswith(template.decode(self.encoded.prompt_ids[n:]))
        return "="

    def reply(self, text: str) -> None:
        template = self.codec.template
        calls = []
        if text == CALL:
            function = {"name": "find", "arguments": '{"q": "x"}'}
            text, calls = "", [{"id": "abcdefghi", "type": "function", "function": function}]
        said = template.write_reply(text, calls, prompt_ids=self.encoded.prompt_ids)
        ids = template.encode(said + (self.call_end if calls else self.end))
        self.generations.append(
            Generation(
                prompt_ids=self.encoded.prompt_ids,
                response_ids=ids,
                logprobs=[0.0] * len(ids),
                finish_reason=FinishReason.STOP,
                policy_version=0,
            )
        )
        message = self.conversation.accept(self.encoded, self.generations[-1], len(self.generations) - 1)
        self.messages.append(message)
        self.label = next((call["id"] for call in message.get("tool_calls", ())), self.label)


@table("name", CASES)
def test_what_follows_a_reply_is_the_templates_own(name: str) -> None:
    case = CASES[name]
    for _ in range(2):  # what was found out about the first conversation is used for the second
        assert Player(case).play(case.script) == case.turns


def test_conversations_of_one_structure_are_rendered_as_a_whole_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = ChatCodec(tokenizer("qwen2.5"))
    lengths: list[int] = []
    write = codec.template._write

    def counted(messages: Sequence[Any], tools: Any, **how: Any) -> str:
        lengths.append(len(messages))
        return write(messages, tools, **how)

    monkeypatch.setattr(codec.template, "_write", counted)
    for most in (20, 0):
        agent, messages = codec.conversation(), [user("Where?")]
        for turn in range(40):
            encoded = agent.encode(messages)
            ids = codec.template.encode(f"{turn}<|im_end|>")
            generation = Generation(
                prompt_ids=encoded.prompt_ids,
                response_ids=ids,
                logprobs=[0.0] * len(ids),
                finish_reason=FinishReason.STOP,
                policy_version=0,
            )
            messages = [*messages, agent.accept(encoded, generation, turn), user(f"And {turn}?")]
        assert len([n for n in lengths if n > 4]) <= most
        lengths.clear()
