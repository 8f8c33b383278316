"""Who may ask: nobody from a web page, nobody from elsewhere without the token."""

from __future__ import annotations

import http.client
import json
import socket

import pytest

from astuner.contracts.errors import ConfigError
from astuner_env.server import MAX_BYTES, Guard
from tests.table import table

from ._service import Live

TOKEN = "a-token-of-sixteen-or-more"


def test_a_token_is_wanted_for_everything_but_health(counter, tmp_path):
    with Live([counter], token=TOKEN, parent=tmp_path) as live:
        assert live.create("a").data["state"]
        wrong = [{}, *({"Authorization": value} for value in ("", TOKEN, "Bearer", "Bearer x", f"Basic {TOKEN}", "é"))]
        live.headers = {}
        for headers in wrong:
            for method, path in (
                ("POST", "/create"),
                ("GET", "/metrics"),
                ("GET", "/v1/info"),
                ("DELETE", "/v1/instances/a"),
            ):
                answer = live.send(method, path, None, {k: v.encode() for k, v in headers.items()})
                assert (answer.status, answer.code) == (401, "unauthorized")
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                assert TOKEN.encode() not in answer.raw
        assert live.get("/healthz").raw == b"OK"
        assert live.send("GET", "/v1/info", None, {"Authorization": f"bearer  {TOKEN} "}).json["active"] == 1


@table("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_others_are_let_in_with_a_token_only(host, counter, tmp_path):
    with pytest.raises(ConfigError, match="ASTUNER_ENV_TOKEN"), Live([counter], host=host, parent=tmp_path):
        pass
    assert list(tmp_path.iterdir()) == [], "nothing was begun"


@table("token", ["short", "with a space in the middle", "é" * 20, "line\nline-line-line-line"])
def test_a_token_that_is_none_is_refused(token):
    with pytest.raises(ConfigError, match="16 printable"):
        Guard("127.0.0.1", token)


def test_every_address_with_a_token(counter, tmp_path):
    with Live([counter], host="0.0.0.0", token=TOKEN, parent=tmp_path) as live:
        assert live.send("GET", "/v1/info", None, {"Host": "trainer-1:8080"}).status == 200
        live.headers = {}
        assert live.send("GET", "/v1/info", None, {"Host": "trainer-1:8080"}).status == 401


@table(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:8080"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "evil.example"},
        {"Host": "evil.example:8080"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "[::1"},
        {"Host": ""},
        {"Host": "10.0.0.1"},
    ],
)
def test_a_web_page_gets_nothing(service, headers):
    for method, path in (("POST", "/create"), ("GET", "/healthz"), ("GET", "/v1/info"), ("GET", "/no/such/path")):
        answer = service.send(method, path, b"{}" if method == "POST" else None, headers)
        if headers == {"Host": "[::1"}:
            assert answer.status in (200, 400, 403, 404, 422)
            continue
        assert answer.status in (400, 403)
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert service.send("OPTIONS", "/create", None, headers).status in (400, 403, 405)


@table("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.9.9.9:80", "[::1]:80", "[::1]"])
def test_the_names_of_this_machine_are_ours(service, host):
    assert service.send("GET", "/v1/info", None, {"Host": host}).status == 200


def test_a_body_has_a_size(service):
    answer = service.send("POST", "/step", b" " * (MAX_BYTES + 1))
    assert (answer.status, answer.code) == (413, "too_large")
    big = json.dumps({"instance_id": "a", "messages": {"content": "x" * (1 << 20)}}).encode()
    assert service.send("POST", "/step", big).code == "unknown_instance"


def test_an_endless_body_is_cut_off(service):
    def endless():
        while True:
            yield b" " * (1 << 20)

    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    try:
        connection.request("POST", "/step", endless(), {}, encode_chunked=True)
        status = connection.getresponse().status
    except (BrokenPipeError, ConnectionResetError):
        status = 413  # it hung up on us
    finally:
        connection.close()
    assert status == 413
    assert service.get("/healthz").status == 200


def test_a_body_is_not_unpacked(service):
    for encoding in ("gzip", "deflate", "br", "x"):
        answer = service.send("POST", "/create", b"\x1f\x8b", {"Content-Encoding": encoding})
        assert (answer.status, answer.code) == (415, "unsupported_encoding")


@table(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /create HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /create HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /create HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nExpect: everything\r\n\r\n",
    ],
)
def test_what_is_no_request_is_no_error_of_ours(service, raw):
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), answer[:100]
    assert service.get("/healthz").status == 200
