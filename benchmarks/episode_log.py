"""Cost of the episode log for a run, its size, and the speed of opening, filtering and reading a large log."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from astuner.contracts.types import (
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
from astuner_record.episode_log import EpisodeLog, EpisodeLogWriter, rewind
from astuner_record.episode_log.store import DATABASE
from benchmarks import models
from benchmarks.report import Report, ms

EPISODES = 100_000
QUICK = 5_000
MOST_SECONDS = 1.0
"""Goal for opening, filtering and jumping, in seconds."""
MOST_SHARE = 0.02
"""Goal for the share of a run's CPU time."""
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
        f"`EpisodeLogWriter` writes a log of {count:,} synthetic episodes of two turns each, {PER_STEP} per step, as "
        "in a run, and `EpisodeLog` reads it. Sizes are for random token IDs and random words, which compress worse "
        "than real text. Wall time for operations that a person waits for, CPU time of the process for the cost to "
        "a run.",
    )
    folder = Path(tempfile.mkdtemp(prefix="episode-log-"))
    try:
        _runs(report, folder, 3 if quick else 70)
        _shapes(report, folder, 20 if quick else 200)
        _large(report, folder / "large", count)
    finally:
        shutil.rmtree(folder)
    return report


def _runs(report: Report, folder: Path, steps: int) -> None:
    models.save(models.make("3M"), folder / "3M")
    long = (
        f"astuner.model.path={folder / '3M'}",
        "astuner.rollout.max_response_length_in_one_turn=400",
        "astuner.rollout.max_model_len=1024",
        "astuner.rollout.num_repeat=4",
        "astuner.trainer_common.algorithm.filter_zero_advantage=false",  # random weights solve nothing
        "astuner.data.max_validation_tasks=8",
    )
    rows: list[tuple[object, ...]] = []
    for name, count, overrides in (
        ("the shipped math agent: 0.13 M weights, 22 generated tokens in an episode", steps, ()),
        ("the same with 3 M random weights, 400 generated tokens", -(-steps // 7), long),
    ):
        found = _run(folder / f"run-{len(rows)}", (*overrides, f"astuner.trainer_common.total_steps={count}"))
        log = found["calls"]
        rows.append(
            (
                name,
                count,
                f"{found['cpu']:.1f}",
                f"{log:.2f}",
                f"{log / found['cpu']:.1%}",
                f"{found['waiting'] / found['wall']:.1%}",
                "reached" if log / found["cpu"] < MOST_SHARE else "MISSED",
            )
        )
    report.heading("Cost for a training run")
    goal = f"goal < {MOST_SHARE:.0%}"
    report.table(("run", "steps", "CPU s", "of that the log", "share", "of the wall time waited", goal), rows)
    report.text(
        "A run of the `local` backbone in a separate process, from start to end with imports and validations. The "
        "log's CPU time is the time spent in the run's calls to the log. These runs are so short that they leave "
        "indexing to readers."
    )


def _run(folder: Path, overrides: tuple[str, ...]) -> dict[str, float]:
    experiment = Path(__file__).parents[1] / "examples" / "math_agent" / "math_agent.yaml"
    command = [sys.executable, "-m", "benchmarks.logged_run", str(experiment), str(folder), *overrides]
    done = subprocess.run(command, cwd=experiment.parents[2], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _shapes(report: Report, folder: Path, count: int) -> None:
    rows = []
    for name, shape in SHAPES.items():
        episodes = [make_episode(random.Random(i), f"g{i // 8}", i % 8, shape) for i in range(count)]
        tokens = sum(shape[0] * (shape[1] + shape[2]) for _ in episodes)
        log = EpisodeLogWriter(folder / name / "episodes")
        log.episode(0, episodes[0])  # the first one pays for imports
        started = time.process_time()
        for episode in episodes:
            log.episode(1, episode)
        seconds = time.process_time() - started
        log.close()
        size = (folder / name / "episodes" / DATABASE).stat().st_size
        rows.append(
            (
                f"{name}: {shape[0]} turns of {shape[2]} + {shape[1]} tokens",
                f"{seconds / count * 1e3:.2f}",
                f"{seconds / tokens * 1e6:.2f}",
                f"{size / tokens:.1f}",
            )
        )
    report.heading("Cost and size")
    report.table(("episode", "CPU ms", "CPU µs per token", "bytes per token"), rows)
    report.text(
        "Before compression, token IDs and logprobs take 8 bytes for a generated token and 4 for any other; the rest "
        "is text. The index for lists and searches is added when the log is read."
    )


def _large(report: Report, run_folder: Path, count: int) -> None:
    log = EpisodeLogWriter(run_folder / "episodes")
    pool = [make_episode(random.Random(i), "g", 0, SHAPES["short"]) for i in range(500)]
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
    for _ in range(6):
        started = time.perf_counter()
        with EpisodeLog(run_folder) as opened:
            opened.list(limit=100)
        times.append(time.perf_counter() - started)
    found.append(("open for the first time, including indexing", times.pop(0)))
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
    measure("its place, best first", lambda log: log.position(middle, order="reward", descending=True))
    measure("all steps", lambda log: log.steps())
    measure("200 groups in the middle", lambda log: log.groups(limit=200, offset=count // 16))
    measure("which values there are", lambda log: log.facets())
    report.heading(f"{count:,} episodes")
    report.table(
        ("what", "ms", f"goal < {MOST_SECONDS:g} s"),
        [(what, ms(seconds), "reached" if seconds < MOST_SECONDS else "MISSED") for what, seconds in found],
    )
    started = time.perf_counter()
    rewind(run_folder / "episodes", count // PER_STEP // 2)
    report.text(f"Removing the second half, as when a run resumes, takes {time.perf_counter() - started:.1f} s.")


def make_episode(rng: random.Random, group: str, attempt: int, shape: tuple[int, int, int]) -> Episode:
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
