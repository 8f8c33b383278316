"""Keys, addresses, event loops: who gets in, and for how long."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import socket
import subprocess
import sys
import threading
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from astuner.config.schema import EndpointSection as Section
from astuner.contracts.errors import AstunerError, ConfigError, MissingDependency
from astuner.contracts.types import SamplingParams
from astuner.rollout.runner import EpisodeRunner
from astuner.testing import fake_config, workflow_task
from astuner_gateway.endpoint import Access, Endpoint
from tests.table import table

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "What?"}]}
TOKEN = "0123456789abcdef"


def curl(access: Access, body: Any, key: str | None = None) -> Any:
    """A plain program's request, from a thread."""
    request = urllib.request.Request(access.base_url + "/chat/completions", json.dumps(body).encode())
    request.add_header("Authorization", f"Bearer {key or access.api_key}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as response:
        return json.load(response)


def test_a_key_is_one_agents_and_the_same_each_time(play: Any) -> None:
    async def work(served: Any) -> None:
        again = served.endpoint.issue(served.tuner, "default")
        other = served.endpoint.issue(served.tuner, "other")
        assert again == served.access
        assert other.api_key != served.access.api_key
        assert other.base_url == served.access.base_url
        assert len(other.api_key) > 50
        for header in ({"x_api_key": other.api_key}, {"Authorization": f"bearer {other.api_key}"}):
            assert (await served.post(CHAT, BODY, **{"Authorization": "-", **header}))[0] == 200
        assert [t.agent for t in served.recorder.turns] == ["other"] * 2

    play(work)


def test_only_issued_keys_open_and_a_refusal_does_not_say_why(play: Any) -> None:
    async def work(served: Any) -> None:
        key = served.access.api_key
        wrong = ["", "Bearer", "Bearer ", "Basic " + key, "Bearer " + key[:-1], "Bearer " + key + "x", "Bearer é", key]
        bodies = []
        for header in wrong:
            for route in (CHAT, "/v1/responses", "/v1/messages"):
                status, body = await served.post(route, BODY, Authorization=header)
                assert status == 401
                assert key not in json.dumps(body)
                bodies.append(body["error"]["message"])
        url = served.access.anthropic_base_url
        for path in ("/v1/models", "/v1/nothing"):
            async with served.session.get(url + path) as response:
                assert response.status == 401
        async with served.session.get(url + "/health") as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})
        served.endpoint.revoke(served.tuner)
        served.endpoint.revoke(served.tuner)
        status, body = await served.post(CHAT, BODY)
        assert status == 401
        assert {body["error"]["message"], *bodies} == {bodies[0]}
        assert served.engine.calls == []

    play(work)


def test_a_page_elsewhere_cannot_reach_a_loopback_endpoint_under_its_own_name(play: Any) -> None:
    async def work(served: Any) -> None:
        for name in ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.nip.io", ""):
            status, body = await served.post(CHAT, BODY, Host=name)
            assert (status, body["error"]["code"]) == (403, "wrong_host")
        for name in ("localhost", "LOCALHOST:99", "127.0.0.1:1", "[::1]:5", "127.0.0.2:8"):
            assert (await served.post(CHAT, BODY, Host=name))[0] == 200

    play(work)


def test_keys_are_not_printed_and_not_logged(play: Any, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)

    async def work(served: Any) -> None:
        key = served.access.api_key
        assert key not in repr(served.access)
        assert key not in f"{served.access}"
        assert tuple(served.access) == (served.access.base_url, key)
        copy = pickle.loads(pickle.dumps(served.access))
        assert (copy, copy.model) == (served.access, "astuner")
        await served.post(CHAT, BODY)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.access.base_url.split(":")[2].split("/")[0])
        writer.write(b"POST / HTTP/1.1\r\nAuthorization\x00: Bearer " + key.encode() + b"\r\n\r\n")
        assert b"400" in await reader.readline()
        writer.close()
        await writer.wait_closed()
        assert "Error handling request" in caplog.text  # aiohttp's; without our filter it quotes the header
        assert key not in caplog.text

    play(work)


@table("head", ["Content-Length: 3\r\nContent-Length: 4", "Transfer-Encoding: xchunked", "a\0b: c"])
def test_what_is_no_http_is_answered_in_json(play: Any, head: str) -> None:
    async def work(served: Any) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.access.base_url.split(":")[2][:-3])
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode())
        answer = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
        assert b" 400 " in answer[0].splitlines()[0]
        assert json.loads(answer[2])["error"]["code"] == "malformed_request"
        writer.close()
        await writer.wait_closed()

    play(work)


def test_a_body_that_never_ends_is_given_up(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner_gateway.gate.BODY_TIMEOUT", 0.05)

    async def work(served: Any) -> None:
        port = served.access.base_url.split(":")[2][:-3]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {served.access.api_key}\r\n"
        writer.write(head.encode() + b"Content-Length: 9\r\n\r\n{")
        assert b"400" in await reader.readline()
        writer.close()
        await writer.wait_closed()

    play(work)


def test_the_environment_points_every_client_here_and_past_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "example.com")
    monkeypatch.setenv("no_proxy", "example.com, ,a.b")
    variables = Access("http://127.0.0.1:5/v1", "key").environment()
    assert variables["OPENAI_BASE_URL"] == variables["OPENAI_API_BASE"] == "http://127.0.0.1:5/v1"
    assert variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:5"
    assert variables["OPENAI_API_KEY"] == variables["ANTHROPIC_API_KEY"] == "key"
    assert variables["OPENAI_AGENTS_DISABLE_TRACING"] == "1"
    assert (variables["NO_PROXY"], variables["no_proxy"]) == ("example.com,a.b,127.0.0.1",) * 2


def test_the_port_is_known_at_once_and_who_comes_early_waits(play: Any) -> None:
    async def work(served: Any) -> None:
        early = Endpoint()
        early.open(asyncio.get_running_loop())
        access = early.issue(served.tuner, "default")
        with socket.create_connection(("127.0.0.1", int(access.base_url.split(":")[2][:-3])), timeout=5):
            pass  # no step of the loop has been made since open()
        assert (await asyncio.to_thread(curl, access, BODY))["choices"][0]["message"]["content"] == "four"
        early.revoke(served.tuner)
        await early.close()

    play(work)


def test_threads_and_other_loops_reach_the_models_own_loop(play: Any) -> None:
    async def work(served: Any) -> None:
        here = asyncio.get_running_loop()

        async def elsewhere() -> Any:
            served.endpoint.open(asyncio.get_running_loop())  # it is open already, and stays where it is
            assert served.endpoint.issue(served.tuner, "default") == served.access
            return await asyncio.to_thread(curl, served.access, BODY)

        def thread() -> Any:
            served.endpoint.open(here)
            return asyncio.run(elsewhere())

        found = await asyncio.to_thread(thread)
        assert found["choices"][0]["message"]["content"] == "four"

    play(work)


def test_a_server_on_another_loop_than_the_models(play: Any, tokenizer: Any) -> None:
    """As when an endpoint outlives the loop that it began on."""

    async def work(served: Any) -> None:
        endpoint, ready, done = Endpoint(), threading.Event(), threading.Event()

        async def serve() -> None:
            endpoint.open(asyncio.get_running_loop())
            ready.set()
            await asyncio.to_thread(done.wait)
            await endpoint.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        await asyncio.to_thread(ready.wait)
        access = endpoint.issue(served.tuner, "default")
        assert (await asyncio.to_thread(curl, access, BODY))["choices"][0]["message"]["content"] == "four"
        await endpoint.close()  # from here; the server's own loop does it
        with pytest.raises(AstunerError, match="not open"):
            endpoint.issue(served.tuner, "default")
        done.set()
        await asyncio.to_thread(thread.join)

    play(work)


def test_it_opens_again_after_its_loop_ended() -> None:
    endpoint, tuner = Endpoint(), SimpleNamespace(model_name="m")
    ports = set()
    for _ in range(2):

        async def main() -> None:
            endpoint.open(asyncio.get_running_loop())
            await asyncio.sleep(0.02)
            port = int(endpoint.issue(tuner, "a").base_url.split(":")[2][:-3])  # type: ignore[arg-type]
            ports.add(port)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" in await reader.readline()
            writer.close()
            await writer.wait_closed()

        asyncio.run(main())  # ends the server with all other tasks
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", max(ports)), timeout=5).close()
    endpoint.revoke(tuner)  # type: ignore[arg-type]
    asyncio.run(endpoint.close())


def test_a_closed_loop_is_no_place_to_open() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(AstunerError, match="closed"):
        Endpoint().open(loop)


def test_it_closes_before_it_ever_ran() -> None:
    async def main() -> None:
        endpoint = Endpoint()
        await endpoint.close()
        endpoint.open(asyncio.get_running_loop())
        await endpoint.close()
        await asyncio.sleep(0)

    asyncio.run(main())


@table("host", ["0.0.0.0", "::", "192.0.2.7", "example.com"])
def test_another_bind_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="token_env"):
        Endpoint(host)
    Endpoint(host, token=TOKEN)


@table("token", ["short", "0123456789 abcdef", "0123456789äbcdef", "0123456789\nabcdef"])
def test_a_token_must_fit_into_a_key(token: str) -> None:
    with pytest.raises(ConfigError, match="at least 16"):
        Endpoint(token=token)


def test_with_a_token_every_key_ends_with_it(play: Any) -> None:
    async def work(served: Any) -> None:
        assert served.access.api_key.endswith("-" + TOKEN)
        assert (await served.post(CHAT, BODY))[0] == 200
        without = served.access.api_key.removesuffix("-" + TOKEN)
        assert (await served.post(CHAT, BODY, Authorization=f"Bearer {without}"))[0] == 401
        assert (await served.post(CHAT, BODY, Host="anything"))[0] == 200
        assert "0.0.0.0" not in served.access.base_url

    play(work, host="0.0.0.0", token=TOKEN)


def test_the_config_names_the_tokens_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    section = Section(host="0.0.0.0", token_env="MY_TOKEN")
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="MY_TOKEN is not set"):
        Endpoint.of(section)
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    assert isinstance(Endpoint.of(section), Endpoint)
    assert isinstance(Endpoint.of(Section()), Endpoint)


def test_an_address_that_cannot_be_bound_is_told() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"port {port}"):
                Endpoint(port=port).open(asyncio.get_running_loop())
        with pytest.raises(ConfigError, match="no-such-host"):
            Endpoint("no-such-host.invalid", token=TOKEN).open(asyncio.get_running_loop())

    asyncio.run(main())


def test_without_aiohttp_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.setitem(sys.modules, "aiohttp.web", None)
    loop = asyncio.new_event_loop()
    with pytest.raises(MissingDependency, match="pip install astuner-gateway"):
        Endpoint().open(loop)
    loop.close()


def test_without_jsonschema_only_structures_are_missing(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from astuner_gateway.endpoint import structure

    structure._compiled.cache_clear()
    monkeypatch.setitem(sys.modules, "jsonschema_rs", None)

    async def work(served: Any) -> None:
        assert (await served.post(CHAT, BODY))[0] == 200
        status, body = await served.post(CHAT, {**BODY, "response_format": {"type": "json_object"}})
        assert status == 500
        assert "astuner-gateway" in body["error"]["message"]

    play(work)


@pytest.mark.slow
def test_a_program_with_nothing_but_the_environment(play: Any) -> None:
    program = "import openai; print(openai.OpenAI().responses.create(model='any', input='What?').output_text)"

    async def work(served: Any) -> None:
        import os

        run = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", program],
            env={**os.environ, "HTTP_PROXY": "http://127.0.0.1:9", **served.access.environment()},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.stdout.strip() == "four", run.stderr

    play(work)


def test_it_may_be_opened_from_another_thread_whose_loop_is_quick() -> None:
    async def main() -> None:
        endpoint, loop = Endpoint(), asyncio.get_running_loop()

        def ask() -> bytes:
            endpoint.open(loop)
            tuner: Any = SimpleNamespace(model_name="m")
            url = endpoint.issue(tuner, "a").anthropic_base_url
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with direct.open(f"{url}/health", timeout=20) as answer:
                return bytes(answer.read())

        try:
            assert b"ok" in await asyncio.to_thread(ask)
        finally:
            await endpoint.close()

    for _ in range(10):
        asyncio.run(main())


def test_plain_workflows_at_once_share_one_endpoint(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "from astuner import Workflow, WorkflowOutput\n"
        "class Mine(Workflow):\n"
        "    def execute(self, workflow_task, model_tuner):\n"
        "        return WorkflowOutput(reward=1.0, response=model_tuner.base_url_and_key().base_url)\n"
    )
    runner = EpisodeRunner(fake_config(tmp_path, "  rollout:\n    workflow: mine.py->Mine\n"))
    models: Any = {}

    async def main() -> set[Any]:
        attempts = [runner.run(workflow_task(), models, SamplingParams(max_tokens=1)) for _ in range(16)]
        episodes = await asyncio.gather(*attempts)
        await runner.close()
        return {e.output.response if e.output else e.error for e in episodes}

    assert len(asyncio.run(main())) == 1
