"""One conversation with a tool in a process of its own, whose Python has one version of AgentScope."""

from __future__ import annotations

import asyncio
import cProfile
import itertools
import json
import pstats
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

from benchmarks import records, templates
from benchmarks.call_in_process import TEMPLATE
from benchmarks.side import obey, quiet

PLAIN, ALONE, AGENT, MADE = "plain", "alone", "agent", "made"
PACKAGES = ("agentscope", "pydantic", "astuner", "asyncio", "jinja2", "tokenizers", "transformers")
"""Packages that a profile reports separately."""
_numbers = itertools.count(1)
"""Of conversations; see `benchmarks.records`."""


class Conversations:
    """The same conversation with and without AgentScope, around a model that answers at once."""

    def __init__(self, turns: int) -> None:
        from benchmarks.episodes import Episodes, ScriptedEngine, replies

        tokenizer = templates.tokenizer(TEMPLATE)
        self._engine = ScriptedEngine(replies(tokenizer, turns))
        self._episodes = Episodes(tokenizer, self._engine)
        self._turns = turns

    async def plain(self) -> None:
        """Run a workflow that calls `ModelTuner.chat` itself."""
        from benchmarks.episodes import converse

        tuner, recorder = self._episodes.make()

        async def ask(messages: Any) -> Any:
            return (await tuner.chat(messages, records.TOOLS[:1])).message

        await converse(ask, next(_numbers))
        self._finish(tuner, recorder)

    async def agent(self) -> None:
        """Run AgentScope's agent with the model in training."""
        tuner, recorder = self._episodes.make()
        number = next(_numbers)
        answer = await self._make_agent(tuner, number).reply(_question(number))
        self._finish(tuner, recorder)
        _check(answer)

    async def alone(self) -> None:
        """Run AgentScope's agent with a model that only returns prepared replies."""
        from benchmarks.instant import agentscope_model

        number = next(_numbers)
        agent = self._make_agent(agentscope_model(self._replies()), number)
        _check(await agent.reply(_question(number)))

    async def made(self) -> None:
        """Make AgentScope's agent and its tools."""
        self._make_agent(self._episodes.make()[0], next(_numbers))

    def forget(self) -> None:
        self._engine.forget()

    def _make_agent(self, model: Any, number: int) -> Any:
        from astuner_agentscope import make_tool_agent

        turns = itertools.count()

        def search(query: str, limit: int = 10) -> str:
            """Search the records and return the lines that match, oldest first.

            Args:
                query (str): Words that a line must hold.
                limit (int): Lines to return.
            """
            return records.result(number, next(turns))

        max_iters = self._turns + 1
        return make_tool_agent(model, name="clerk", system_prompt=records.SYSTEM, tools=[search], max_iters=max_iters)

    def _replies(self) -> Iterator[tuple[str, str] | str]:
        for turn in range(self._turns - 1):
            yield "search", json.dumps(records.arguments(turn))
        yield records.ANSWER

    def _finish(self, tuner: Any, recorder: Any) -> None:
        tuner.close()
        begun = sum(turn.continues is None for turn in recorder.turns)
        if len(recorder.turns) != self._turns or begun != 1:
            raise RuntimeError(f"{len(recorder.turns)} calls in {begun} branches instead of {self._turns} calls in one")


def _question(number: int) -> str:
    return str(records.first_messages(number)[1]["content"])


def _check(answer: str) -> None:
    if answer != records.ANSWER:
        raise RuntimeError(f"the agent answered {answer!r} instead of {records.ANSWER!r}")


def profiled(run: Callable[[], None]) -> dict[str, Any]:
    """Return CPU seconds by package and by function; a profiler makes everything slower."""
    profile = cProfile.Profile(time.process_time)
    profile.runcall(run)
    stats: Any = pstats.Stats(profile)
    packages: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for (file, _, function), (_, _, own, total, _) in stats.stats.items():
        path = file.replace("\\", "/")
        package = next((name for name in PACKAGES if f"/{name}" in path or f"{name}." in function), "other")
        packages[package] += own
        if package != "other":
            functions[f"{'/'.join(path.split('/')[-2:])} {function}"] = total
    return {"packages": packages.most_common(), "functions": functions.most_common(60)}


async def main() -> None:
    quiet()
    conversations: dict[int, Conversations] = {}

    def prepare(asked: Mapping[str, Any]) -> Callable[[], Awaitable[object]]:
        turns = asked["turns"]
        made = conversations.setdefault(turns, Conversations(turns) if turns not in conversations else None)  # type: ignore[arg-type]
        made.forget()
        run: Callable[[], Awaitable[None]] = getattr(made, asked["what"])

        async def step() -> None:
            await asyncio.gather(*(run() for _ in range(asked["count"])))

        return step

    async def measure(asked: Mapping[str, Any]) -> float:
        """CPU seconds of ``count`` conversations at once."""
        step = prepare(asked)
        started = time.process_time()
        await step()
        return time.process_time() - started

    async def profile(asked: Mapping[str, Any]) -> dict[str, Any]:
        def run() -> None:
            asyncio.run(prepare(asked)())  # type: ignore[arg-type]

        return await asyncio.to_thread(profiled, run)

    await obey(metadata.version("agentscope"), {"measure": measure, "profile": profile})


if __name__ == "__main__":
    asyncio.run(main())
