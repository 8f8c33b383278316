"""Run many concurrent agents over HTTP in a separate process and record the latency of each call.

Run as a module, it reads a plan from standard input and writes its measurements to standard output.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.records import TOOLS, first_messages, results
from benchmarks.side import REPOSITORY


@dataclass(frozen=True)
class Talked:
    """Measurements of a round of conversations."""

    latencies: list[float]
    """Seconds of each call."""
    wall: float
    """Seconds for all of them."""
    cpu: float
    """CPU seconds of the clients."""


def talk(episodes: Sequence[Any], *, turns: int, first_number: int) -> Talked:
    """Run one conversation per episode, all concurrently.

    :param episodes: ``url`` and ``key`` of each.
    :param first_number: Number of the first conversation; see `benchmarks.records`.
    :raises RuntimeError: A call failed, or an agent did not make ``turns`` calls.
    """
    plan = json.dumps({"episodes": list(episodes), "turns": turns, "first_number": first_number})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.clients"], input=plan, cwd=REPOSITORY, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the clients failed:\n{done.stderr[-3000:]}")
    return Talked(**json.loads(done.stdout))


async def _all(plan: Any) -> Any:
    import aiohttp

    latencies: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def agent(episode: Any, number: int) -> None:
            messages: list[Any] = [*first_messages(number)]
            headers = {"Authorization": f"Bearer {episode['key']}", "Content-Type": "application/json"}
            for turn in range(plan["turns"]):
                body = json.dumps({"model": "scripted", "messages": messages, "tools": TOOLS}).encode()
                started = time.perf_counter()
                async with session.post(episode["url"], data=body, headers=headers) as response:
                    text = await response.read()
                latencies.append(time.perf_counter() - started)
                if response.status != 200:
                    raise RuntimeError(f"turn {turn + 1}: {response.status}: {text[:1000]!r}")
                message = json.loads(text)["choices"][0]["message"]
                heard = results(message, number, turn)
                if bool(heard) != (turn < plan["turns"] - 1):
                    raise RuntimeError(f"turn {turn + 1} is not the scripted one: {message}")
                messages += [message, *heard]

        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(agent(e, plan["first_number"] + i) for i, e in enumerate(plan["episodes"])))
        return {
            "latencies": latencies,
            "wall": time.perf_counter() - began,
            "cpu": time.process_time() - cpu,
        }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_all(json.loads(sys.stdin.read())))))
