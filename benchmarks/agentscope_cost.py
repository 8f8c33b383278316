"""Cost of AgentScope 2.x and 1.x per model call, per episode and per step, and ASTuner's share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measure import interleave
from benchmarks.report import Report, us
from benchmarks.side import REPOSITORY, Side

PYTHON_1 = "ASTUNER_BENCHMARK_AGENTSCOPE_1"
"""Environment variable with the Python of an environment with AgentScope 1.x."""
TURNS = (2, 10, 40)
AT_ONCE = {2: 32, 10: 16, 40: 4}
"""Turns of a conversation -> number of concurrent conversations."""
PARTS = ("plain", "alone", "agent")
WARM_UP = 1
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(*, quick: bool) -> Report:
    report = Report(
        "The cost of AgentScope",
        "The same conversation in processes with AgentScope 2.x and 1.x: a tool call per turn, at the end an answer. "
        "The model returns prepared tokens; chat template, tool calls, recorder and checks are real. CPU time of one "
        "process, minimum over the repetitions; the processes and parts take turns. The machine was busy if its load "
        "below is above its cores: then compare within a table only, and repeat the command on a quiet machine "
        "(`.venv/bin/python -m benchmarks agentscope_cost --write`) for figures to quote.",
    )
    with ExitStack() as stack:
        sides = {}
        for python in (Path(sys.executable), _python_1()):
            side = Side(python, "benchmarks.agentscope_side", **ONE_THREAD)
            stack.callback(side.close)
            sides[str(side.started)] = side
        newer, older = sides
        _conversations(report, sides, repeats=2 if quick else 5)
        _profile(report, newer, sides[newer], count=4 if quick else 16)
        _step(report, newer, older, sides, repeats=2 if quick else 6)
    return report


def _python_1() -> Path:
    """Return the Python of the environment with AgentScope 1.x.

    :raises SystemExit: The environment does not exist.
    """
    python = Path(os.environ.get(PYTHON_1, REPOSITORY / ".venv-agentscope-1.0.21" / "bin" / "python"))
    if not python.exists():
        raise SystemExit(
            f"{python} does not exist. Set {PYTHON_1} to the Python of an environment with AgentScope 1.x."
        )
    return python


def measured(asks: Mapping[str, Callable[[], Any]], *, repeats: int) -> dict[str, list[Any]]:
    """Return what each side reports, in turns, without the warm-up."""
    answers: dict[str, list[Any]] = {name: [] for name in asks}

    def record(name: str) -> Callable[[], None]:
        return lambda: answers[name].append(asks[name]())

    interleave({name: record(name) for name in asks}, repeats=repeats, warm_up=WARM_UP)
    return {name: values[WARM_UP:] for name, values in answers.items()}


def _ask(side: Side, what: str, turns: int, count: int) -> Callable[[], float]:
    return lambda: float(side.ask("measure", what=what, turns=turns, count=count)) / count


def _conversations(report: Report, sides: Mapping[str, Side], *, repeats: int) -> None:
    asks: dict[str, Callable[[], float]] = {}
    for version, side in sides.items():
        for turns in TURNS:
            asks |= {f"{version} {turns} {part}": _ask(side, part, turns, AT_ONCE[turns]) for part in PARTS}
        asks[f"{version} made"] = _ask(side, "made", TURNS[0], 16)
    best = {name: min(seconds) for name, seconds in measured(asks, repeats=repeats).items()}
    rows = []
    for turns in TURNS:
        for version in sides:
            plain, alone, agent = (best[f"{version} {turns} {part}"] for part in PARTS)
            split = (us(seconds / turns) for seconds in (agent, alone, plain, agent - alone - plain))
            rows.append((f"{version}, {turns} turns", f"{agent * 1e3:.1f}", f"{plain * 1e3:.1f}", *split))
    report.heading("Model calls")
    header = ("AgentScope", "agent, ms per episode", "plain workflow, ms per episode", "agent, µs per call")
    report.table((*header, "of that AgentScope", "of that `model_tuner.chat`", "the rest"), rows)
    report.text(
        "*AgentScope* is the same agent with a model class that returns prepared blocks. *`model_tuner.chat`* is a "
        "plain workflow with the same messages. *The rest* is ASTuner's adapter, plus the extra cost of alternating "
        "between the two: comparing messages in AgentScope's form, and cold processor caches. Formatting messages "
        "counts as *AgentScope* for 1.x, where the agent does it, and as *the rest* for 2.x, where the model does "
        "it. It takes about 1 µs per block of the complete history at each call. The adapter caches nothing between "
        "calls, because 2.x collects all turns of a reply in one message and changes its blocks in place. If *the "
        "rest* is negative, it is smaller than the error of the three figures that it is computed from."
    )
    report.text(
        "Making an agent with one tool takes "
        + " and ".join(f"{best[f'{version} made'] * 1e3:.2f} ms with {version}" for version in sides)
        + ". It is part of each episode above. Agents can share the tools: see `examples/math_agent/workflow.py`."
    )


def _profile(report: Report, version: str, side: Side, *, count: int) -> None:
    checks = 50
    each = min(side.ask("validate", count=checks) for _ in range(7)) / checks
    packages = side.ask("profile", what="alone", turns=TURNS[1], count=count)
    whole = sum(packages.values())
    report.heading(f"Where AgentScope {version} spends the time")
    report.table(
        ("own functions of", "share of an episode"), [(name, f"{own / whole:.0%}") for name, own in packages.items()]
    )
    report.text(
        f"The agent without ASTuner, {TURNS[1]} turns, by `cProfile`, which exaggerates small functions. At each tool "
        "call AgentScope calls `jsonschema.validate`, which checks the tool's schema against JSON Schema's own schema "
        f"before it checks the arguments: {us(each)} µs per call of this tool, measured without a profiler."
    )


def _step(report: Report, newer: str, older: str, sides: Mapping[str, Side], *, repeats: int) -> None:
    asks: dict[str, Callable[[], Any]] = {name: lambda side=side: side.ask("step") for name, side in sides.items()}
    steps = measured(asks, repeats=repeats)
    rows = []
    for version, taken in steps.items():
        best = {key: min(step[key] for step in taken) for key in ("cpu", "rollout", "train")}
        tokens = sum(step["tokens"] for step in taken) / len(taken)
        rows.append((version, *(f"{best[key] * 1e3:.0f}" for key in ("cpu", "rollout", "train")), f"{tokens:.0f}"))
    ratio = min(s["cpu"] for s in steps[newer]) / min(s["cpu"] for s in steps[older])
    report.heading("A GRPO step of the math agent")
    report.table(("AgentScope", "CPU ms per step", "rollout", "training", "tokens generated"), rows)
    report.text(
        f"`examples/math_agent` for each version with the `local` backbone, 64 episodes, sampled: token counts differ. "
        f"A step with {newer} takes {ratio:.2f}x the CPU time of one with {older}."
    )
