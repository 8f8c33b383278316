"""Whatever is sent: an answer of the API, never a server error, never without a key that was issued."""

from __future__ import annotations

import asyncio
import copy
import http.client
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astuner import ModelTuner
from astuner.chat.codec import ChatCodec
from astuner.contracts.types import SamplingParams, Split
from astuner.rollout.models import one_model
from astuner.rollout.turns import EpisodeRecorder
from astuner.testing import FakeEngine, fake_config, make_tokenizer, workflow_task
from astuner_gateway.endpoint import Endpoint
from astuner_gateway.endpoint.anthropic_messages import FIELDS as ANTHROPIC
from astuner_gateway.endpoint.openai_chat import FIELDS as OPENAI_CHAT
from astuner_gateway.endpoint.openai_responses import FIELDS as OPENAI_RESPONSES
from tests.table import table

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FIELDS = {
    CHAT: sorted(OPENAI_CHAT.fields),
    RESPONSES: sorted(OPENAI_RESPONSES.fields),
    MESSAGES: sorted(ANTHROPIC.fields),
}
FUZZ = settings(suppress_health_check=[HealthCheck.too_slow])

TOLD = "msg_episode:0"
"""The item of the first answer, which later requests refer to."""
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
WHOLE: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "m",
        "messages": [
            {"role": "developer", "content": "Be brief.", "name": "a"},
            {"role": "user", "content": [{"type": "text", "text": "What?"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "4"},
            {"role": "assistant", "content": None, "refusal": "no"},
            {"role": "user", "content": "Again."},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA, "strict": True}},
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 20,
        "n": 2,
        "stop": ["x"],
        "seed": 1,
        "logprobs": True,
    },
    RESPONSES: {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "What?"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "a", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "4"},
            {"type": "item_reference", "id": TOLD},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "r", "schema": SCHEMA}},
        "include": ["message.output_text.logprobs"],
        "reasoning": {"effort": "none"},
        "stream": True,
        "max_output_tokens": 20,
        "temperature": 0.5,
    },
    MESSAGES: {
        "model": "m",
        "max_tokens": 20,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "What?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "4"}],
                        "is_error": True,
                    }
                ],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f"},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "thinking": {"type": "disabled"},
        "stop_sequences": ["x"],
        "stream": True,
    },
}


class Door:
    """One episode that is served from a thread, and requests to it.

    :param says: what the model says, of the prompt's text.
    """

    def __init__(self, folder: Any, says: Callable[[str], str] = lambda prompt: '{"x": 1}') -> None:
        self._folder, self._says = folder, says
        self._ready, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(60)
        status, answer = self.post(RESPONSES, {"input": "What?"})
        assert (status, json.loads(answer)["output"][0]["id"]) == (200, TOLD)

    async def _serve(self) -> None:
        self._loop, self._tokenizer = asyncio.get_running_loop(), make_tokenizer()
        self._codec, self._endpoint = ChatCodec(self._tokenizer), Endpoint()
        self._endpoint.open(self._loop)
        self._begin(Split.VALIDATION)
        self.port = int(self.access.base_url.split(":")[2][:-3])
        self._ready.set()
        await self._end.wait()
        self._over()
        await self._endpoint.close()

    def _begin(self, split: Split) -> None:
        engine = FakeEngine(self._says, self._tokenizer)
        self._tuner: ModelTuner | None = ModelTuner(
            models=one_model(engine, self._codec),
            recorder=EpisodeRecorder(),
            sampling=SamplingParams(max_tokens=50),
            config=fake_config(self._folder),
            workflow_task=workflow_task(split=split),
        )
        self.access = self._endpoint.issue(self._tuner, "default")

    def _over(self) -> weakref.ref[ModelTuner]:
        assert self._tuner is not None
        self._tuner.close()
        self._endpoint.revoke(self._tuner)
        gone, self._tuner = weakref.ref(self._tuner), None
        return gone

    def renew(self, split: Split) -> weakref.ref[ModelTuner]:
        """End the episode, which is returned for as long as anything holds it, and begin another."""

        async def renew() -> weakref.ref[ModelTuner]:
            gone = self._over()
            self._begin(split)
            return gone

        return asyncio.run_coroutine_threadsafe(renew(), self._loop).result(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def ask(self, method: str, path: str, body: bytes = b"", headers: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)  # a hang is an error
        try:
            sent = {"Authorization": f"Bearer {self.access.api_key}"} if headers is None else headers
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def post(self, route: str, body: Any) -> tuple[int, bytes]:
        return self.ask("POST", route, body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    door = Door(tmp_path_factory.mktemp("door"))
    yield door
    door.close()


def check(route: str, status: int, answer: bytes) -> None:
    assert status in (200, 400), answer
    if status == 400:
        assert json.loads(answer)["error"]["message"]
    elif answer.startswith(b"{"):
        assert {CHAT: "choices", RESPONSES: "output", MESSAGES: "content"}[route] in json.loads(answer)
    else:
        assert answer.startswith((b"data: ", b"event: "))
        assert b'"error"' not in answer.replace(b'"error":null', b"")


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["item_reference", TOLD, TOLD.replace("msg", "resp")])
    | st.sampled_from(["text", "auto", "user", "assistant", "tool", "function", "system", "message", "tool_use", ""])
)
names = st.text(max_size=8) | st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "name",
        "id",
        "function",
        "arguments",
        "parameters",
        "schema",
        "$ref",
        "call_id",
    ]
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4))
routes = st.sampled_from([CHAT, RESPONSES, MESSAGES])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside."""
    found = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        found += places(item, (*path, key))
    return found


@table("route", [CHAT, RESPONSES, MESSAGES])
def test_the_bodies_that_are_mutated_are_good_ones(door: Door, route: str) -> None:
    for stream in (False, True):
        status, answer = door.post(route, {**WHOLE[route], "stream": stream})
        assert status == 200, answer
        check(route, status, answer)


@FUZZ
@given(data=st.data(), route=routes)
def test_a_good_body_with_anything_anywhere(door: Door, route: str, data: st.DataObject) -> None:
    body = copy.deepcopy(WHOLE[route])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(places(body)))
        inside: Any = body
        for key in place[:-1]:
            inside = inside[key]
        change = data.draw(st.sampled_from(["replace", "remove", "add", "double"]))
        if change == "remove":
            del inside[place[-1]]
        elif change == "double" and isinstance(inside, list):
            inside.append(copy.deepcopy(inside[place[-1]]))
        elif change == "add" and isinstance(inside, dict):
            inside[data.draw(names)] = data.draw(values)
        else:
            inside[place[-1]] = data.draw(values)
        if not places(body):
            break
    check(route, *door.post(route, body))


@FUZZ
@given(data=st.data(), route=routes)
def test_any_values_in_known_fields(door: Door, route: str, data: st.DataObject) -> None:
    good = data.draw(st.sets(st.sampled_from(sorted(WHOLE[route])), max_size=6))
    body = {name: WHOLE[route][name] for name in good}
    body |= data.draw(st.dictionaries(st.sampled_from(FIELDS[route]) | st.text(max_size=10), values, max_size=4))
    check(route, *door.post(route, body))


@FUZZ
@given(route=routes, raw=st.binary(max_size=200), cut=st.integers(0, 2000), flip=st.integers(0, 2000))
def test_any_bytes(door: Door, route: str, raw: bytes, cut: int, flip: int) -> None:
    good = json.dumps(WHOLE[route]).encode()
    for body in (raw, good[: cut % len(good)], good[: flip % len(good)] + raw[:3] + good[flip % len(good) + 3 :]):
        check(route, *door.post(route, body))


@FUZZ
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"]),
    path=st.sampled_from([CHAT, RESPONSES, MESSAGES, "/v1/models", "/v1/models/", "/", "/v1/messages/count_tokens"])
    | st.text("abc/.%?2e", max_size=20).map(lambda tail: "/v1/" + tail),
    extra=st.sampled_from([{}, {"Content-Encoding": "gzip"}, {"Content-Encoding": "br"}, {"Expect": "x"}]),
)
def test_any_route_and_method(door: Door, method: str, path: str, extra: dict[str, str]) -> None:
    headers = {"Authorization": f"Bearer {door.access.api_key}", **extra}
    status, _ = door.ask(method, path, b"{}", headers)
    assert status < 500


@FUZZ
@given(data=st.data(), route=st.sampled_from([CHAT, RESPONSES, MESSAGES, "/v1/models"]))
def test_no_key_that_was_not_issued_opens(door: Door, route: str, data: st.DataObject) -> None:
    key = door.access.api_key
    ascii_text = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60)
    at = data.draw(st.integers(0, len(key) - 1))
    near = st.sampled_from(
        [key[:at], key[at:], key[:at] + "A" + key[at + 1 :], key + "=", key.swapcase(), "sk-astuner-", key + "," + key]
    )
    wrong = data.draw((near | ascii_text).filter(lambda wrong: wrong != key))
    scheme = data.draw(st.sampled_from(["Bearer ", "bearer ", "Basic ", "", "Token "]))
    headers = data.draw(st.sampled_from([{"Authorization": scheme + wrong}, {"x-api-key": wrong}, {}, {"Cookie": key}]))
    body = json.dumps(WHOLE.get(route, {})).encode()
    status, answer = door.ask("GET" if route == "/v1/models" else "POST", route, body, headers)
    assert status == 401
    assert key.encode() not in answer
