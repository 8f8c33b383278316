"""Requests for the run's own endpoint never go to an HTTP proxy, whatever client sends them."""

from __future__ import annotations

import asyncio
import http.server
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from astuner.contracts.proxies import bypass_proxies, without_proxy
from astuner_http.client import JsonClient
from tests.table import table

NOWHERE = "http://127.0.0.1:9"
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def _urllib(url: str) -> None:
    urllib.request.urlopen(url, timeout=5).read()


def _requests(url: str) -> None:
    import requests

    requests.get(url, timeout=5).raise_for_status()


def _httpx(url: str) -> None:
    import httpx

    httpx.get(url, timeout=5).raise_for_status()


def _httpx_async(url: str) -> None:
    import httpx

    async def get() -> None:
        async with httpx.AsyncClient(timeout=5) as client:
            (await client.get(url)).raise_for_status()

    asyncio.run(get())


def _openai(url: str) -> None:
    from openai import OpenAI

    with OpenAI(base_url=url, api_key="k", max_retries=0, timeout=5) as client:
        client.models.with_raw_response.list()


def _aiohttp(url: str) -> None:
    import aiohttp

    async def get() -> None:
        async with aiohttp.ClientSession(trust_env=True) as session, session.get(url) as answer:
            assert answer.status == 200

    asyncio.run(get())


def _json_client(url: str) -> None:
    JsonClient(url, timeout=5).get("")


def _child(url: str) -> None:
    subprocess.run([sys.executable, "-c", f"import urllib.request as r; r.urlopen({url!r}, timeout=5)"], check=True)


CLIENTS: list[Callable[[str], None]] = [
    _urllib, _requests, _httpx, _httpx_async, _openai, _aiohttp, _json_client, _child,
]  # fmt: skip
SET: list[dict[str, str]] = [
    {"HTTP_PROXY": NOWHERE},
    {"http_proxy": NOWHERE},
    {"ALL_PROXY": NOWHERE},
    {"all_proxy": NOWHERE, "HTTPS_PROXY": NOWHERE},
    {"HTTP_PROXY": NOWHERE, "NO_PROXY": "example.com, .internal"},
    {"http_proxy": NOWHERE, "no_proxy": "10.0.0.0/8"},
    {"HTTP_PROXY": NOWHERE, "http_proxy": NOWHERE, "NO_PROXY": "a", "no_proxy": "b"},
    {"HTTP_PROXY": NOWHERE, "no_proxy": ""},
    {"HTTP_PROXY": NOWHERE, "NO_PROXY": "*"},
    {"HTTP_PROXY": NOWHERE, "NO_PROXY": "a,*"},
]


def _clear(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        for spelling in (name, name.upper()):
            monkeypatch.setenv(spelling, "")  # so that whatever the code sets is undone
            monkeypatch.delenv(spelling)


@table("variables", SET)
def test_no_client_takes_the_proxy(variables: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _clear(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    bypass_proxies()
    for client in CLIENTS:
        client(url)
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"]


@table(
    "variables, expected",
    [
        ({"NO_PROXY": "a", "no_proxy": "b"}, "b,a,localhost"),
        ({"NO_PROXY": "localhost"}, "localhost"),
        ({"NO_PROXY": " a ,, b "}, "a,b,localhost"),
        ({"no_proxy": "*"}, "*"),
        ({}, "localhost"),
    ],
)
def test_entries_of_the_user_stay(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _clear(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert without_proxy("localhost") == expected


def test_without_a_proxy_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    _clear(monkeypatch)
    bypass_proxies()
    assert not {"NO_PROXY", "no_proxy"} & set(os.environ)


def test_hosts_of_the_endpoint_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    _clear(monkeypatch)
    monkeypatch.setenv("https_proxy", NOWHERE)
    bypass_proxies("gpu-1.internal", "")
    assert os.environ["NO_PROXY"] == "localhost,127.0.0.1,gpu-1.internal"
