"""Serve a cheap stub of an inference server that immediately returns the next reply of the scripted conversation.

``/v1/chat/completions`` is OpenAI's route; ``/inference/v1/generate`` is vLLM's route for token IDs.  Both derive the
turn from the request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from typing import Any

from benchmarks.records import openai_reply
from benchmarks.side import obey

MODEL = "scripted"


def chat_body(turn: int, turns: int) -> dict[str, Any]:
    """Return an answer in the format of OpenAI's API."""
    message = openai_reply(turn, turns)
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {"prompt_tokens": 500, "completion_tokens": 30, "total_tokens": 530},
    }


def generate_body(response_ids: list[int]) -> dict[str, Any]:
    """Return an answer in the format of vLLM's generate route."""
    logprobs = [{"token": f"token_id:{i}", "logprob": -0.5, "top_logprobs": []} for i in response_ids]
    choice = {"index": 0, "token_ids": response_ids, "finish_reason": "stop", "logprobs": {"content": logprobs}}
    return {"request_id": "scripted", "choices": [choice]}


async def serve(turns: int, replies: list[list[int]]) -> None:
    """Serve the scripted replies until the input ends.

    :param turns: Turns of every conversation.
    :param replies: Token IDs of the model's reply at every turn, including the end token.
    """
    from aiohttp import web

    chats = [json.dumps(chat_body(turn, turns))[1:] for turn in range(turns)]
    generations = [json.dumps(generate_body(ids)).encode() for ids in replies]
    sessions: dict[str, int] = {}
    numbers = itertools.count()

    async def chat(request: web.Request) -> web.Response:
        asked = json.loads(await request.read())
        turn = sum(m["role"] == "assistant" for m in asked["messages"])
        text = f'{{"id": "chatcmpl-{next(numbers)}", {chats[turn]}'
        return web.Response(body=text.encode(), content_type="application/json")

    async def generate(request: web.Request) -> web.Response:
        json.loads(await request.read())
        session = request.headers["X-Session-ID"]
        turn = sessions[session] = sessions.get(session, -1) + 1
        return web.Response(body=generations[turn], content_type="application/json")

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    port = runner.addresses[0][1]
    url = f"http://127.0.0.1:{port}"

    async def begin(asked: Any) -> Any:
        return [{"url": f"{url}/v1/chat/completions", "key": f"unused-{i}"} for i in range(asked["episodes"])]

    async def end(asked: Any) -> int:
        sessions.clear()
        return int(asked["calls"])

    await obey({"url": url}, {"begin": begin, "end": end})
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), json.loads(sys.argv[2])))
