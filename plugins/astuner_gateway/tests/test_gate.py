"""What every application of ours has from the gate, tried once, on one that does nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from astuner.contracts.errors import ModelFailed
from astuner_gateway.gate import Gate, check_key, json_answer, not_found, parse, read_body, running
from astuner_gateway.listening import bind, has_key
from tests.table import table

KEY = "a-key-of-sixteen-or-more"
RIGHT = {"Authorization": f"Bearer {KEY}"}
Ask = Callable[..., Awaitable[tuple[int, Any, Any]]]


class Echo(Gate):
    """Gives back what it gets."""

    what = "echo"
    most_bytes = 1 << 19

    async def reply(self, request: Any, request_id: str) -> Any:
        check_key(request, KEY, "the echo's key")
        if request.path == "/late":
            raise ModelFailed("the model failed")
        if request.path == "/broken":
            raise ZeroDivisionError(KEY)
        if (request.method, request.path) != ("POST", "/echo"):
            raise not_found(request, ("POST /echo",))
        return json_answer(parse(await read_body(request)), request_id)


def played(scenario: Callable[[Ask], Awaitable[None]], host: str = "127.0.0.1") -> None:
    async def main() -> None:
        with bind("127.0.0.1", 0, listen=True) as listening:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            async with (
                running(Echo(host), listening, grace=1.0),
                aiohttp.ClientSession(auto_decompress=False) as session,
            ):

                async def ask(method: str, path: str, data: Any = None, **headers: str) -> tuple[int, Any, Any]:
                    sent = {**RIGHT, **{name.replace("_", "-"): value for name, value in headers.items()}}
                    async with session.request(method, url + path, data=data, headers=sent) as answer:
                        return answer.status, await answer.json(), answer.headers

                await scenario(ask)

    asyncio.run(main())


def test_an_answer_has_an_id_and_so_has_a_refusal() -> None:
    async def scenario(ask: Ask) -> None:
        status, body, headers = await ask("POST", "/echo", b'{"a": 1}')
        assert (status, body) == (200, {"a": 1})
        other = await ask("GET", "/nothing")
        assert (other[0], other[1]["error"]["code"]) == (404, "not_found")
        assert "POST /echo" in other[1]["error"]["message"]
        ids = {each["x-request-id"] for each in (headers, other[2])} | {headers["request-id"]}
        assert len(ids) == 2
        assert other[2]["x-should-retry"] == "false"

    played(scenario)


def test_health_needs_no_key_and_everything_else_does() -> None:
    async def scenario(ask: Ask) -> None:
        assert (await ask("GET", "/health", Authorization="-"))[:2] == (200, {"status": "ok"})
        for wrong in ("", "Bearer", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \u00e9"):
            for method, path in (("POST", "/echo"), ("GET", "/nothing"), ("GET", "/broken")):
                status, body, _ = await ask(method, path, Authorization=wrong)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key")
                assert KEY not in json.dumps(body)
        assert (await ask("POST", "/echo", b"{}", Authorization="-", x_api_key=KEY))[0] == 200

    played(scenario)


def test_on_loopback_a_web_page_cannot_come_under_a_name_of_its_own() -> None:
    async def scenario(ask: Ask) -> None:
        for name in ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io", ""):
            for path in ("/echo", "/health"):
                status, body, _ = await ask("GET", path, Host=name)
                assert (status, body["error"]["code"]) == (403, "wrong_host")
        for name in ("localhost", "LOCALHOST:99", "127.0.0.1:1", "[::1]:5"):
            assert (await ask("GET", "/health", Host=name))[0] == 200

    played(scenario)


def test_elsewhere_it_may_have_any_name() -> None:
    async def scenario(ask: Ask) -> None:
        assert (await ask("POST", "/echo", b"{}", Host="trainer-1:80"))[0] == 200

    played(scenario, host="0.0.0.0")


@table(
    ("data", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_json"),
        (b"[]", {}, 400, "invalid_json"),
        (b"{}", {"Content_Encoding": "gzip"}, 415, "unsupported_encoding"),
        (b" " * ((1 << 19) + 1), {}, 413, "request_too_large"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(data: bytes, headers: Any, status: int, code: str) -> None:
    async def scenario(ask: Ask) -> None:
        found, body, _ = await ask("POST", "/echo", data, **headers)
        assert (found, body["error"]["code"]) == (status, code)

    played(scenario)


def test_a_failure_of_ours_is_told_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(ask: Ask) -> None:
        status, body, _ = await ask("GET", "/late")
        assert (status, body["error"]["message"]) == (502, "the model failed")
        status, body, _ = await ask("GET", "/broken")
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert KEY not in json.dumps(body)
        assert "ZeroDivisionError" in caplog.text

    played(scenario)


def test_a_key_is_compared_whole() -> None:
    assert has_key({"x-api-key": f" {KEY} "}, KEY)
    assert not has_key({"Authorization": "Bearer \udce9"}, KEY)
    assert not has_key({}, KEY)


@table("said", [b"", b"GET /health HTTP/1.1\r\nHost:", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"])
def test_a_connection_without_a_whole_request_is_closed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner_gateway.gate.IDLE", 0.2)

    async def main() -> bytes:
        with bind("127.0.0.1", 0, listen=True) as listening:
            async with running(Echo("127.0.0.1"), listening, grace=1.0):
                reader, writer = await asyncio.open_connection(*listening.getsockname())
                writer.write(said)
                heard = await asyncio.wait_for(reader.read(), 60)
                writer.close()
                return heard

    assert asyncio.run(main()).startswith(b"HTTP/1.1 200") == said.endswith(b"\r\n\r\n")
