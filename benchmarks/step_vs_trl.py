"""A complete GRPO step: `local` against TRL's `GRPOTrainer`."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.local_side import AGENTSCOPE, JUDGE, LocalSteps, StepCount, make_config
from benchmarks.measure import Timings, interleave
from benchmarks.models import make, parameters, save, shipped_folder
from benchmarks.report import Report, goal, ms
from benchmarks.trl_side import SETTINGS, TrlSteps, quiet

MULTI_TURN_TOKENS = 72
"""Tokens after the first prompt: a call (15), its result (15), an answer (5), and a margin for long answers."""
SINGLE_TURN_TOKENS = 48
TOLERANCE = 0.05
"""Allowed relative difference of the sides' sampled token counts, on average over all steps."""
_PLAIN = "benchmarks.agents->CalculatorLoop"
LOCAL, WITH_AGENTSCOPE = "local", "local, AgentScope's agent and the math judge"
VARIANTS: dict[str, dict[str, Any]] = {
    "local, every sample trained": {"workflow": _PLAIN, "skip_zero_advantage": False},
    LOCAL: {"workflow": _PLAIN},
    WITH_AGENTSCOPE: {"workflow": AGENTSCOPE, "judge": JUDGE},
}


def run(*, quick: bool) -> Report:
    repeats = 4 if quick else 24
    report = Report(
        "A GRPO step: `local` against TRL's GRPOTrainer",
        "Same weights, tasks, tools, rewards, optimizer and number of episodes (8 tasks x 8 episodes), one thread, "
        "float32. One process; the sides take turns, one step each, and every number is the median over the steps. "
        "A step includes everything: drawing tasks, generation, tools, rewards, forward, backward, optimizer. The "
        f"learning rate is so small that all sides keep sampling from the same policy. TRL: {SETTINGS}. Goals are "
        "judged by CPU time of the process, which other load affects least.",
    )
    with quiet():
        _multi_turn(report, repeats)
        for name in ("tiny",) if quick else ("tiny", "0.8M"):
            _single_turn(report, name, repeats)
    return report


def multi_turn(repeats: int) -> tuple[dict[str, Timings], dict[str, list[StepCount]]]:
    """Measure steps of the tool agent with TRL and with `VARIANTS`."""
    model = shipped_folder()
    with contextlib.ExitStack() as stack:
        sides: dict[str, Any] = {"TRL": TrlSteps(model, max_completion=MULTI_TURN_TOKENS, tools=True, forced=False)}
        stack.callback(sides["TRL"].close)
        for name, options in VARIANTS.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            sides[name] = LocalSteps(
                make_config(
                    folder, model, max_new_tokens=MULTI_TURN_TOKENS, max_added_tokens=MULTI_TURN_TOKENS, **options
                ),
                folder,
            )
            stack.callback(sides[name].close)
        timings = interleave(sides, repeats=repeats)
        counts = {name: side.counts[-repeats:] for name, side in sides.items()}
    check_tokens(counts, TOLERANCE)
    return timings, counts


def _multi_turn(report: Report, repeats: int) -> None:
    timings, counts = multi_turn(repeats)
    report.heading("A tool agent over two turns")
    report.text(
        "The shipped `tiny-calculator` writes a calculator call, reads the result, and answers. TRL runs it through "
        "`environment_factory`. `local` runs a plain workflow that calls `model_tuner.chat` through the real episode "
        "engine, and, for information, the example's AgentScope agent with the example's judge, for which TRL has no "
        "counterpart. By default `local` skips samples whose advantage is 0, because they carry no gradient; the "
        "first row trains them too, as TRL does."
    )
    _table(report, timings, counts)
    ratio, real = (timings["TRL"].median_cpu / timings[name].median_cpu for name in (LOCAL, WITH_AGENTSCOPE))
    report.text(f"TRL / local: {goal(ratio, 3.5)}; with the real AgentScope agent {goal(real, 2.3)}.")


def _single_turn(report: Report, name: str, repeats: int) -> None:
    with contextlib.ExitStack() as stack:
        model = make(name)
        size = parameters(model)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save(model, folder)
        config = make_config(
            folder,
            folder,
            workflow="benchmarks.agents->OneTurn",
            max_new_tokens=SINGLE_TURN_TOKENS,
            skip_zero_advantage=False,
        )
        sides: dict[str, Any] = {
            "TRL": TrlSteps(str(folder), max_completion=SINGLE_TURN_TOKENS, tools=False, forced=True),
            "local, every sample trained": LocalSteps(config, folder, forced=True),
        }
        for side in sides.values():
            stack.callback(side.close)
        timings = interleave(sides, repeats=repeats)
        counts = {key: side.counts[-repeats:] for key, side in sides.items()}
    check_tokens(counts, 0.0)
    report.heading(f"Single turns of equal length, {size / 1e6:.2f} million random weights")
    report.text(
        f"64 answers of exactly {SINGLE_TURN_TOKENS} tokens each: TRL's best case, because all lengths are equal and "
        "no turn is prefilled twice. `min_new_tokens` keeps TRL generating; `local` runs without an end token. "
        "Random weights write random tokens, so samples share only their prompts."
    )
    _table(report, timings, counts)
    ratio = timings["TRL"].median_cpu / timings["local, every sample trained"].median_cpu
    report.text(f"TRL / local: {goal(ratio, 1.5)}.")


def _table(report: Report, timings: Mapping[str, Timings], counts: Mapping[str, Sequence[StepCount]]) -> None:
    trl = timings["TRL"]
    units = ("prompt_tokens", "added_tokens", "model_tokens")
    rows = []
    for name, times in timings.items():
        steps = counts[name]
        rows.append(
            (
                name,
                ms(times.median_cpu),
                ms(times.min_cpu),
                ms(times.median_wall),
                ms(statistics.median(s.rollout_cpu for s in steps)),
                ms(statistics.median(s.train_cpu for s in steps)),
                f"{trl.median_cpu / times.median_cpu:.2f}x",
                f"{trl.median_wall / times.median_wall:.2f}x",
                *(f"{statistics.fmean(getattr(s, unit) for s in steps):.0f}" for unit in units),
            )
        )
    header = (
        "ms per step",
        "CPU",
        "CPU, best",
        "wall",
        "CPU: rollout",
        "CPU: rest",
        "TRL / it (CPU)",
        "TRL / it (wall)",
        "prompt tokens",
        "tokens after",
        "model's tokens",
    )
    report.table(header, rows)


def check_tokens(counts: Mapping[str, Sequence[StepCount]], tolerance: float) -> None:
    """Check that the sides processed the same amount of tokens.

    :raises RuntimeError: The amounts differ, so the times are not comparable.
    """
    for unit in ("episodes", "model_tokens", "added_tokens"):
        mean = {name: statistics.fmean(getattr(s, unit) for s in steps) for name, steps in counts.items()}
        if max(mean.values()) > min(mean.values()) * (1 + tolerance):
            raise RuntimeError(f"the sides differ in {unit} per step: {mean}; their times are not comparable")
