"""Serve the interception server of `verifiers`, in its own environment; see `call_overhead` for the comparison.

Rollouts are registered as in its `Rollout`, without a harness: the agents are the benchmark's.  The client ``eval``
forwards messages to an OpenAI server; ``train`` renders them to token IDs and calls vLLM's generate route.
"""

from __future__ import annotations

import asyncio
import os
import sys
from importlib import metadata
from typing import Any

from benchmarks.side import obey, quiet


async def serve(client: str, upstream: str, tokenizer: str) -> None:
    """Serve verifiers' interception server until the input ends.

    :param client: ``eval`` or ``train``.
    :param upstream: URL of the inference server that it calls.
    :param tokenizer: Folder of the tokenizer that ``train`` renders with.
    """
    from renderers.configs import Qwen3RendererConfig
    from verifiers.v1.clients import EvalClientConfig, ModelContext, TrainClientConfig
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.interception.server import InterceptionServer
    from verifiers.v1.session import RolloutSession
    from verifiers.v1.task import TaskData
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    config: Any
    url = f"{upstream}/v1"
    if client == "eval":
        config = EvalClientConfig(base_url=url, api_key_var="BENCHMARK_KEY")
    else:
        config = TrainClientConfig(
            base_url=url, api_key_var="BENCHMARK_KEY", renderer=Qwen3RendererConfig(), renderer_model_name=tokenizer
        )
    context = ModelContext(model="scripted", client=config)
    server = InterceptionServer()
    await server.start()
    running: list[Any] = []

    async def begin(asked: Any) -> Any:
        found = []
        for number in range(asked["episodes"]):
            trace = Trace(
                task=TraceTask(type="Scripted", data=TaskData(idx=number)), agent=AgentInfo(config=AgentConfig())
            )
            session = RolloutSession(ctx=context, trace=trace)
            secrets = server.register(session)
            running.append((session, secrets))
            found.append({"url": f"{server.base_url}/v1/chat/completions", "key": secrets[0]})
        return found

    async def end(asked: Any) -> int:
        recorded = 0
        for session, secrets in running:
            recorded += len(session.trace.calls)
            if errors := [call.error for call in session.trace.calls if call.error]:
                raise RuntimeError(f"verifiers recorded an error: {errors[0]}")
            server.unregister(*secrets)
        running.clear()
        return recorded

    versions = {name: metadata.version(name) for name in ("verifiers", "renderers")}
    await obey(versions, {"begin": begin, "end": end})
    await server.stop()


if __name__ == "__main__":
    quiet()
    os.environ["BENCHMARK_KEY"] = "unused"
    asyncio.run(serve(*sys.argv[1:]))
