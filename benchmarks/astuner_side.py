"""Serve ASTuner's endpoint in a separate process, with an engine that answers immediately.

The engine runs in the same process, like the `local` backbone's, or behind HTTP, like vLLM for the other backbones.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from astuner import Generation, InferenceEngine
from astuner.contracts.types import FinishReason, SamplingParams
from astuner_gateway.endpoint import Endpoint
from benchmarks.episodes import Episodes, ScriptedEngine
from benchmarks.side import obey


class HttpEngine(InferenceEngine):
    """Engine that sends token IDs to vLLM's generate route and reads token IDs back.

    :param url: URL of the server.
    """

    max_model_len = 1 << 20

    def __init__(self, url: str) -> None:
        import aiohttp

        self._url = f"{url}/inference/v1/generate"
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        asked = {
            "model": "scripted",
            "token_ids": list(prompt_ids),
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_tokens": sampling.max_tokens,
                "stop_token_ids": list(sampling.stop_token_ids),
                "logprobs": 1,
            },
        }
        async with self._http.post(
            self._url,
            data=json.dumps(asked).encode(),
            headers={"Content-Type": "application/json", "X-Session-ID": session},
        ) as response:
            response.raise_for_status()
            choice = json.loads(await response.read())["choices"][0]
        return Generation(
            prompt_ids=prompt_ids,
            response_ids=choice["token_ids"],
            logprobs=tuple(entry["logprob"] for entry in choice["logprobs"]["content"]),
            finish_reason=FinishReason.STOP,
            policy_version=0,
        )

    async def close(self) -> None:
        await self._http.close()


async def serve(folder: str, replies: Sequence[Sequence[int]], upstream: str) -> None:
    """Serve the endpoint until the input ends.

    :param folder: Folder of the tokenizer.
    :param replies: Replies of the engine in the process.
    :param upstream: URL of an engine over HTTP to use instead, or an empty string.
    """
    from transformers import AutoTokenizer

    engine = HttpEngine(upstream) if upstream else ScriptedEngine(replies)
    episodes, endpoint = Episodes(AutoTokenizer.from_pretrained(folder), engine), Endpoint()
    endpoint.open(asyncio.get_running_loop())
    running: list[Any] = []

    async def begin(asked: Any) -> Any:
        running.extend(episodes.make(endpoint=lambda: endpoint) for _ in range(asked["episodes"]))
        found = [tuner.base_url_and_key() for tuner, _ in running]
        return [{"url": f"{access.base_url}/chat/completions", "key": access.api_key} for access in found]

    async def end(asked: Any) -> int:
        recorded = 0
        for tuner, recorder in running:
            tuner.close()
            endpoint.revoke(tuner)
            recorded += len(recorder.turns)
            if sum(turn.continues is None for turn in recorder.turns) != 1:
                raise RuntimeError(f"branches: {[turn.branch_reason for turn in recorder.turns]}")
        running.clear()
        return recorded

    await obey({}, {"begin": begin, "end": end})
    await endpoint.close()
    if isinstance(engine, HttpEngine):
        await engine.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]))
