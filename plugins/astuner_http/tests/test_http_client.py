"""`JsonClient` against a real server on loopback: answers, refusals, limits, and where the key goes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from astuner import in_daemon_thread
from astuner_http.client import HttpError, JsonClient, given_up_when_cancelled
from tests.table import table

KEY = "sk-very-secret"
Reply = Callable[[BaseHTTPRequestHandler], None]


class Server(ThreadingHTTPServer):
    """Answers every request with `reply` and remembers it."""

    daemon_threads = True
    reply: Reply

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.gone = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, self.path, dict(self.headers), body))
        self.server.reply(self)

    do_POST = do_GET

    def log_message(self, *args: object) -> None:
        return None


def say(body: str, status: int = 200, **headers: str) -> Reply:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        data = body.encode()
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return reply


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.gone.set()
        server.shutdown()
        thread.join()


def client(server: Server, **options: object) -> JsonClient:
    return JsonClient(server.url, **{"timeout": 5.0, "api_key": KEY, **options})  # type: ignore[arg-type]


def refused(server: Server, **options: object) -> HttpError:
    with pytest.raises(HttpError) as e:
        client(server, **options).post("/x", {})
    assert KEY not in str(e.value)
    return e.value


def test_what_is_sent_and_what_comes_back(server: Server) -> None:
    server.reply = say('{"a": [1, "ü"]}')
    assert client(server).post("/x", {"b": "ü"}) == {"a": [1, "ü"]}
    assert client(server, api_key="").get("/y?z=1") == {"a": [1, "ü"]}
    (posted, got) = server.seen
    assert (posted[:2], json.loads(posted[3])) == (("POST", "/v1/x"), {"b": "ü"})
    assert (posted[2]["Authorization"], posted[2]["Content-Type"]) == (f"Bearer {KEY}", "application/json")
    assert got[:2] == ("GET", "/v1/y?z=1")
    assert "Authorization" not in got[2]


@table("status", [301, 302, 303, 307, 308])
def test_a_redirect_takes_the_key_nowhere(server: Server, status: int) -> None:
    with Server() as other:
        threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        other.reply = say("{}")
        server.reply = say("", status, Location=f"{other.url}/x")
        error = refused(server)
        with pytest.raises(HttpError):
            client(server).get("/x")
        assert (error.status, error.again) == (status, False)
        assert other.seen == []
        other.shutdown()


@table(("status", "again"), [(400, False), (401, False), (404, False), (429, True), (503, True)])
def test_a_refusal_says_status_and_reason_and_whether_to_ask_again(server: Server, status: int, again: bool) -> None:
    server.reply = say(f"{'x' * 490} bad key {KEY} {'y' * 9000}", status, Retry_After="7")
    error = refused(server)
    assert (error.status, error.again, error.after) == (status, again, 7.0)
    assert f"/v1/x answered {status}" in str(error)
    assert "sk-" not in str(error)  # nor the first half of a key at the end of the excerpt
    assert len(str(error)) < 700


def test_only_the_seconds_of_retry_after_count(server: Server) -> None:
    server.reply = say("", 503, Retry_After="Fri, 31 Dec 2027 23:59:59 GMT")
    assert refused(server).after == 0.0


def test_a_reply_that_is_not_json_is_said(server: Server) -> None:
    server.reply = say(f"<html>{KEY}")
    assert "did not answer with JSON" in str(refused(server))
    server.reply = say("[" * 200_000)
    assert "did not answer with JSON" in str(refused(server))


def test_a_reply_is_bounded_in_size(server: Server) -> None:
    server.reply = say(json.dumps("x" * 98))
    assert client(server, max_reply=100).get("/") == "x" * 98
    error = refused(server, max_reply=99)
    assert "longer than 99 bytes" in str(error)
    assert not error.again


def test_a_reply_that_drips_in_is_bounded_in_time(server: Server) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not server.gone.wait(0.02):
            try:
                handler.wfile.write(b" ")
            except OSError:
                return

    server.reply = drip
    error = refused(server, timeout=0.3)
    assert "no answer within 0.3 s" in str(error)
    assert error.again


def test_a_silent_server_and_one_that_is_not_there_are_said(server: Server) -> None:
    server.reply = lambda _: server.gone.wait(20) and None
    assert "no answer within 0.2 s" in str(refused(server, timeout=0.2))
    with pytest.raises(HttpError, match=r"cannot reach http://127\.0\.0\.1:9/v1/x: ConnectionRefusedError") as e:
        JsonClient("http://127.0.0.1:9/v1", timeout=5.0).get("/x")
    assert e.value.again


@table("url", ["localhost:80", "ftp://h/v1", "http://", "/v1", "http://[::1/v1", "http://h:99999"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(HttpError, match="not a valid URL"):
        JsonClient(url, timeout=1.0)


@table("url", ["http://ada:s3cret@h/v1", "https://s3cret@h", "ada:s3cret@h/v1"])
def test_a_user_in_the_url_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(HttpError, match="user or password") as e:
        JsonClient(url, timeout=1.0)
    assert "s3cret" not in str(e.value)


@table("key", ["s3cret\n", "s3cret\x00", "s3crét"])
def test_a_key_that_no_header_may_have_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(HttpError, match="the key in MY_KEY") as e:
        JsonClient("http://h/v1", api_key=key, key_name="the key in MY_KEY", timeout=1.0)
    assert "s3cr" not in str(e.value)


def test_no_proxy_between_two_processes_of_one_machine(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server.reply = say("{}")
    assert client(server).get("/x") == {}
    with pytest.raises(HttpError, match="Connection refused"):  # the proxy's: elsewhere it is honoured
        JsonClient("http://192.0.2.1/v1", timeout=1.0).get("/x")


def test_what_a_refusal_said_is_there_for_programs(server: Server) -> None:
    server.reply = say(json.dumps({"detail": {"code": "busy", "message": "x" * 2000}}), 503)
    error = refused(server)
    assert error.refusal == {
        "detail": {"code": "busy", "message": "x" * 2000}
    }  # whole, though only its beginning is shown
    assert len(str(error)) < 700
    server.reply = say("not JSON", 500)
    assert refused(server).refusal is None


def test_whether_it_is_up_and_whether_it_can_have_seen_a_request(server: Server) -> None:
    server.reply = say("OK")  # no JSON, and none is needed
    assert client(server).is_up("/healthz")
    server.reply = say("no", 404)
    assert not client(server).is_up("/healthz")

    def hang_up(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        handler.connection.close()

    server.reply = hang_up
    assert not refused(server).unsent
    with pytest.raises(HttpError) as e:
        JsonClient("http://127.0.0.1:9", timeout=5.0).post("/x", {})
    assert e.value.unsent


# --------------------------------------------------------------------------------------- connections used again


class Keeping(Handler):
    """Keeps connections open, and notes the client's port of each request."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one piece

    def do_GET(self) -> None:
        self.server.ports.append(self.client_address[1])  # type: ignore[attr-defined]
        super().do_GET()

    do_POST = do_GET


@pytest.fixture
def keeping(server: Server) -> Server:
    server.RequestHandlerClass = Keeping
    server.ports = []  # type: ignore[attr-defined]
    server.reply = say("{}")
    return server


def connections(keeping: Server) -> int:
    return len(set(keeping.ports))  # type: ignore[attr-defined]


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def test_one_connection_serves_many_requests(keeping: Server) -> None:
    it = client(keeping)
    for _ in range(5):
        assert it.post("/x", {"a": 1}) == {}
        assert it.get("/y") == {}
    keeping.reply = say("no", 404)
    for _ in range(2):
        with pytest.raises(HttpError, match="answered 404"):
            it.get("/z")
    assert connections(keeping) == 1


def test_an_answer_that_was_not_read_to_its_end_costs_the_connection(keeping: Server) -> None:
    it = client(keeping, max_reply=10)
    keeping.reply = say("x" * 100_000)
    with pytest.raises(HttpError, match="longer than"):
        it.get("/x")
    keeping.reply = say("1")
    assert it.get("/x") == 1  # and not what was left of the other
    assert connections(keeping) == 2


@pytest.mark.parametrize("method", ["get", "post"])
def test_a_connection_that_the_server_closed_is_not_used_again(keeping: Server, method: str) -> None:
    it = client(keeping)
    closed = threading.Event()

    def answer_and_close(handler: BaseHTTPRequestHandler) -> None:
        say("{}")(handler)
        handler.wfile.flush()
        hang_up(handler)  # it said that it would stay open
        closed.set()

    keeping.reply = answer_and_close
    assert it.get("/x") == {}
    assert closed.wait(10)
    keeping.reply = say("{}")
    assert (it.post("/x", {}) if method == "post" else it.get("/x")) == {}
    assert connections(keeping) == 2
    assert len(keeping.seen) == 2


def test_what_nobody_asked_for_is_no_answer_to_the_next_request(keeping: Server) -> None:
    it = client(keeping)
    pushed = threading.Event()
    sent = threading.Event()

    def answer_and_push(handler: BaseHTTPRequestHandler) -> None:
        say("{}")(handler)
        handler.wfile.flush()
        assert pushed.wait(10)
        handler.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n"forged"')
        handler.wfile.flush()
        sent.set()

    keeping.reply = answer_and_push
    assert it.get("/x") == {}
    pushed.set()
    assert sent.wait(10)
    keeping.reply = say("{}")
    assert it.get("/x") == {}


def test_a_request_that_only_reads_is_made_again_when_a_used_connection_ends(keeping: Server) -> None:
    it = client(keeping)
    it.get("/x")
    keeping.reply = lambda handler: (setattr(keeping, "reply", say("{}")), hang_up(handler))[1]
    assert it.get("/x") == {}
    assert len(keeping.seen) == 3
    keeping.reply = hang_up  # for good: a new connection is not tried again
    with pytest.raises(HttpError, match="cannot reach"):
        it.get("/x")
    assert len(keeping.seen) == 5


def test_a_request_that_may_have_been_carried_out_is_not_made_again(keeping: Server) -> None:
    it = client(keeping)
    it.post("/x", {})
    keeping.reply = hang_up
    with pytest.raises(HttpError, match="cannot reach") as e:
        it.post("/x", {})
    assert (e.value.again, e.value.unsent) == (True, False)
    assert len(keeping.seen) == 2


def test_several_threads_have_a_connection_each_and_their_own_answers(keeping: Server) -> None:
    def echo(handler: BaseHTTPRequestHandler) -> None:
        say(json.dumps(handler.path))(handler)

    keeping.reply = echo
    it = client(keeping)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(it.get, (f"/{n}" for n in range(200)))) == [f"/v1/{n}" for n in range(200)]
    assert connections(keeping) <= 8


def test_close_gives_them_back_and_a_later_request_makes_another(keeping: Server) -> None:
    it = client(keeping)
    it.get("/x")
    it.close()
    assert it.get("/x") == {}
    assert connections(keeping) == 2


def test_a_client_that_is_forgotten_leaves_no_socket_behind(keeping: Server) -> None:
    ended = threading.Event()
    keeping.shutdown_request = lambda request: (Server.shutdown_request(keeping, request), ended.set())  # type: ignore
    it = client(keeping)
    it.get("/x")
    assert not ended.wait(0.05)
    del it
    gc.collect()
    assert ended.wait(10)


def test_a_forked_process_makes_its_own(keeping: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    it = client(keeping)
    it.get("/x")
    ours = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: ours + 1)  # as in a child
    it.get("/x")
    assert connections(keeping) == 2


# ------------------------------------------------------------------------------------------------------ proxies


@pytest.fixture
def proxied(keeping: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://ada:s3cret%21@127.0.0.1:{keeping.server_port}")
    return keeping


def test_a_proxy_gets_whole_urls_and_its_password(proxied: Server) -> None:
    it = JsonClient("http://192.0.2.1:81/v1", timeout=5.0)
    for _ in range(2):
        assert it.get("/x?y=1") == {}
    (seen, again) = proxied.seen
    assert seen[1] == again[1] == "http://192.0.2.1:81/v1/x?y=1"
    assert seen[2]["Host"] == "192.0.2.1:81"
    assert seen[2]["proxy-authorization"] == "Basic YWRhOnMzY3JldCE="
    assert connections(proxied) == 1


def test_a_proxy_is_asked_for_a_tunnel_to_a_server_with_tls(proxied: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handler: BaseHTTPRequestHandler) -> None:
        proxied.seen.append((handler.command, handler.path, dict(handler.headers), b""))
        say("", 403)(handler)

    monkeypatch.setattr(Keeping, "do_CONNECT", refuse, raising=False)
    with pytest.raises(HttpError, match=r"cannot reach https://192.0.2.1/v1/x: OSError: Tunnel") as e:
        JsonClient("https://192.0.2.1/v1", api_key=KEY, timeout=5.0).get("/x")
    assert "s3cret" not in str(e.value)
    ((_, target, headers, _),) = proxied.seen
    assert target == "192.0.2.1:443"
    assert headers["proxy-authorization"] == "Basic YWRhOnMzY3JldCE="
    assert "Authorization" not in headers


def test_no_proxy_where_the_environment_says_so(proxied: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "192.0.2.1")
    with pytest.raises(HttpError):
        JsonClient("http://192.0.2.1/v1", timeout=0.2).get("/x")
    assert proxied.seen == []
    assert JsonClient("http://192.0.2.2/v1", timeout=5.0).get("/x") == {}
    assert len(proxied.seen) == 1


def test_a_proxy_that_is_no_url_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "socks5://ada:s3cret@h:1")
    with pytest.raises(HttpError, match="http_proxy is not a valid proxy URL") as e:
        JsonClient("http://192.0.2.1", timeout=1.0)
    assert "s3cret" not in str(e.value)


# ------------------------------------------------------------------------------------------- what is given up


def unanswered(keeping: Server) -> tuple[threading.Event, list[bytes]]:
    """Makes the server keep an answer back; what says that it was asked, and what it reads while nobody answers."""
    asked, read = threading.Event(), []

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.connection.settimeout(20)
        asked.set()
        read.append(handler.connection.recv(1))
        handler.close_connection = True
        keeping.gone.set()

    keeping.reply = reply
    return asked, read


def test_a_request_that_is_given_up_closes_its_connection_and_no_other(keeping: Server) -> None:
    it = client(keeping, timeout=30.0)
    it.get("/before")
    asked, read = unanswered(keeping)

    async def give_up() -> None:
        async def wait() -> object:
            with given_up_when_cancelled():
                return await in_daemon_thread(it.post, "/x", {})

        waiting = asyncio.create_task(wait())
        assert await asyncio.to_thread(asked.wait, 20)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    assert keeping.gone.wait(20)
    assert read == [b""], "the server sees that its client has gone"
    keeping.reply = say("{}")
    assert it.post("/after", {}) == {}, "and the next request has a connection of its own"


def test_what_is_given_up_before_it_is_sent_is_not_waited_for(keeping: Server) -> None:
    asked, _ = unanswered(keeping)
    begin = threading.Event()
    ended: list[object] = []

    def ask() -> None:
        begin.wait(20)
        with pytest.raises(HttpError, match="the request was cancelled"):
            client(keeping, timeout=30.0).post("/x", {})
        ended.append(True)

    async def give_up() -> None:
        async def wait() -> None:
            with given_up_when_cancelled():
                await in_daemon_thread(ask)

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        begin.set()
        assert await asyncio.to_thread(keeping.gone.wait, 20)

    asyncio.run(give_up())
    assert asked.is_set()
    for thread in [t for t in threading.enumerate() if t.name == "astuner"]:
        thread.join(20)
    assert ended == [True]
