"""Cost of a call of the Python tool: a warm sandbox, compared with starting an interpreter for every call."""

from __future__ import annotations

import asyncio
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from astuner_sandbox import CodeResult, PythonSandbox, SandboxLimits
from benchmarks.measure import Timings, interleave
from benchmarks.report import Report, goal, ms

AT_ONCE, CALLS = 8, 64
LEAST_RATIO = 1.0
"""Goal: a confined run costs at most as much as starting an unconfined interpreter."""
SCRIPTS = {
    "`print(6 * 7)`": "print(6 * 7)",
    "with five imports": (
        "import datetime, fractions, json, random, statistics\n"
        "print(json.dumps([statistics.mean([41, 43]), str(fractions.Fraction(42, 1))]))"
    ),
}


def run(*, quick: bool) -> Report:
    report = Report(
        "Cost of a call of the Python tool",
        "One script from the request to its answer, in wall time, because the work is in other processes. The "
        "sandbox forks a process from a warm one, drops its privileges, runs the script and removes its folder. "
        "`python -I -c` is the minimum cost of a fresh interpreter, without any confinement. AgentScope 2's `Bash` "
        "tool, which starts `python -c`, is the way in which an AgentScope agent runs code.",
    )
    with PythonSandbox(SandboxLimits(parallel=AT_ONCE), require=True) as sandbox:
        _one_after_another(report, sandbox, repeats=3 if quick else 100)
        _at_once(report, sandbox, repeats=1 if quick else 9)
        report.text(f"The system's level: {sandbox.level}.")
    return report


def _one_after_another(report: Report, sandbox: PythonSandbox, *, repeats: int) -> None:
    report.heading("One after another")
    cells, ratios = [], []
    for name, code in SCRIPTS.items():
        times = interleave(_sides(sandbox, code), repeats=repeats)
        ours = times["sandbox"].median_wall
        cells += [(name, side, *_quantiles(taken), f"{taken.median_wall / ours:.1f}x") for side, taken in times.items()]
        ratios.append(times["python -I -c"].median_wall / ours)
    report.table(("script", "side", "median ms", "10 %", "90 %", "of the sandbox's"), cells)
    report.text(f"A bare interpreter's start against a run in the sandbox: {goal(min(ratios), LEAST_RATIO)}.")


def _at_once(report: Report, sandbox: PythonSandbox, *, repeats: int) -> None:
    """Measure the same with several concurrent callers."""
    code = next(iter(SCRIPTS.values()))

    def all_of_them(one: Callable[[], object]) -> Callable[[], object]:
        return lambda: list(pool.map(lambda _: one(), range(CALLS)))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        sides = {name: all_of_them(side) for name, side in _sides(sandbox, code).items() if name != "AgentScope's tool"}
        times = interleave(sides, repeats=repeats, warm_up=1)
    report.heading(f"{AT_ONCE} at once")
    report.table(
        ("side", "runs/s", "least", "most"),
        [
            (name, f"{CALLS / t.median_wall:.0f}", f"{CALLS / max(t.wall):.0f}", f"{CALLS / min(t.wall):.0f}")
            for name, t in times.items()
        ],
    )


def _sides(sandbox: PythonSandbox, code: str) -> dict[str, Callable[[], object]]:
    expected = _fresh(code)

    def in_the_sandbox() -> None:
        result: CodeResult = sandbox.run(code, 60)
        if (result.stdout, result.returncode) != (expected, 0):
            raise RuntimeError(f"unexpected result: {result}")

    def agentscopes() -> None:
        if expected not in asyncio.run(_agentscopes(code)):
            raise RuntimeError("unexpected result of AgentScope's tool")

    return {"sandbox": in_the_sandbox, "python -I -c": lambda: _fresh(code), "AgentScope's tool": agentscopes}


def _fresh(code: str) -> str:
    command = [sys.executable, "-I", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout


async def _agentscopes(code: str) -> str:
    from agentscope.tool import Bash

    chunks: Any = Bash().call(shlex.join([sys.executable, "-c", code]), timeout=60_000)  # milliseconds
    return "".join([block.text async for chunk in chunks for block in chunk.content])


def _quantiles(taken: Timings) -> tuple[str, str, str]:
    tenths = statistics.quantiles(taken.wall, n=10)
    return ms(taken.median_wall), ms(tenths[0]), ms(tenths[-1])
