"""A small HTTP server that says what a test scripts, in place of an environment service that fails in some way."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Reply = Callable[[BaseHTTPRequestHandler, Body], None]


class StandIn(ThreadingHTTPServer):
    """Answers a route with the next of its replies, and again with the last one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.replies: dict[str, list[Reply]] = {"/healthz": [text("OK")], "/release": [ok(None)]}
        self.seen: list[tuple[str, Body, dict[str, str]]] = []

    def asked(self, route: str) -> list[Body]:
        return [body for path, body, _ in self.seen if path == route]


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        said = json.loads(body) if body else {}
        self.server.seen.append((self.path, said, dict(self.headers)))
        replies = self.server.replies.get(self.path, [say({"detail": "Not Found"}, 404)])
        (replies.pop(0) if len(replies) > 1 else replies[0])(self, said)

    do_GET = do_POST

    def log_message(self, *args: object) -> None:
        return None


@contextmanager
def stand_in() -> Iterator[StandIn]:
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def text(said: str, status: int = 200, **headers: str) -> Reply:
    def reply(handler: BaseHTTPRequestHandler, body: Body) -> None:
        data = said.encode()
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return reply


def say(document: Any, status: int = 200, **headers: str) -> Reply:
    return text(json.dumps(document), status, **headers)


def ok(data: Any) -> Reply:
    return say({"success": True, "data": data})


def refuse(status: int, code: str, reason: str = "", **headers: str) -> Reply:
    detail = {"code": code, "message": f"this is {code}", **({"reason": reason} if reason else {})}
    return say({"detail": detail}, status, **headers)


def drop(handler: BaseHTTPRequestHandler, body: Body) -> None:
    """Take the request, and go away without an answer."""
    handler.close_connection = True
    handler.connection.close()


def started(*texts: str, **info: Any) -> Reply:
    """What our own service answers to /create."""
    messages = [{"role": "user", "content": said, "tool_calls": []} for said in texts or ("go",)]
    return ok({"state": messages, "reward": 0.0, "is_terminated": False, "info": {"at_most_once": True, **info}})


def stepped(said: str = "1 left", reward: Any = 0.0, is_over: Any = False, **info: Any) -> Reply:
    messages = [{"role": "user", "content": said, "tool_calls": []}]
    return ok({"state": messages, "reward": reward, "is_terminated": is_over, "info": info})
