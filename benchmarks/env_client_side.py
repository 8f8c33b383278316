"""Agents of `env_load`: many concurrent agents, one instance each, over the HTTP routes that both services support."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.side import obey, quiet


async def serve(url: str, token: str, env_type: str, params: str) -> None:
    """Run the agents until the input ends.

    :param params: Parameters of every instance, as JSON.
    """
    import aiohttp

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    numbers = itertools.count(1)
    instances: list[str] = []

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),  # the reference closes idle ones after 5 s
        timeout=aiohttp.ClientTimeout(total=1800),
        headers=headers,
    ) as session:

        async def post(route: str, **body: Any) -> Any:
            """Return ``data`` of the response.

            :raises RuntimeError: The service did not report success.
            """
            async with session.post(f"{url}/{route}", json={"env_type": env_type, **body}) as response:
                text = await response.text()
            if response.status != 200 or not json.loads(text)["success"]:
                raise RuntimeError(f"/{route}: {response.status}: {text[-2000:]}")
            return json.loads(text)["data"]

        async def at_once(times: int, work: Callable[[str], Awaitable[Any]]) -> Any:
            """Let every instance do ``work`` sequentially; return the total time and all latencies in seconds."""
            latencies: list[float] = []

            async def agent(instance_id: str) -> None:
                for _ in range(times):
                    started = time.perf_counter()
                    await work(instance_id)
                    latencies.append(time.perf_counter() - started)

            began = time.perf_counter()
            await asyncio.gather(*(agent(instance_id) for instance_id in instances))
            return {"wall": time.perf_counter() - began, "latencies": latencies}

        async def create(asked: Any) -> Any:
            """Create ``instances`` instances, with the tasks in turn."""
            tasks = itertools.cycle(asked["tasks"])
            plan = {f"bench-{next(numbers)}": next(tasks) for _ in range(asked["instances"])}
            instances[:] = plan

            async def work(instance_id: str) -> None:
                state = (
                    await post("create", task_id=plan[instance_id], instance_id=instance_id, params=json.loads(params))
                )["state"]
                if not state[-1]["content"]:
                    raise RuntimeError("the instance started without an observation")

            return await at_once(1, work)

        async def step(asked: Any) -> Any:
            """Run ``times`` steps with the message ``says``; each observation must contain ``heard``."""

            async def work(instance_id: str) -> None:
                data = await post(
                    "step", instance_id=instance_id, messages={"role": "assistant", "content": asked["says"]}
                )
                if asked["heard"] not in data["state"][-1]["content"]:
                    raise RuntimeError(f"{asked['says']!r} was answered with {data!r}")

            return await at_once(asked["times"], work)

        async def evaluate(asked: Any) -> Any:
            """Run ``times`` evaluations, each of which must report success."""

            async def work(instance_id: str) -> None:
                if (score := await post("evaluate", instance_id=instance_id, params={"sparse": True})) != 1.0:
                    raise RuntimeError(f"{instance_id} has the score {score!r}: the measurement is invalid")

            return await at_once(asked["times"], work)

        async def release(asked: Any) -> Any:
            async def work(instance_id: str) -> None:
                await post("release", instance_id=instance_id)

            found = await at_once(1, work)
            instances.clear()
            return found

        async def tasks(asked: Any) -> Any:
            return await post("get_env_profile", params={"split": "train"})

        commands = {"create": create, "step": step, "evaluate": evaluate, "release": release, "tasks": tasks}
        await obey("ready", commands)


if __name__ == "__main__":
    quiet()
    asyncio.run(serve(*sys.argv[1:]))
