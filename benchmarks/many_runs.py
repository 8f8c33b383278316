"""Ten runs of 100,000 episodes each in `astuner view`: how long users wait to compare, filter and open them."""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlencode, urlsplit

from astuner import load_config
from astuner.contracts.types import Episode, JudgeOutput, Split
from astuner_record.episode_log import EpisodeLogWriter
from benchmarks.episode_log import MOST_SECONDS, PER_STEP, SHAPES, make_episode
from benchmarks.report import Report, ms

RUNS, EPISODES, QUICK = 10, 100_000, 2_000
TASKS, EVERY = 256, 100
"""Tasks of a validation, and steps between two validations."""
METRICS = 60
"""Numbers in each line of ``metrics.jsonl``."""
TIMES = 5
Seconds: TypeAlias = tuple[float, float]
"""Wall seconds, and CPU seconds of the server."""
EXAMPLE = Path(__file__).parents[1] / "examples" / "math_agent" / "math_agent.yaml"


def run(*, quick: bool) -> Report:
    count = QUICK if quick else EPISODES
    report = Report(
        "Ten large runs in the viewer",
        f"`astuner view` serves {RUNS} runs of {count:,} synthetic episodes each: two settings with five seeds, "
        f"{PER_STEP} episodes per step, a validation of {TASKS} tasks every {EVERY} steps, and {METRICS} metrics. "
        "The requests go over its HTTP API, as the page sends them. Wall time of a complete response, and in "
        "brackets the CPU time of the server, which is less if the machine has other work. The logs of a setting's "
        "seeds are copies of one log.",
    )
    root = Path(tempfile.mkdtemp(prefix="many-runs-"))
    try:
        names = [f"run-{i}" for i in range(RUNS)]
        for i, name in enumerate(names):
            _make(root / name, i, count)
        found = _measure(root, names)
        size = sum(p.stat().st_size for p in root.rglob("*") if p.is_file())
    finally:
        shutil.rmtree(root)
    goal = f"goal < {MOST_SECONDS:g} s"
    report.table(
        ("what", "first ms", "later ms", goal),
        [
            (what, *(f"{ms(wall)} ({ms(cpu)})" for wall, cpu in both), _reached(max(wall for wall, _ in both)))
            for what, *both in found
        ],
    )
    report.text(
        "*First* is the first request to a fresh server, which opens logs and reads settings; *later* is the median "
        f"of {TIMES} more requests. The files are in the system's cache, because they were just written. The runs "
        f"take {size / 2**30:.1f} GiB."
    )
    return report


def _reached(seconds: float) -> str:
    return "reached" if seconds < MOST_SECONDS else "MISSED"


def _make(folder: Path, number: int, count: int) -> None:
    """Write a run; even and odd runs have different settings."""
    overrides = [
        f"astuner.experiment_dir={folder.parent}",
        f"astuner.experiment_name={folder.name}",
        f"astuner.seed={number}",
        f"astuner.trainer_common.optim.lr={(1e-5, 2e-5)[number % 2]}",
    ]
    config = load_config(EXAMPLE, overrides, backbone="local")
    folder.mkdir()
    (folder / "resolved.yaml").write_text(config.dump_yaml(), encoding="utf-8")
    (folder / "summary.json").write_text("{}", encoding="utf-8")
    if number > 1:  # of another seed
        shutil.copytree(folder.with_name(f"run-{number % 2}") / "episodes", folder / "episodes")
        shutil.copy(folder.with_name(f"run-{number % 2}") / "metrics.jsonl", folder)
        return
    rng = random.Random(number)
    pool = [make_episode(random.Random(i), "g", 0, SHAPES["short"]) for i in range(500)]
    log, left, step = EpisodeLogWriter(folder / "episodes"), count, 0
    lines = []
    while left > 0:
        step += 1
        for i in range(min(PER_STEP, left)):
            log.episode(step, _of_group(pool[(step * PER_STEP + i) % 500], f"g{step}-{i // 8}", i % 8))
        left -= PER_STEP
        row = {"step": step, "time": float(step), "reward/mean": rng.random(), "loss": rng.random()}
        lines.append(row | {f"metric/{i}": rng.random() for i in range(METRICS - 2)})
        if left > 0 and (step % EVERY == 0 or left <= TASKS):
            solved = [rng.random() < 0.4 + 0.2 * (number % 2) for _ in range(TASKS)]
            for i, one in enumerate(solved):
                # the question is the task's, whichever run
                made = _of_group(pool[i], f"v{step}-{i}", 0, split=Split.VALIDATION, task_id=f"task-{i}")
                log.episode(step, replace(made, verdict=JudgeOutput(reward=float(one))))
            left -= TASKS
            lines.append({"step": step, "time": float(step), "val/success": sum(solved) / TASKS})
    log.close()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")


def _of_group(
    one: Episode, group: str, attempt: int, split: Split = Split.TRAIN, task_id: str | None = None
) -> Episode:
    task = one.workflow_task
    new = replace(
        task,
        episode_id=f"{group}-{attempt}",
        group_id=group,
        attempt=attempt,
        split=split,
        task=replace(task.task, task_id=task_id or group),
    )
    return replace(one, workflow_task=new)


def _measure(root: Path, names: Sequence[str]) -> list[tuple[str, Seconds, Seconds]]:
    """Return each request's name with the times of the first request and later ones."""
    metrics = ["reward/mean", "loss", "val/success", *(f"metric/{i}" for i in range(12))]
    sides = [("ab"[i % 2], name) for i, name in enumerate(names)]
    asked: dict[str, Sequence[str]] = {
        "list the runs": ["/api/runs"],
        "compare all ten: settings, curves of 15 metrics with bands": [
            _path("compare", [*(("run", name) for name in names), *(("metric", name) for name in metrics)])
        ],
        f"compare two runs on {TASKS} tasks": [_path("compare/tasks", sides[:2])],
        f"compare five seeds with five, on {TASKS} tasks": [_path("compare/tasks", sides)],
        "open a run (the slowest)": [_path(f"runs/{name}", []) for name in names],
        "filter: reward>=0.5, best first (the slowest)": [
            _path(f"runs/{name}/episodes", [("where", "reward>=0.5"), ("order", "reward"), ("desc", "1")])
            for name in names
        ],
        "filter: text~apple river, step>=10 (the slowest)": [
            _path(f"runs/{name}/episodes", [("where", "text~apple river"), ("where", "step>=10")]) for name in names
        ],
        "open an episode, with its tokens (the slowest)": [
            _path(f"runs/{name}/episodes/g9-3-1/tokens", []) for name in names
        ],
    }
    found = []
    for what, paths in asked.items():
        with _serving(root) as (port, pid):
            first = max(_seconds(port, pid, path) for path in paths)
            later = max(sorted(_seconds(port, pid, path) for _ in range(TIMES))[TIMES // 2] for path in paths)
        found.append((what, first, later))
    return found


def _path(what: str, asked: Sequence[tuple[str, str]]) -> str:
    return f"/api/{what}?{urlencode(asked)}"


def _seconds(port: int, pid: int, path: str) -> Seconds:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        started, used = time.perf_counter(), _cpu(pid)
        connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        said = answer.read()
        taken = time.perf_counter() - started
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path} answered {answer.status}: {said[:500]!r}")
    return taken, _cpu(pid) - used


def _cpu(pid: int) -> float:
    """Return the CPU seconds of a process, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _serving(root: Path) -> Iterator[tuple[int, int]]:
    """Start a viewer and yield its port and process ID."""
    command = [sys.executable, "-m", "astuner", "view", "--root", str(root), "--port", "0", "--no-browser", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            said = ""
            while not said.rstrip().endswith("}"):
                line = process.stdout.readline() if process.stdout else ""
                if not line:
                    raise RuntimeError(f"{' '.join(command)} ended with {process.wait()}")
                said += line
            yield urlsplit(json.loads(said)["url"]).port or 0, process.pid
        finally:
            process.terminate()
            process.wait(30)
