"""A client that stops sending gets its answer; one that is gone does not keep the model at work."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from astuner.contracts.types import SamplingParams
from astuner_gateway import half_closed
from astuner_testing.fakes import FakeEngine
from tests.table import table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not half_closed.CAN_TELL, reason="only Linux shows which clients still read"),
]

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASK = [{"role": "user", "content": "What is 2 + 2?"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK},
    RESPONSES: {"input": "What is 2 + 2?"},
    MESSAGES: {"messages": ASK, "max_tokens": 9},
}


class Slow(FakeEngine):
    """Takes its time, and counts what was begun and cancelled."""

    def __init__(self, tokenizer: Any, seconds: float) -> None:
        super().__init__(lambda prompt: "four", tokenizer)
        self.seconds, self.begun, self.cancelled = seconds, 0, 0

    async def generate(self, prompt_ids: Any, sampling: SamplingParams, *, session: str = "") -> Any:
        self.begun += 1
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().generate(prompt_ids, sampling, session=session)


def raw(served: Any, route: str, body: Any, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [
        f"POST {route} HTTP/1.1",
        f"Host: {urlsplit(served.access.base_url).netloc}",
        f"Authorization: Bearer {served.access.api_key}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def connect(served: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = urlsplit(served.access.base_url)
    return await asyncio.open_connection(url.hostname, url.port)


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen in time")


@table(
    "route, stream, seconds, headers",
    [
        (CHAT, False, 0.0, ()),
        (CHAT, False, 0.7, ()),
        (CHAT, True, 0.7, ()),
        (CHAT, False, 0.3, ("Connection: close",)),
        (CHAT, True, 2.3, ()),
        (RESPONSES, False, 0.3, ()),
        (RESPONSES, True, 0.3, ()),
        (MESSAGES, False, 0.3, ()),
        (MESSAGES, True, 0.3, ()),
        (CHAT, False, 0.3, ("Idempotency-Key: x",)),
    ],
)
def test_a_client_that_stops_sending_gets_its_answer(
    play: Any, tokenizer: Any, route: str, stream: bool, seconds: float, headers: tuple[str, ...]
) -> None:
    async def work(served: Any) -> None:
        reader, writer = await connect(served)
        writer.write(raw(served, route, {**BODIES[route], "stream": stream}, *headers))
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"four" in answer
        writer.close()
        (turn,) = served.recorder.turns
        assert turn.trained, "it got its answer"
        await asyncio.sleep(0.5)
        assert served.recorder.turns[0].trained

    play(work, engine=Slow(tokenizer, seconds))


def test_an_error_reaches_a_client_that_stops_sending(play: Any) -> None:
    async def work(served: Any) -> None:
        for body, status in (({"messages": []}, b"400"), ({"messages": ASK, "nonsense": 1}, b"400")):
            reader, writer = await connect(served)
            writer.write(raw(served, CHAT, body))
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 10)
            assert answer.startswith(b"HTTP/1.1 " + status)
            writer.close()

    play(work)


def test_requests_in_a_row_are_all_answered(play: Any, tokenizer: Any) -> None:
    async def work(served: Any) -> None:
        reader, writer = await connect(served)
        writer.write(raw(served, CHAT, BODIES[CHAT]) + raw(served, CHAT, BODIES[CHAT]))
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        writer.close()

    play(work, engine=Slow(tokenizer, 0.3))


def test_half_a_request_is_not_waited_for(play: Any) -> None:
    async def work(served: Any) -> None:
        reader, writer = await connect(served)
        writer.write(raw(served, CHAT, BODIES[CHAT])[:-5])
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 10)
        assert b" 200 " not in answer
        writer.close()
        assert not served.recorder.turns

    play(work)


async def _close(served: Any, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def _abort(served: Any, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def _reset(served: Any, writer: asyncio.StreamWriter) -> None:
    import struct

    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _stop_and_close(served: Any, writer: asyncio.StreamWriter) -> None:
    writer.write_eof()
    await asyncio.sleep(0.5)
    assert served.engine.cancelled == 0, "it still reads"
    writer.close()


async def _stop_and_reset(served: Any, writer: asyncio.StreamWriter) -> None:
    writer.write_eof()
    await asyncio.sleep(0.5)
    await _reset(served, writer)


@table("go", [_close, _abort, _reset, _stop_and_close, _stop_and_reset])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_ends_its_generation(
    play: Any, tokenizer: Any, go: Callable[[Any, asyncio.StreamWriter], Awaitable[None]], stream: bool
) -> None:
    async def work(served: Any) -> None:
        _, writer = await connect(served)
        writer.write(raw(served, CHAT, {**BODIES[CHAT], "stream": stream}))
        await until(lambda: served.engine.begun == 1)
        await go(served, writer)
        await until(lambda: served.engine.cancelled == 1)
        assert not served.recorder.turns

    play(work, engine=Slow(tokenizer, 60.0))


PROGRAM = """
import os, socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.sendall(sys.stdin.buffer.read())
connection.shutdown(socket.SHUT_WR)
print("sent", flush=True)
time.sleep(60)
"""


def test_a_program_that_stopped_sending_and_is_killed_ends_its_generation(play: Any, tokenizer: Any) -> None:
    async def work(served: Any) -> None:
        url = urlsplit(served.access.base_url)
        arguments = [sys.executable, "-c", PROGRAM, str(url.hostname), str(url.port)]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
            assert program.stdin is not None
            program.stdin.write(raw(served, CHAT, BODIES[CHAT]))
            program.stdin.close()
            await until(lambda: served.engine.begun == 1, 30)
            await asyncio.sleep(0.6)
            assert served.engine.cancelled == 0
            program.kill()
            await until(lambda: served.engine.cancelled == 1)

    play(work, engine=Slow(tokenizer, 60.0))


def test_an_answer_that_nobody_reads_is_not_trained(play: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is gone after the last look, and before the answer."""
    from astuner_gateway import gate

    monkeypatch.setattr(gate, "LOOK_SECONDS", 60.0)

    async def work(served: Any) -> None:
        _, writer = await connect(served)
        writer.write(raw(served, CHAT, BODIES[CHAT]))
        writer.write_eof()
        await until(lambda: served.engine.begun == 1)
        await asyncio.sleep(0.1)
        writer.close()
        await until(lambda: bool(served.recorder.turns))
        await asyncio.sleep(1.0)
        served.endpoint.revoke(served.tuner)  # the episode is over, and no retry came
        assert not served.recorder.turns[0].trained

    play(work, engine=Slow(tokenizer, 0.7))


def test_a_client_on_ipv6_is_seen(play: Any, tokenizer: Any) -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")

    async def work(served: Any) -> None:
        reader, writer = await connect(served)
        writer.write(raw(served, CHAT, BODIES[CHAT]))
        writer.write_eof()
        assert b"four" in await asyncio.wait_for(reader.read(), 20)
        writer.close()

    try:
        play(work, engine=Slow(tokenizer, 0.3), host="::1")
    except Exception as e:
        if "::1" in str(e) and "bind" in str(e).lower():
            pytest.skip("this machine has no loopback on IPv6")
        raise
