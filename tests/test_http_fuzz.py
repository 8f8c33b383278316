"""Mutated requests to each of our servers, over sockets: no server error, no traceback, and it answers afterwards.

The servers are the endpoint of an episode, that of `astuner serve`, the environment service and the viewer.
``python -m tests.test_http_fuzz 10000 SEED`` sends as many requests, and says what was answered.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from astuner.chat.codec import ChatCodec
from astuner.contracts.types import SamplingParams
from astuner.rollout.models import PolicyModel
from astuner.testing import FakeEngine, fake_config, make_tokenizer
from astuner_gateway.gate import running
from astuner_gateway.listening import bind
from astuner_gateway.served.conversations import Conversations
from astuner_gateway.served.following import Answering
from astuner_gateway.served.handler import Handler
from astuner_gateway.served.model import About, ServedModel
from plugins.astuner_env.tests._service import TOYS, Live, served
from plugins.astuner_gateway.tests.endpoint.test_fuzz import WHOLE, Door
from plugins.astuner_view.tests._runs import good_run, viewing

KEY, TOKEN = "sk-test-0123456789abcdef", "0123456789abcdef0123"
AT_ONCE = 16
HANGS = 60.0
"""Seconds after which a request that is one has no answer."""
LEAVES = 0.5
"""Seconds after which the client of one that may be none goes away."""
VALUES: list[Any] = [
    None, True, False, 0, -1, 5, 2**63, -(2**70), 10**4000, 1.5, 1e308, -0.0, float("nan"), float("inf"), "", " ", "a",
    "x" * 5000, "\ud83d", "\x00", "\u2028\x1b[2J", "../..", "%00", "{}", "user", "tool", "auto", [], {}, [None], [[]],
    {"": {}}, {"type": "text"}, {"role": "user", "content": "a"}, {"$ref": "#"}, {"a": {"b": [1, {"c": None}]}},
]  # fmt: skip
DEEP = [b"[" * 3000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"[" * 90 + b"]" * 90, b"9" * 9000, b"\xef\xbb\xbf{}"]
WORDS = [
    b"", b"\0", b"\r\n", b"\n", b"\r\n\r\n", b" ", b":", b"%", b"%zz", b"%00", b"%ff", b"..", b"/../", b"//", b"?",
    b"\xff\xfe", "\U0001f600".encode(), b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"\r\nHost: evil.example",
    b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
    b"Content-Encoding: gzip\r\n", b"X: " + b"y" * 9000 + b"\r\n", b"X: y\r\n" * 300, b"HTTP/0.9", b"HTTP/2.0",
    b"Range: bytes=-9999999999999999999999\r\n", b"Cookie: " + b"a=b;" * 500 + b"\r\n", b"PRI *", b"#",
    b"Authorization: Bearer \xff\r\n",
]  # fmt: skip
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "NONSENSE", "get", ""]


@dataclass
class Server:
    port: int
    health: str
    head: dict[str, str]
    """Headers of a request that is let in."""
    asked: list[tuple[str, str, Any]]
    """Requests that are good ones: method, path and body."""


@contextmanager
def servers(folder: Path) -> Iterator[dict[str, Server]]:
    """The four of them, each on an event loop of its own."""
    with ExitStack() as stack:
        (folder / "static").mkdir()
        (folder / "static/index.html").write_text("<!doctype html>")
        good_run(folder / "runs/math")
        view = stack.enter_context(viewing(folder / "runs", static=folder / "static"))
        world = served("counter", f"{TOYS}:Counter", splits=("train", "dev"))
        limits = {"max_instances": 64, "patience": 0.0, "idle_ttl": 20.0, "parent": folder}
        env = stack.enter_context(Live([world], token=TOKEN, **limits))
        door = Door(folder)
        stack.callback(door.close)
        port = stack.enter_context(_serving(folder))
        env.create("live", goal=10**9)
        of_run = [f"/api/runs/math{rest}" for rest in ("", "/metrics", "/steps?split=train", "/live?cursor=1")]
        of_run += [f"/api/runs/math/{rest}" for rest in ("episodes/g0-0", "episodes/g0-0/tokens", "files/run.log")]
        listed = "where=reward>0&order=-reward&limit=2&offset=1"
        of_run += [f"/api/runs/math/{rest}?{listed}" for rest in ("groups", "episodes", "position")]
        old = {"env_type": "counter", "task_id": "train-0", "instance_id": "live", "params": {"request_id": "r"}}
        said = {"messages": {"role": "assistant", "content": "x"}}
        new = {"environment": "counter", "task": {"main_query": "q", "metadata": {}}, "request_id": "r"}
        step = {"action": {"role": "assistant", "content": "x"}, "request_id": "r"}
        chats: list[tuple[str, str, Any]] = [("POST", route, body) for route, body in WHOLE.items()]
        chats += [("POST", route, {**body, "stream": False}) for route, body in WHOLE.items()]
        chats.append(("GET", "/v1/models", None))
        yield {
            "endpoint": Server(door.port, "/health", {"Authorization": f"Bearer {door.access.api_key}"}, chats),
            "serve": Server(
                port, "/health", {"Authorization": f"Bearer {KEY}"}, [*chats, ("GET", "/metrics", None), *chats[:3]]
            ),
            "env": Server(
                env.port,
                "/healthz",
                {"Authorization": f"Bearer {TOKEN}"},
                [
                    *(("POST", f"/{name}", {**old, **said}) for name in ("step", "evaluate", "get_info", "step")),
                    ("POST", "/create", {**old, "instance_id": "new"}),
                    ("POST", "/release", {**old, "instance_id": "new"}),
                    ("POST", "/get_env_profile", {"env_type": "counter", "params": {"split": "train"}}),
                    ("POST", "/v1/instances", new),
                    ("POST", "/v1/instances/live/step", step),
                    ("POST", "/v1/instances/live/evaluate", {}),
                    ("GET", "/v1/environments/counter/tasks?split=dev&offset=1&limit=2", None),
                    *(("GET", path, None) for path in ("/v1/info", "/v1/instances/live/info", "/metrics")),
                    ("DELETE", "/v1/instances/new", None),
                ],
            ),
            "view": Server(view.port, "/health", {}, [("GET", path, None) for path in ("/", "/api/runs", *of_run)]),
        }


@contextmanager
def _serving(folder: Path) -> Iterator[int]:
    """The port of a server as `astuner serve` starts it, with an engine that says one thing."""
    tokenizer, ready, over = make_tokenizer(), threading.Event(), threading.Event()
    about = About(name="exam/step-000007", policy="default", checkpoint="/models/step-000007", step=7)
    engine = FakeEngine(lambda prompt: '{"x": 1}', tokenizer, max_model_len=100_000)
    model = PolicyModel(engine, ChatCodec(tokenizer))
    served_model = ServedModel(fake_config(folder), model, about, SamplingParams(max_tokens=50))
    with bind("127.0.0.1", 0, listen=True) as listening:
        gate = Handler(Answering(about, Conversations(served_model.voice, 1_000_000)), key=KEY, host="127.0.0.1")

        async def serve() -> None:
            async with running(gate, listening, grace=3.0):
                ready.set()
                await asyncio.to_thread(over.wait)
            await served_model.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            assert ready.wait(HANGS)
            yield listening.getsockname()[1]
        finally:
            over.set()
            thread.join(HANGS)


def request(server: Server, draw: random.Random) -> tuple[bytes, bool]:
    """The bytes of a request with something wrong about it, and whether it is one that has to be answered."""
    method, path, body = draw.choice(server.asked)
    head = {"Host": f"127.0.0.1:{server.port}", **server.head, "Connection": "close"}
    kind = draw.choice(("value", "value", "bytes", "path", "head", "raw", "raw"))
    raw = b"" if body is None else json.dumps(body).encode()
    if kind == "value" and body:
        body = copy.deepcopy(body)
        for _ in range(draw.choice((1, 1, 1, 2))):
            _change(body, draw)
        raw = json.dumps(body).encode()
    elif kind == "bytes" and raw:
        raw = draw.choice(DEEP) if draw.random() < 0.2 else changed(raw, draw)
    elif kind in ("value", "bytes", "path"):
        path = "/" + re.sub(rb"[\x00-\x20\x7f-\xff#]", b"%", changed(path[1:].encode(), draw)).decode()
    elif kind == "head":
        head.pop(draw.choice(list(head)))
        method = draw.choice(METHODS)
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
    if method == "POST" or raw:
        lines += ["Content-Type: application/json", f"Content-Length: {len(raw)}"]
    whole = "\r\n".join([*lines, "", ""]).encode() + raw
    return (whole, kind != "head") if kind != "raw" else (changed(whole, draw), False)


def _change(inside: Any, draw: random.Random) -> None:
    """Put something else at some place inside of it."""
    while True:
        key = draw.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
        if not (isinstance(inside[key], (dict, list)) and inside[key]) or draw.random() < 0.3:
            break
        inside = inside[key]
    if draw.random() < 0.2:
        del inside[key]
    elif draw.random() < 0.2 and isinstance(inside, dict):
        inside[draw.choice(("", "type", "role", "id", "stream", "params", "x" * 300, "\ud83d"))] = copy.deepcopy(
            draw.choice(VALUES)
        )
    else:
        inside[key] = copy.deepcopy(draw.choice(VALUES))
    if not inside:
        inside.append(None) if isinstance(inside, list) else inside.update(x=None)


def changed(data: bytes, draw: random.Random) -> bytes:
    """``data`` with one to three things done to it."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        at = draw.randrange(len(data) + 1)
        to = min(len(data), at + draw.choice((1, 4, 30, 400)))
        word = draw.choice(WORDS)
        bit = bytes([data[at] ^ (1 << draw.randrange(8))]) if at < len(data) else b""
        behind = draw.choice(
            (bit + data[at + 1 :], data[to:], data[at:to] + data[at:], word + data[at:], word + data[to:])
        )
        data = data[:at] + behind
    return data


async def answered(port: int, sent: bytes, patience: float) -> bytes:
    """What came back until the server closed the connection, or was silent for so long."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = b""
    try:
        writer.write(sent)
        while piece := await asyncio.wait_for(reader.read(1 << 16), patience):
            found += piece
    except (ConnectionError, asyncio.TimeoutError):
        pass
    finally:
        writer.close()
    return found


class Tracebacks(logging.Handler):
    """Keeps what is logged with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = logging.Formatter().format(record)
        if "Traceback" in text:
            self.found.append(text)


async def fuzz(number: int, seed: int, there: dict[str, Server]) -> tuple[Counter[str], list[str], float]:
    """What was answered how often, what was wrong, and the longest time to a whole answer."""
    counts, wrong, slowest = Counter[str](), list[str](), 0.0
    free = asyncio.Semaphore(AT_ONCE)

    async def one(i: int) -> None:
        nonlocal slowest
        draw = random.Random(f"{seed}/{i}")
        name, server = draw.choice(list(there.items()))
        sent, due = request(server, draw)
        async with free:
            began = time.perf_counter()
            answer = await answered(server.port, sent, HANGS if due else LEAVES)
            if due:
                slowest = max(slowest, time.perf_counter() - began)
        statuses = [int(status) for status in re.findall(rb"(?:^|\n)HTTP/1\.[01] (\d{3}) ", answer)]
        counts.update(f"{name} {status}" for status in statuses or ["no answer"])
        full = name == "env" and statuses == [503] and b'"busy"' in answer
        if (max(statuses, default=0 if not due else 999) >= 500 and not full) or b"Traceback (most recent" in answer:
            wrong.append(f"{seed}/{i} {name}: {sent[:3000]!r}\n-> {answer[:1000]!r}")

    for begin in range(0, number, 500):
        await asyncio.gather(*(one(i) for i in range(begin, min(number, begin + 500))))
        for name, server in there.items():
            well = f"GET {server.health} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            if not (await answered(server.port, well, HANGS)).startswith(b"HTTP/1.1 200"):
                wrong.append(f"{name} does not answer to {server.health} after {begin + 500}")
    return counts, wrong, slowest


def run(number: int, seed: int, folder: Path) -> tuple[Counter[str], list[str], float]:
    log = Tracebacks()
    logging.getLogger().addHandler(log)
    try:
        with servers(folder) as there:
            counts, wrong, slowest = asyncio.run(fuzz(number, seed, there))
    finally:
        logging.getLogger().removeHandler(log)
    return counts, wrong + log.found, slowest


@pytest.mark.slow
def test_no_request_gives_a_server_error(tmp_path: Path) -> None:
    counts, wrong, _ = run(400, 19, tmp_path)
    assert not wrong, "\n\n".join(wrong[:3])
    assert all(counts[f"{name} {status}"] for name in ("endpoint", "serve", "env", "view") for status in (200, 400)), (
        counts
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        how, failed, longest = run(int(sys.argv[1]), int(sys.argv[2]), Path(place))
    print(dict(sorted(how.items())), *failed[:10], f"slowest {longest:.2f} s, {len(failed)} wrong", sep="\n\n")
    raise SystemExit(bool(failed))
