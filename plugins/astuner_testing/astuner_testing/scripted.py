"""Serve a scripted model on a real OpenAI-compatible server on loopback, for tests of helper models.

Everything except the replies is real: sockets, HTTP, JSON, status codes. Invariant: a script that raises makes the test
fail, because its exception leaves the ``with`` block.
"""

from __future__ import annotations

import json
import math
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Body = dict[str, Any]
Reply = str | Mapping[str, Any] | tuple[int, Mapping[str, Any]] | tuple[int, Mapping[str, Any], Mapping[str, str]]
"""A text; an object, which is sent as its JSON text; or a status with a complete body and optional headers."""

DIMENSIONS = 64


class ScriptedModel:
    """A scripted server: ``with ScriptedModel(lambda body: "yes") as server:``, then call ``server.base_url``.

    It serves ``/v1/chat/completions`` (including streams), ``/v1/embeddings`` and ``/v1/models``. Tokens are counted in
    words.

    :param reply: Return the reply to the body of a chat request; called from several threads concurrently.
    :param embed: Return the vector of a text; by default texts with the same words are close.
    :param api_key: Required key; None accepts all clients.
    """

    def __init__(
        self,
        reply: Callable[[Body], Reply],
        *,
        embed: Callable[[str], Sequence[float]] | None = None,
        api_key: str | None = None,
    ) -> None:
        self._reply, self._embed, self._api_key = reply, embed or embedding_of_words, api_key
        self._lock = threading.Lock()
        self._requests: list[Body] = []
        self._raised: list[Exception] = []
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def requests(self) -> list[Body]:
        """Copy of the received bodies, in order."""
        with self._lock:
            return list(self._requests)

    def __enter__(self) -> ScriptedModel:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if self._raised and (error is None or isinstance(error, Exception)):
            raise self._raised[0]

    def close(self) -> None:
        """Stop the server and close its port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def answer(self, path: str, headers: Mapping[str, str], body: Body) -> tuple[int, Any, Mapping[str, str]]:
        """Return status, body and headers for one request."""
        # openai 3 writes it in lower case
        keys = [value for name, value in headers.items() if name.lower() == "authorization"]
        if self._api_key is not None and keys != [f"Bearer {self._api_key}"]:
            return 401, _error("an API key is required"), {}
        with self._lock:
            self._requests.append(body)
        try:
            if path == "/v1/chat/completions":
                return self._chat(body)
            if path == "/v1/embeddings":
                return 200, self._embeddings(body), {}
        except Exception as e:  # the script belongs to the test; `__exit__` raises it
            with self._lock:
                self._raised.append(e)
            return 500, _error(f"the script raised {type(e).__name__}: {e}"), {}
        return 404, _error(f"{path} does not exist"), {}

    def _chat(self, body: Body) -> tuple[int, Any, Mapping[str, str]]:
        said = self._reply(body)
        if isinstance(said, tuple):
            return said[0], said[1], said[2] if len(said) == 3 else {}
        text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
        asked, told = _words(json.dumps(body.get("messages", []), ensure_ascii=False)), _words(text)
        usage = {"prompt_tokens": asked, "completion_tokens": told, "total_tokens": asked + told}
        head = {"id": f"chatcmpl-{len(self.requests)}", "created": 0, "model": body.get("model", "scripted")}
        if body.get("stream"):
            chunk = {**head, "object": "chat.completion.chunk"}
            first = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
            last = {"index": 0, "delta": {}, "finish_reason": "stop"}
            events = [{**chunk, "choices": choices} for choices in ([first], [last], [])]
            return 200, [*events[:2], {**events[2], "usage": usage}], {}
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return 200, {**head, "object": "chat.completion", "choices": [choice], "usage": usage}, {}

    def _embeddings(self, body: Body) -> Any:
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        data = [{"object": "embedding", "index": i, "embedding": list(self._embed(t))} for i, t in enumerate(texts)]
        words = sum(map(_words, texts))
        usage = {"prompt_tokens": words, "total_tokens": words}
        return {"object": "list", "data": data, "model": body.get("model", "scripted"), "usage": usage}


def embedding_of_words(text: str) -> list[float]:
    """Return a unit vector of the words of ``text``, each hashed to one of `DIMENSIONS` places."""
    vector = [0.0] * DIMENSIONS
    for word in text.lower().split():
        vector[zlib.crc32(word.encode("utf-8", "replace")) % DIMENSIONS] += 1.0
    length = math.hypot(*vector) or 1.0
    return [x / length for x in vector]


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024


def _handler(model: ScriptedModel) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            models = {"object": "list", "data": [{"id": "scripted", "object": "model"}]}
            self._send(*((200, models, {}) if self.path == "/v1/models" else (404, _error(self.path), {})))

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._send(*model.answer(self.path, dict(self.headers), json.loads(raw)))

        def _send(self, status: int, body: Any, headers: Mapping[str, str]) -> None:
            if isinstance(body, list):  # a stream
                kind = "text/event-stream"
                raw = "".join(f"data: {json.dumps(event)}\n\n" for event in body).encode() + b"data: [DONE]\n\n"
            else:
                kind, raw = "application/json", json.dumps(body).encode()
            try:
                self.send_response(status)
                for name, value in {**headers, "Content-Type": kind, "Content-Length": str(len(raw))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(raw)
            except ConnectionError:
                self.close_connection = True  # the client stopped waiting

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    return Handler


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


def _words(text: str) -> int:
    return len(text.split())
