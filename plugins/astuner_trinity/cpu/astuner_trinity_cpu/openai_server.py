"""OpenAI's completions over HTTP for a `CpuEngine`, with answers like vLLM's in Trinity.

``/v1/completions`` accepts token IDs and returns them with ``return_token_ids``; log-probabilities belong to the
sampling distribution (vLLM's ``processed_logprobs``).  ``/v1/chat/completions`` renders messages with the tokenizer's
template and returns text, including tool calls.  Unsupported parameters, such as streaming, are refused.  A request
whose client disconnects leaves the batch.
"""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from astuner_cpu.engine import CpuEngine, PromptError

MAX_BODY = 1 << 26
"""Bytes; aiohttp's own limit is 1 MiB, and a token id takes up to 7."""
_WITHOUT_EFFECT = frozenset({"model", "user", "request_id", "priority", "add_special_tokens", "skip_special_tokens"})
_EMPTY: tuple[Any, ...] = (None, False, 0, [], {}, "")


class OpenAIServer:
    """Server of one model; `serving` starts and stops it."""

    def __init__(
        self,
        engine: CpuEngine,
        *,
        name: str,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Configure the server.

        :param name: Name of the model in ``/v1/models``; requests may use any name.
        :param chat_template: Replacement for the tokenizer's template.
        :param template_kwargs: Template arguments; a request's ``chat_template_kwargs`` take precedence.
        """
        self._engine = engine
        self._tokenizer = engine.tokenizer
        self._name = name
        self._chat_template = chat_template
        self._template_kwargs = dict(template_kwargs or {})
        self._load = 0

    @contextlib.asynccontextmanager
    async def serving(self, bound: socket.socket) -> AsyncIterator[None]:
        """Serve on a bound socket until the block ends."""
        app = web.Application(client_max_size=MAX_BODY)
        app.add_routes(
            [
                web.get("/health", _nothing),
                web.get("/load", self._server_load),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._answering(self._completions)),
                web.post("/v1/chat/completions", self._answering(self._chat)),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.SockSite(runner, bound).start()
            yield
        finally:
            await runner.cleanup()

    async def _server_load(self, _: web.Request) -> web.Response:
        return web.json_response({"server_load": self._load})

    async def _models(self, _: web.Request) -> web.Response:
        model = {
            "id": self._name,
            "object": "model",
            "created": 0,
            "owned_by": "astuner-trinity-cpu",
            "root": self._name,
            "max_model_len": self._engine.max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    def _answering(
        self, answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Return a handler that reads JSON, counts running requests, and explains refusals."""

        async def handle(request: web.Request) -> web.Response:
            self._load += 1
            try:
                body = await request.json()
                if not isinstance(body, dict):
                    raise PromptError("the body is not a JSON object")
                return web.json_response(await answer(body))
            except (PromptError, ValueError) as e:  # ValueError: the body is not JSON
                error = {"message": str(e), "type": "BadRequestError", "code": 400}
                return web.json_response({"error": error}, status=400)
            finally:
                self._load -= 1

        return handle

    async def _completions(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.pop("prompt", None)
        if isinstance(prompt, str):
            prompt = self._tokenizer(prompt)["input_ids"]
        if not isinstance(prompt, list):
            raise PromptError("the prompt must be a list of token IDs or a string")
        logprobs = body.pop("logprobs", None)
        if logprobs not in (None, False, 0, 1, True):
            raise PromptError("rollouts on a CPU return only the log-probability of the chosen token; set logprobs: 0")
        wanted = logprobs is not None and logprobs is not False

        def said(text: str, tokens: list[str], drawn: list[float]) -> dict[str, Any]:
            return {"text": text, "logprobs": {"tokens": tokens, "token_logprobs": drawn} if wanted else None}

        with_ids = bool(body.get("return_token_ids", False))
        answer = await self._answer("cmpl", "text_completion", prompt, body, said)
        for choice in answer["choices"]:
            choice["prompt_token_ids"] = prompt if with_ids else None
        return answer

    async def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = self._render(body)
        most = body.pop("max_completion_tokens", None)
        if most is not None:
            body["max_tokens"] = most
        wanted = bool(body.pop("logprobs", False))

        def said(text: str, tokens: list[str], drawn: list[float]) -> dict[str, Any]:
            each = [
                {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
                for token, logprob in zip(tokens, drawn, strict=True)
            ]
            message = {"role": "assistant", "content": text, "tool_calls": []}
            return {"message": message, "logprobs": {"content": each} if wanted else None}

        with_ids = bool(body.get("return_token_ids", False))
        answer = await self._answer("chatcmpl", "chat.completion", prompt, body, said)
        return {**answer, "prompt_token_ids": prompt if with_ids else None}

    def _render(self, body: dict[str, Any]) -> list[int]:
        """Return the token IDs of a chat, and remove the keys that were used from ``body``."""
        messages = body.pop("messages", None)
        if not isinstance(messages, list) or not messages:
            raise PromptError("messages is missing or empty")
        if body.pop("tool_choice", "auto") not in ("auto", "none", None):
            raise PromptError("rollouts on a CPU cannot force a tool call")
        kwargs = {**self._template_kwargs, **(body.pop("chat_template_kwargs", None) or {})}
        ids = self._tokenizer.apply_chat_template(
            [_plain(message) for message in messages],
            tools=body.pop("tools", None) or None,
            chat_template=self._chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **kwargs,
        )["input_ids"]
        return [int(token) for token in ids]

    async def _answer(
        self,
        prefix: str,
        kind: str,
        prompt: list[int],
        body: dict[str, Any],
        said: Callable[[str, list[str], list[float]], dict[str, Any]],
    ) -> dict[str, Any]:
        """Generate and return an answer in the format of OpenAI's API.

        :param said: Returns the fields of a choice from its text, the text of each token and their log-probabilities.
        :raises PromptError: The body contains an unsupported parameter.
        """
        n, with_ids = body.pop("n", None) or 1, bool(body.pop("return_token_ids", False))
        sampling = {name: value for name, value in body.items() if name not in _WITHOUT_EFFECT}
        for name in ("stream", "stream_options", "echo", "top_logprobs", "suffix", "logit_bias", "best_of"):
            if sampling.pop(name, None) not in (*_EMPTY, n if name == "best_of" else None):
                raise PromptError(f"rollouts on a CPU do not support {name!r}; remove it")
        for name in ("presence_penalty", "frequency_penalty", "min_p", "min_tokens"):  # 0 has no effect
            if not sampling.get(name, 0):
                sampling.pop(name, None)
        requests = await self._engine.generate(prompt, sampling, n=n)
        decode = self._tokenizer.decode
        choices = [
            {
                "index": index,
                "finish_reason": "stop" if request.stopped else "length",
                "stop_reason": None,
                "token_ids": request.tokens if with_ids else None,
                **said(
                    decode(request.tokens, skip_special_tokens=True),
                    [decode([token]) for token in request.tokens],
                    request.logprobs,
                ),
            }
            for index, request in enumerate(requests)
        ]
        made = sum(len(request.tokens) for request in requests)
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self._name,
            "choices": choices,
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": made, "total_tokens": len(prompt) + made},
        }


async def _nothing(_: web.Request) -> web.Response:
    return web.Response()


def _plain(message: Any) -> dict[str, Any]:
    """Return a message with a single string as content, as templates expect."""
    if not isinstance(message, dict):
        raise PromptError("a message is not a JSON object")
    content = message.get("content")
    if isinstance(content, list):
        kinds = {part.get("type") if isinstance(part, dict) else None for part in content}
        if not kinds <= {"text"}:
            raise PromptError("rollouts on a CPU support text only")
        content = "".join(part["text"] for part in content)
    return {**message, "content": content or ""}


def bind(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens only on ``host``; port 0 selects a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def url(bound: socket.socket) -> str:
    """Return the URL of a bound socket, without ``/v1``."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
