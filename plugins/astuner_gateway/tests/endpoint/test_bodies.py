"""A body that is compressed, long or full of items costs the others nothing."""

from __future__ import annotations

import gzip
import json
import threading
from typing import Any

import pytest

from astuner_gateway.gate import parse
from tests.table import table

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASK = [{"role": "user", "content": "What?"}]
BASE: dict[str, dict[str, Any]] = {CHAT: {"messages": ASK}, MESSAGES: {"messages": ASK}}


def says(served_body: Any) -> str:
    text: str = served_body["error"]["message"]
    return text


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "rot13"])
@pytest.mark.parametrize("route", [CHAT, MESSAGES])
def test_a_compressed_body_is_refused_unread(play: Any, route: str, encoding: str) -> None:
    async def work(served: Any) -> None:
        body = gzip.compress(b" " * (64 << 20))
        status, said = await served.post(route, body, Content_Encoding=encoding)
        assert (status, said["error"]["type"]) == (415, "invalid_request_error")
        status, _ = await served.post(route, body, Content_Encoding=encoding, Authorization="Bearer nope")
        assert status == 401
        assert (await served.post(route, BASE[route], Content_Encoding="identity"))[0] == 200

    play(work)


def test_a_long_name_is_not_compared(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner_gateway.endpoint.fields.difflib", None)

    async def work(served: Any) -> None:
        status, body = await served.post(CHAT, {"messages": ASK, "x" * 65: 1})
        assert (status, body["error"]["code"]) == (400, "unknown_field")

    play(work)


@table(("route", "field"), [(CHAT, "messages"), (RESPONSES, "input"), (MESSAGES, "messages")])
def test_a_list_has_a_limit(play: Any, route: str, field: str) -> None:
    async def work(served: Any) -> None:
        status, body = await served.post(route, {field: [{}] * 10_001})
        assert status == 400
        assert says(body).startswith(f"{field} has 10001 items")
        assert body["error"].get("code", "too_many_items") == "too_many_items"

    play(work)


def test_a_long_body_is_read_beside_the_event_loop(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[str] = []

    def parsing(raw: bytes) -> Any:
        readers.append(threading.current_thread().name)
        return parse(raw)

    monkeypatch.setattr("astuner_gateway.endpoint.handler.parse", parsing)

    async def work(served: Any) -> None:
        for count in (1, 2 << 20):
            raw = json.dumps(BASE[CHAT]).encode() + b" " * count
            assert (await served.post(CHAT, raw))[0] == 200

    play(work)
    assert readers[0] == threading.main_thread().name != readers[1]
