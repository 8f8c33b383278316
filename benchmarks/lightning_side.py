"""Serve Agent Lightning's LLM proxy (LiteLLM with its middleware and callbacks), in its own environment.

It uses its default middleware and callbacks and its in-memory store for spans, in the process; see `call_overhead` for
the comparison.
"""

from __future__ import annotations

import asyncio
import os
import sys
from importlib import metadata
from typing import Any

from benchmarks.side import obey, quiet


async def serve(upstream: str) -> None:
    """Serve Agent Lightning's proxy until the input ends.

    :param upstream: URL of the inference server that the proxy calls.
    """
    from agentlightning.llm_proxy import LLMProxy
    from agentlightning.store.memory import InMemoryLightningStore
    from opentelemetry import trace

    store = InMemoryLightningStore(thread_safe=True)
    model = {
        "model_name": "scripted",
        "litellm_params": {"model": "hosted_vllm/scripted", "api_base": f"{upstream}/v1", "api_key": "unused"},
    }
    proxy = LLMProxy(model_list=[model], store=store, host="127.0.0.1", launch_mode="thread")
    await proxy.start()
    running: list[Any] = []

    async def begin(asked: Any) -> Any:
        running.extend([await store.start_rollout(input={}) for _ in range(asked["episodes"])])
        resources = [proxy.as_resource(r.rollout_id, r.attempt.attempt_id) for r in running]
        return [{"url": f"{llm.endpoint}/v1/chat/completions", "key": "unused"} for llm in resources]

    async def settle(asked: Any) -> None:
        """Wait for spans that are exported in the background, because their cost belongs to the calls."""
        await asyncio.sleep(1.0)
        await asyncio.to_thread(trace.get_tracer_provider().force_flush)  # type: ignore[attr-defined]

    async def end(asked: Any) -> int:
        recorded = 0
        for rollout in running:
            spans = await store.query_spans(rollout.rollout_id)
            recorded += len({span.trace_id for span in spans})
        running.clear()
        return recorded

    versions = {name: metadata.version(name) for name in ("agentlightning", "litellm")}
    await obey(versions, {"begin": begin, "settle": settle, "end": end})
    await proxy.stop()


if __name__ == "__main__":
    quiet()
    # Newer LiteLLMs do not start without a master key, which Agent Lightning does not set; this one is on loopback.
    os.environ["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched
    asyncio.run(serve(sys.argv[1]))
