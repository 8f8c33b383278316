"""Cost of a model call when the model is free: the shares of the episode engine and of AgentScope."""

from __future__ import annotations

import asyncio
import gc
import itertools
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from astuner import RunDir, Task, WorkflowTask, make_codec
from astuner.plugins.user_code import import_user_code
from astuner.rollout.models import one_model
from astuner.runs.run import TrainingRun
from astuner.runs.tasks import read_tasks
from benchmarks.agents import problems
from benchmarks.instant import InstantEngine, StampedAgent, instant_agentscope_model
from benchmarks.local_side import AGENTSCOPE, JUDGE, make_config
from benchmarks.measure import interleave
from benchmarks.models import shipped_folder
from benchmarks.report import Report, us

GROUPS, GROUP_SIZE = 8, 8
EPISODES = GROUPS * GROUP_SIZE
MORE_TURNS = 10
LONG = 60
"""Turns of the long conversation."""


def run(*, quick: bool) -> Report:
    report = Report(
        "Overhead of the episode engine per model call",
        "The model is an engine that immediately returns prepared token IDs. Everything else is real: drawing "
        "tasks, pool, runner, chat codec with the shipped tokenizer and template, tool calls, recorder, checks, "
        "judge, splitting episodes into samples. CPU time of one process, in turns, medians.",
    )
    _episodes(report, repeats=3 if quick else 15)
    _long_conversation(report, repeats=2 if quick else 9)
    return report


class _Rollouts:
    """Steps of episodes on an engine that answers immediately."""

    def __init__(
        self, stack: ExitStack, *, turns: int, groups: int = GROUPS, group_size: int = GROUP_SIZE, **options: Any
    ):
        from transformers import AutoTokenizer

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = make_config(
            folder, shipped_folder(), groups=groups, group_size=group_size, max_new_tokens=100, **options
        )
        run_dir = RunDir(folder / "run")
        run_dir.start()
        self._experiment = TrainingRun(config, run_dir, read_tasks(config))
        stack.callback(self._experiment.close)
        self._tokenizer = AutoTokenizer.from_pretrained(config.locate_model())
        self._codec = make_codec(config, self._tokenizer)
        self._turns = turns
        self._numbers = itertools.count(1)

    def __call__(self) -> None:
        engine = InstantEngine(self._tokenizer, self._turns)
        rollout = self._experiment.rollout(one_model(engine, self._codec), next(self._numbers))
        calls = {len(e.turns) for group in rollout.groups for e in group.episodes}
        if calls != {self._turns}:
            raise RuntimeError(
                f"episodes made {calls} model calls instead of {self._turns}: the measurement is invalid"
            )


def _episodes(report: Report, *, repeats: int) -> None:
    plain = "benchmarks.instant->PlainAgent"
    with ExitStack() as stack:
        sides: dict[str, Callable[[], object]] = {
            "plain, 1 turn": _Rollouts(stack, turns=1, workflow=plain),
            "plain, 2 turns": _Rollouts(stack, turns=2, workflow=plain),
            f"plain, {MORE_TURNS} turns": _Rollouts(stack, turns=MORE_TURNS, workflow=plain),
            "AgentScope and the math judge": _Rollouts(stack, turns=2, workflow=AGENTSCOPE, judge=JUDGE),
            "AgentScope alone": _agentscope_alone(stack),
        }
        turns = dict(zip(sides, (1, 2, MORE_TURNS, 2, 2), strict=True))
        times = {name: t.median_cpu / EPISODES for name, t in interleave(sides, repeats=repeats).items()}
    report.heading(f"{EPISODES} episodes at once")
    report.table(
        ("agent", "turns", "µs per episode", "µs per call"),
        [(name, turns[name], us(t), us(t / turns[name])) for name, t in times.items()],
    )
    more = (times[f"plain, {MORE_TURNS} turns"] - times["plain, 1 turn"]) / (MORE_TURNS - 1)
    both, alone = times["AgentScope and the math judge"], times["AgentScope alone"]
    report.text(
        f"An episode costs {us(times['plain, 1 turn'] - more)} µs and each of its model calls {us(more)} µs "
        "(including the agent's calculator). *AgentScope alone* is the same agent without ASTuner, with a model "
        f"class that answers immediately: it takes {us(alone / 2)} of the {us(both / 2)} µs of a call of the real "
        f"agent ({alone / both:.0%})."
    )


def _agentscope_alone(stack: ExitStack) -> Callable[[], object]:
    """Return a function that runs 64 of the example's agents concurrently, on a model without ASTuner."""
    workflow = import_user_code(AGENTSCOPE)
    questions = [question for question, _ in problems(EPISODES)]
    loop = asyncio.new_event_loop()
    stack.callback(loop.close)

    async def step() -> None:
        tasks = [
            WorkflowTask(task=Task(task_id=q, main_query=q), episode_id=str(i), group_id=str(i))
            for i, q in enumerate(questions)
        ]
        await asyncio.gather(*(workflow().execute(task, instant_agentscope_model()) for task in tasks))

    return lambda: loop.run_until_complete(step())


def _long_conversation(report: Report, *, repeats: int) -> None:
    with ExitStack() as stack:
        rollouts = _Rollouts(stack, turns=LONG, groups=1, group_size=1, workflow="benchmarks.instant->StampedAgent")
        found = []
        for number in range(repeats + 1):
            StampedAgent.stamps.clear()
            gc.collect()
            rollouts()
            stamps = StampedAgent.stamps
            if number:  # the first one warms up
                found.append([after - before for before, after in itertools.pairwise(stamps)])
    per_turn = [statistics.median(turn) for turn in zip(*found, strict=True)]
    stretches = [(0, 1), (1, 10), (10, 20), (30, 40), (50, LONG - 1)]
    report.heading(f"One conversation of {LONG} turns")
    report.table(
        ("turns", *(f"{a + 1}–{b}" if b > a + 1 else str(b) for a, b in stretches)),
        [("µs per turn", *(us(statistics.fmean(per_turn[a:b])) for a, b in stretches))],
    )
    early, late = statistics.fmean(per_turn[1:10]), statistics.fmean(per_turn[50:])
    report.text(
        f"Turns 51–{LONG - 1} cost {late / early:.2f}x of turns 2–10. A turn encodes only new messages. The remaining "
        "growth comes from copying and comparing the token IDs of the history, because the engine gets all of them."
    )
