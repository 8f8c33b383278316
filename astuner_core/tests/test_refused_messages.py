"""A request that is refused because of one message states which, by its path."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from astuner.chat.codec import ChatCodec
from astuner.contracts.errors import UnsupportedRequest
from astuner.contracts.messages import refused_message
from astuner_testing.fakes import CHATML, make_tokenizer
from tests.table import table

ALTERNATES = CHATML.replace(
    "{%- for message in messages",
    "{%- for message in messages %}{%- if not loop.first and message.role == loop.previtem.role %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}{%- endfor %}{%- for message in messages",
    1,
)
USER = {"role": "user", "content": "hi"}
LONG = [{"role": "user", "content": f"q{n}"} for n in range(7)]


def call(function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": function}]}


REFUSED: list[tuple[Any, str]] = [
    ({"role": "tool", "tool_call_id": "b", "content": {"temperature": 21}}, "messages[7].content is of type dict"),
    ({"role": "user", "content": 5}, "messages[7].content is of type int"),
    ({"role": "user", "content": b"bytes"}, "messages[7].content[0] is of type int"),
    (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
        "messages[7].content[1].type",
    ),
    ({"role": "tool", "content": [{"type": "input_audio"}]}, "messages[7].content[0].type is 'input_audio'"),
    ({"role": "user", "content": [{"type": "text", "text": ["a"]}]}, "messages[7].content[0].text is of type list"),
    ({"role": "user", "content": ["a", None]}, "messages[7].content[1] is of type NoneType"),
    ({"role": "function", "content": "4"}, "messages[7].role is 'function'"),
    ({"content": "4"}, "messages[7].role is None"),
    ("hello", "messages[7] is 'hello'"),
    (None, "messages[7] is None"),
    (("user", "hi"), "messages[7] is ('user', 'hi')"),
    (call({"name": None, "arguments": "{}"}), "messages[7].tool_calls[0]"),
    ({"role": "assistant", "content": "", "tool_calls": {"id": "a"}}, "messages[7].tool_calls is of type dict"),
    ({"role": "assistant", "content": "", "tool_calls": 3}, "messages[7].tool_calls is of type int"),
    ({"role": "assistant", "content": "", "tool_calls": ["a"]}, "messages[7].tool_calls[0] is 'a'"),
    (
        {"role": "assistant", "content": "", "reasoning_content": {"x": 1}},
        "messages[7].reasoning_content is of type dict",
    ),
    ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "messages[7].function_call"),
]


@pytest.fixture(scope="module")
def codec() -> ChatCodec:
    return ChatCodec(make_tokenizer())


@table("message, path", REFUSED)
def test_a_refusal_names_the_message(codec: ChatCodec, message: Any, path: str) -> None:
    for rest in ([USER], []):
        with pytest.raises(UnsupportedRequest) as e:
            codec.conversation().encode([*LONG, message, *rest])
        assert str(e.value).startswith(path)
        assert ";" in str(e.value), "it states what to send instead"


@table("message, path", REFUSED)
def test_a_message_in_a_conversation_that_goes_on_is_named(codec: ChatCodec, message: Any, path: str) -> None:
    conversation = codec.conversation()
    conversation.encode(LONG)
    with pytest.raises(UnsupportedRequest, match=r"messages\[7\]"):
        conversation.encode([*LONG, message])


def test_messages_that_can_be_rendered_have_no_refusal() -> None:
    assert (
        refused_message([USER, call({"name": "f", "arguments": {"x": 1}}), {"role": "tool", "content": None}]) is None
    )


@table(
    "roles, at",
    [
        (("user", "user"), 1),
        (("user", "assistant", "user", "user"), 3),
        (("system", "user", "assistant", "assistant", "user"), 3),
        (("system", "system", "user"), 1),
        (("user", "assistant", "user", "user", "assistant", "user"), 3),
    ],
)
def test_a_refusal_of_the_template_names_the_message(roles: tuple[str, ...], at: int) -> None:
    codec = ChatCodec(make_tokenizer(ALTERNATES))
    with pytest.raises(UnsupportedRequest) as e:
        codec.conversation().encode([{"role": role, "content": f"x{n}"} for n, role in enumerate(roles)])
    assert str(e.value).startswith(f"messages[{at}]: ")
    assert "roles must alternate" in str(e.value)


def test_a_message_that_the_template_leaves_out_is_named() -> None:
    leaves_out = CHATML.replace(
        "{%- for message in messages",
        "{%- if messages | length > 1 and messages[1].role == 'system' -%}"
        "{%- set messages = messages[:1] + messages[2:] -%}{%- endif -%}"
        "{%- for message in messages",
        1,
    )
    codec = ChatCodec(make_tokenizer(leaves_out))
    messages = [USER, {"role": "system", "content": "Be kind to all."}, {"role": "user", "content": "and?"}]
    with pytest.raises(UnsupportedRequest, match=r"omits .*messages\[1\]"):
        codec.conversation().encode(messages)


def test_an_external_model_gets_no_message_that_is_no_text() -> None:
    from types import SimpleNamespace

    from astuner.rollout.speaker import ChatRequest, ExternalSpeaker

    limits = SimpleNamespace(multi_turn=SimpleNamespace(max_steps=None))
    state: Any = SimpleNamespace(config=SimpleNamespace(astuner=SimpleNamespace(rollout=limits)))
    speaker = ExternalSpeaker(state, "critic", "critic", SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedRequest, match=r"^messages\[1\]\.content is of type dict"):
        asyncio.run(speaker.answer(ChatRequest(messages=[USER, {"role": "user", "content": {}}])))
