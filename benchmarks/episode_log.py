"""What the episode log costs a run, how large it is, and how fast a large one is opened, filtered and jumped into."""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from astuner.episode_log import EpisodeLog, EpisodeLogWriter, rewind
from astuner.episode_log.index import INDEX
from astuner.types import (
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    StopReason,
    Task,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)
from benchmarks.report import Report, ms

EPISODES = 100_000
QUICK = 5_000
MOST_SECONDS = 1.0
"""To open, filter or jump."""
PER_STEP = 64
SHAPES = {"short": (2, 15, 25), "tools": (6, 80, 120), "long": (40, 300, 400)}
"""Turns, tokens of each reply, new prompt tokens of each turn."""
_WORDS = (
    "the", "of", "to", "and", "a", "in", "is", "it", "that", "for", "box", "water", "apple", "river", "green", "seven",
    "light", "stone", "answer", "number", "tool",
)  # fmt: skip


def run(*, quick: bool) -> Report:
    count = QUICK if quick else EPISODES
    report = Report(
        "The episode log",
        f"A log of {count:,} synthetic episodes, {PER_STEP} in a step, of two turns each, is written by "
        "`EpisodeLogWriter` as a run does it, with its index, and read with `EpisodeLog`. Sizes are of random token "
        "ids and random words, which compress worse than a model's. Wall time for what a person waits for, CPU time of "
        "the whole process for what a run pays.",
    )
    folder = Path(tempfile.mkdtemp(prefix="episode-log-"))
    try:
        _shapes(report, folder, 20 if quick else 200)
        _large(report, folder / "large", count)
    finally:
        shutil.rmtree(folder)
    return report


def _shapes(report: Report, folder: Path, count: int) -> None:
    rows = []
    for name, shape in SHAPES.items():
        episodes = [_episode(random.Random(i), f"g{i // 8}", i % 8, shape) for i in range(count)]
        tokens = sum(shape[0] * (shape[1] + shape[2]) for _ in episodes)
        log = EpisodeLogWriter(folder / name / "episodes", print)
        log.episode(0, episodes[0])
        log.flush()  # the first one pays for imports
        started = time.process_time()
        for episode in episodes:
            log.episode(1, episode)
        log.close()
        seconds = time.process_time() - started
        size = sum(p.stat().st_size for p in (folder / name / "episodes").glob("*.arrows"))
        index = (folder / name / "episodes" / INDEX).stat().st_size
        rows.append(
            (
                f"{name}: {shape[0]} turns of {shape[2]} + {shape[1]} tokens",
                ms(seconds / count),
                f"{seconds / tokens * 1e6:.2f}",
                f"{size / tokens:.1f}",
                f"{index / tokens:.1f}",
            )
        )
    report.heading("Cost and size")
    report.table(("episode", "CPU ms", "CPU µs per token", "bytes per token", "index bytes per token"), rows)
    report.text("Token ids and logprobs are 8 bytes for a generated token and 4 for another; the rest is text.")


def _large(report: Report, run_folder: Path, count: int) -> None:
    log = EpisodeLogWriter(run_folder / "episodes", print)
    pool = [_episode(random.Random(i), "g", 0, SHAPES["short"]) for i in range(500)]
    for i in range(count):
        one = pool[i % len(pool)]
        task = replace(one.workflow_task, episode_id=f"g{i // 8}-{i % 8}", group_id=f"g{i // 8}", attempt=i % 8)
        log.episode(i // PER_STEP, replace(one, workflow_task=task))
    log.close()
    middle = f"g{count // 16}-0"
    found: list[tuple[str, float]] = []

    def measure(what: str, do: Callable[[EpisodeLog], Any]) -> None:
        times = []
        for _ in range(5):
            with EpisodeLog(run_folder) as log:
                started = time.perf_counter()
                do(log)
                times.append(time.perf_counter() - started)
        found.append((what, statistics.median(times)))

    times = []
    for _ in range(5):
        started = time.perf_counter()
        with EpisodeLog(run_folder) as log:
            log.list(limit=100)
        times.append(time.perf_counter() - started)
    found.append(("open, first 100 episodes", statistics.median(times)))
    measure("last 100 episodes", lambda log: log.list(descending=True, limit=100))
    measure("scroll to the middle", lambda log: log.list(offset=count // 2, limit=100))
    measure(
        "reward>=0.5, best first", lambda log: log.list(["reward>=0.5"], order="reward", descending=True, limit=100)
    )
    measure("agent=default, tool!=search: how many", lambda log: log.count(["agent=default", "tool!=search"]))
    measure("text~'apple river': how many", lambda log: log.count(["text~apple river"]))
    measure("text~'apple river' in step>=10", lambda log: log.list(["text~apple river", "step>=10"], limit=100))
    measure("jump to an episode, with its tokens", lambda log: log.read(middle).episode)
    report.heading(f"{count:,} episodes")
    report.table(
        ("what", "ms", f"goal < {MOST_SECONDS:g} s"),
        [(what, ms(seconds), "reached" if seconds < MOST_SECONDS else "MISSED") for what, seconds in found],
    )
    (run_folder / "episodes" / INDEX).unlink()
    started = time.perf_counter()
    EpisodeLog(run_folder).close()
    again = time.perf_counter() - started
    started = time.perf_counter()
    rewind(run_folder / "episodes", count // PER_STEP // 2)
    report.text(
        f"Making the index again takes {again:.1f} s; forgetting the second half, as for a run that is resumed, "
        f"{time.perf_counter() - started:.1f} s."
    )


def _episode(rng: random.Random, group: str, attempt: int, shape: tuple[int, int, int]) -> Episode:
    turns, said, new = shape
    made: list[Turn] = []
    prompt: tuple[int, ...] = ()
    for index in range(turns):
        prompt += tuple(rng.randrange(150_000) for _ in range(new))
        reply = tuple(rng.randrange(150_000) for _ in range(said))
        generation = Generation(
            prompt_ids=prompt,
            response_ids=reply,
            logprobs=tuple(-rng.random() for _ in reply),
            finish_reason=FinishReason.STOP,
            policy_version=0,
        )
        made.append(
            Turn(
                index=index,
                agent="default",
                generation=generation,
                continues=index - 1 if index else None,
                request=({"role": "user", "content": _text(rng, new)},),
                message={"role": "assistant", "content": _text(rng, said)},
            )
        )
        prompt += reply
    reward = rng.random()
    return Episode(
        workflow_task=WorkflowTask(
            task=Task(task_id=group, main_query=_text(rng, 10)), episode_id=f"{group}-{attempt}", group_id=group,
            attempt=attempt,
        ),
        turns=tuple(made),
        output=WorkflowOutput(reward=reward),
        verdict=JudgeOutput(reward=reward),
        stop_reason=StopReason.COMPLETED,
    )  # fmt: skip


def _text(rng: random.Random, tokens: int) -> str:
    return " ".join(rng.choices(_WORDS, k=tokens))
