"""Run one conversation with a tool in a separate process, whose Python has one version of AgentScope."""

from __future__ import annotations

import asyncio
import cProfile
import importlib
import itertools
import json
import pstats
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import records, templates
from benchmarks.call_in_process import TEMPLATE
from benchmarks.side import obey, quiet

if TYPE_CHECKING:
    from benchmarks.local_side import LocalSteps

PACKAGES = {
    "AgentScope": ("/agentscope/",),
    "jsonschema": ("/jsonschema/", "/referencing/", "urllib/parse.py", "/attr", "/rpds"),
    "json_repair": ("/json_repair/",),
    "pydantic": ("pydantic",),
    "asyncio": ("/asyncio/",),
}
"""Packages that a profile reports, with parts of the paths and names of their functions."""
_numbers = itertools.count(1)
"""Numbers of the conversations; see `benchmarks.records`."""


class Conversations:
    """The same conversation with and without AgentScope, on a model that answers immediately."""

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
        from astuner.support.collector import leave_out_what_is_loaded
        from benchmarks.instant import agentscope_model

        leave_out_what_is_loaded()  # as `Episodes.make` does for the other parts
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


def profiled(run: Callable[[], object]) -> dict[str, float]:
    """Return CPU seconds by package, their own functions only; a profiler makes everything slower."""
    profile = cProfile.Profile(time.process_time)
    profile.runcall(run)
    stats: Any = pstats.Stats(profile)
    packages: Counter[str] = Counter()
    for place, (_, _, own, _, callers) in stats.stats.items():
        if (package := _package(place)) is not None or not callers:
            packages[package or "other"] += own
        else:  # built-in functions and Python's library count for their callers
            for caller, (_, _, seconds, _) in callers.items():
                packages[_package(caller) or "other"] += seconds
    return dict(packages.most_common())


def _package(place: tuple[str, int, str]) -> str | None:
    path = f"{place[0]}/{place[2]}".replace("\\", "/").lower()
    return next((name for name, parts in PACKAGES.items() if any(part in path for part in parts)), None)


class Side:
    """Answer requests of `benchmarks.agentscope_cost`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._conversations: dict[int, Conversations] = {}
        self._steps: LocalSteps | None = None

    async def measure(self, asked: Mapping[str, Any]) -> float:
        """Return the CPU seconds of ``count`` conversations at once."""
        step = self._prepare(asked)
        started = time.process_time()
        await step()
        return time.process_time() - started

    async def profile(self, asked: Mapping[str, Any]) -> dict[str, float]:
        step = self._prepare(asked)
        return await asyncio.to_thread(profiled, lambda: asyncio.run(step()))

    async def validate(self, asked: Mapping[str, Any]) -> float:
        """Return the CPU seconds of ``count`` checks of a tool call's arguments, as an agent of 2.x makes them."""
        jsonschema: Any = importlib.import_module("jsonschema")  # without types
        schema = records.TOOLS[0]["function"]["parameters"]
        started = time.process_time()
        for turn in range(asked["count"]):
            jsonschema.validate(records.arguments(turn), schema)
        return time.process_time() - started

    async def step(self, _: Mapping[str, Any]) -> dict[str, float]:
        """Return what a GRPO step of the math agent took: CPU seconds and tokens."""
        return await asyncio.to_thread(self._step)

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()

    def _prepare(self, asked: Mapping[str, Any]) -> Callable[[], Coroutine[Any, Any, None]]:
        turns = asked["turns"]
        if turns not in self._conversations:
            self._conversations[turns] = Conversations(turns)
        conversations = self._conversations[turns]
        conversations.forget()

        async def step() -> None:
            await asyncio.gather(*(getattr(conversations, asked["what"])() for _ in range(asked["count"])))

        return step

    def _step(self) -> dict[str, float]:
        from benchmarks.local_side import AGENTSCOPE, JUDGE, LocalSteps, make_config
        from benchmarks.models import shipped_folder

        if self._steps is None:
            config = make_config(
                self._folder,
                shipped_folder(),
                workflow=AGENTSCOPE,
                judge=JUDGE,
                max_new_tokens=40,
                max_added_tokens=100,
            )
            self._steps = LocalSteps(config, self._folder)
        started = time.process_time()
        self._steps()
        count = self._steps.counts[-1]
        taken = time.process_time() - started
        return {"cpu": taken, "rollout": count.rollout_cpu, "train": count.train_cpu, "tokens": count.model_tokens}


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        side = Side(Path(folder))
        commands = {name: getattr(side, name) for name in ("measure", "profile", "validate", "step")}
        await obey(metadata.version("agentscope"), commands)
        side.close()


if __name__ == "__main__":
    quiet()
    asyncio.run(main())
