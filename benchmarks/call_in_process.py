"""CPU time that the core adds to a model call in process."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks import records, templates
from benchmarks.call_overhead import AT_ONCE, TURNS, _goal
from benchmarks.episodes import Episodes, ScriptedEngine, converse, replies
from benchmarks.measure import interleave
from benchmarks.report import Report, us

TEMPLATE, MORE_TURNS = "qwen3", 32
MOST_IN_PROCESS = 0.4
"""Goal in milliseconds of CPU per call."""
_numbers = itertools.count(1)
"""Numbers of the conversations; see `benchmarks.records`."""


def run(*, quick: bool) -> Report:
    report = Report(
        "CPU time per model call in the process",
        f"{AT_ONCE} concurrent agents, each with a conversation of {TURNS} turns: tool calls of about 30 tokens, "
        "results of about 80, and an answer at the end. The model answers immediately. Messages, chat template, "
        "tool calls, recorder and checks are real; all conversations differ. The vocabulary is a byte-level BPE "
        "trained on this repository's text. Garbage is collected as in a run ([collector.md](collector.md)).",
    )
    _in_process(report, repeats=1 if quick else 7)
    return report


def _in_process(report: Report, *, repeats: int) -> None:
    rows = [(name, TURNS) for name in templates.NAMES] + [(TEMPLATE, MORE_TURNS)]
    with ExitStack() as stack:
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        sides: dict[str, Callable[[], object]] = {}
        for name, turns in rows:
            sides[f"{name} {turns}"] = chats(loop, name, turns)
            sides[f"alone {name} {turns}"] = _alone(loop, name, turns)
        times = interleave(sides, repeats=repeats, warm_up=1)
    report.heading("In process: `ModelTuner.chat`")
    cells, added = [], []
    for name, turns in rows:
        calls = AT_ONCE * turns
        whole, alone = times[f"{name} {turns}"].cpu, times[f"alone {name} {turns}"].median_cpu / calls
        each = [seconds / calls - alone for seconds in whole]
        added.append(statistics.median(each))
        spread = f"{us(min(each))}–{us(max(each))}"
        cells.append((name, turns, us(statistics.median(whole) / calls), us(alone), us(added[-1]), spread))
    report.table(("template", "turns", "µs per call", "agent and engine alone", "the core adds", "spread"), cells)
    report.text(
        "*Agent and engine alone* is the same agent on the same engine without ASTuner, measured in turns. The core "
        "adds encoding, budget, parsing of the reply, recording, checks and the episode's objects: at most "
        f"{_goal(max(added) * 1e3, MOST_IN_PROCESS)}."
    )


def chats(loop: asyncio.AbstractEventLoop, name: str, turns: int) -> Callable[[], object]:
    """Run all conversations once, through model tuners."""
    tokenizer = templates.tokenizer(name)
    engine = ScriptedEngine(replies(tokenizer, turns))
    episodes = Episodes(tokenizer, engine)

    async def agent() -> int:
        tuner, recorder = episodes.make()

        async def ask(messages: Sequence[Any]) -> Any:
            return (await tuner.chat(messages, records.TOOLS)).message

        calls = await converse(ask, next(_numbers))
        tuner.close()
        if calls != turns or sum(turn.continues is None for turn in recorder.turns) != 1:
            raise RuntimeError(
                f"{calls} calls instead of {turns}, or a call that started a branch: the measurement is invalid"
            )
        return calls

    async def step() -> None:
        engine.forget()
        await asyncio.gather(*(agent() for _ in range(AT_ONCE)))

    return lambda: loop.run_until_complete(step())


def _alone(loop: asyncio.AbstractEventLoop, name: str, turns: int) -> Callable[[], object]:
    """Return a function that runs the same agents on the same engine, without ASTuner between them."""
    from astuner.contracts.types import SamplingParams

    engine = ScriptedEngine(replies(templates.tokenizer(name), turns))
    said, sampling, prompt = (
        [records.openai_reply(turn, turns) for turn in range(turns)],
        SamplingParams(max_tokens=1),
        (1, 2, 3),
    )

    async def agent() -> int:
        session, waiting = str(next(_numbers)), iter(said)

        async def ask(messages: Sequence[Any]) -> Any:
            await engine.generate(prompt, sampling, session=session)
            return next(waiting)

        return await converse(ask, next(_numbers))

    async def step() -> None:
        engine.forget()
        await asyncio.gather(*(agent() for _ in range(AT_ONCE)))

    return lambda: loop.run_until_complete(step())
