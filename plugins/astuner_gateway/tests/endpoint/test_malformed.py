"""Messages that nobody could have meant are refused by their field, in every dialect; what says enough is not.

Both servers, that of an episode and `astuner serve`, read with the same functions; that they answer so over HTTP is in
`test_refusals` and in `test_serve`.
"""

from __future__ import annotations

from typing import Any

import pytest

from astuner_gateway.endpoint.errors import ApiError
from astuner_gateway.endpoint.handler import DIALECTS
from tests.table import table

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "What?"}
CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
ANSWER = {"role": "tool", "tool_call_id": "c", "content": "4"}
NO_CONTENT: list[dict[str, Any]] = [{}, {"content": None}, {"content": []}, {"content": 5}, {"content": {"text": "x"}}]


def read(route: str, messages: Any) -> list[Any]:
    field = "input" if route == RESPONSES else "messages"
    body = {} if messages is ... else {field: messages}
    return list(DIALECTS[route].read(body, "model").messages)


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("messages", [..., None, [], {}, 5, True])
def test_there_are_messages(route: str, messages: Any) -> None:
    with pytest.raises(ApiError) as refused:
        read(route, messages)
    assert (refused.value.status, refused.value.param) == (400, "input" if route == RESPONSES else "messages")


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool", "assistant"])
@pytest.mark.parametrize("content", NO_CONTENT)
def test_a_message_says_something(role: str, content: dict[str, Any]) -> None:
    if role in ("tool", "assistant") and not content.get("content"):
        return  # below
    message = {"role": role, **content, **({"tool_call_id": "c"} if role == "tool" else {})}
    with pytest.raises(ApiError) as refused:
        read(CHAT, [USER, message, USER])
    assert (refused.value.status, refused.value.param) == (400, "messages[1].content")
    if role in ("user", "system"):
        for route in (RESPONSES, MESSAGES):
            with pytest.raises(ApiError) as refused:
                read(route, [USER, message, USER])
            where = "input" if route == RESPONSES else "messages"
            assert (refused.value.status, refused.value.param) == (400, f"{where}[1].content")


@table(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[1].role"),
        ({"role": None, "content": "x"}, "messages[1].role"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": "User", "content": "x"}, "messages[1].role"),
        ("What?", "messages[1]"),
        (None, "messages[1]"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": "x", "tool_calls": CALLS}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": "x", "tool_calls": ""}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": [{"type": "text"}], "tool_calls": CALLS}, "messages[1].content[0].text"),
    ],
)
def test_a_message_is_one(message: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(CHAT, [USER, message])
    assert (refused.value.status, refused.value.param) == (400, param)


def test_what_is_missing_is_said_to_be_missing() -> None:
    with pytest.raises(ApiError, match=r"^messages\[0\]\.content is missing"):
        read(CHAT, [{"role": "user"}])


@table(
    ("reply", "content"),
    [
        ({"tool_calls": CALLS}, None),
        ({"content": None, "tool_calls": CALLS}, None),
        ({"content": [], "tool_calls": CALLS}, None),
        ({"content": "", "tool_calls": CALLS}, ""),
        ({"content": [{"type": "text", "text": None}], "tool_calls": CALLS}, [{"type": "text", "text": ""}]),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": None, "reasoning_content": "so"}, None),
        ({"content": ""}, ""),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": []}, ""),
        ({}, ""),
    ],
)
def test_a_reply_may_say_it_without_text(reply: dict[str, Any], content: Any) -> None:
    (_, message, *_) = read(CHAT, [USER, {"role": "assistant", **reply}, ANSWER])
    assert message["content"] == content


@table("content", NO_CONTENT[:3])
def test_a_tool_may_return_nothing(content: dict[str, Any]) -> None:
    assert read(CHAT, [USER, {"role": "tool", "tool_call_id": "c", **content}])[1]["content"] == ""


def test_what_our_own_answer_looks_like_can_come_back_in_anthropics_dialect() -> None:
    """A model that said nothing has no blocks."""
    assert read(MESSAGES, [USER, {"role": "assistant", "content": []}, USER])[1]["content"] is None


@table("system", [0, False, {}, 5, [{"type": "image"}]])
def test_a_system_prompt_that_is_none_is_refused_and_not_dropped(system: Any) -> None:
    with pytest.raises(ApiError) as refused:
        DIALECTS[MESSAGES].read({"messages": [USER], "system": system}, "model")
    assert (refused.value.param or "").startswith("system")


@table("system", [None, "", []])
def test_no_system_prompt_is_none(system: Any) -> None:
    chat = DIALECTS[MESSAGES].read({"messages": [USER], "system": system}, "model")
    assert list(chat.messages) == [USER]
