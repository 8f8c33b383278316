"""Estimate a run's total time and cost from an earlier run of the same experiment, and measure them with a probe.

A probe trains one to three steps in a folder next to the run folder, and stops early if they take long.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from astuner.contracts.errors import RunError
from astuner.contracts.events import Event, Progressed, StepEnded, Subscriber
from astuner.contracts.interrupt import Interrupt
from astuner.runs.clock import Schedule, Timing, duration_text, timing_of
from astuner.runs.resuming import changed_keys, is_listed
from astuner.runs.run_dir import RunDir

if TYPE_CHECKING:
    from astuner.config import Config

PROBE_SECONDS = 60.0
"""A probe starts no further step after this time."""
PROBE_STEPS = 3
PROBE_VALIDATION_TASKS = 64
"""Fewer tasks form smaller batches, whose time per task is longer."""
_UNCERTAINTY = 0.2
"""Least relative half-width of the range; steps get longer or shorter as the model learns."""


def probe_folder(folder: Path) -> Path:
    """Return the folder of a probe, which never touches the run's folder."""
    return folder.with_name(f"{folder.name}.probe")


def is_probe(folder: Path) -> bool:
    """Return whether a run folder belongs to a probe."""
    return folder.suffix == ".probe"


def earlier_timing(run_dir: RunDir, config: Config, schedule: Schedule) -> Timing | None:
    """Return the durations of the newest earlier run or probe with the same model, episodes and update, or None."""
    candidates = [folder for folder in _earlier_folders(run_dir.path) if folder.metrics.is_file()]
    for folder in sorted(candidates, key=lambda folder: folder.metrics.stat().st_mtime, reverse=True):
        try:
            if any(is_listed(key.name, "determines_time") for key in changed_keys(folder, config)):
                continue
            rows = folder.read_metrics()
        except (RunError, OSError, ValueError):  # damaged
            continue
        timing = timing_of(rows, schedule, elapsed=_elapsed(folder), source=folder.path.name)
        if timing.steps:
            return timing
    return None


def _earlier_folders(path: Path) -> Iterator[RunDir]:
    yield RunDir(path)
    yield RunDir(probe_folder(path))
    for moved in path.parent.glob(f"{path.name}.2*"):  # `RunDir.start` adds the date
        yield RunDir(moved)


def _elapsed(folder: RunDir) -> float:
    """Return the duration of the run's last process, or 0.0 if it is unknown."""
    try:
        return float(json.loads(folder.progress.read_text(encoding="utf-8"))["elapsed_seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def estimate(timing: Timing, schedule: Schedule) -> dict[str, float]:
    """Return the expected seconds of a complete run, their range, and the cost of helper models."""
    seconds = timing.total(schedule)
    return {
        "seconds": seconds,
        "seconds_low": min(timing.total(schedule, step=timing.fastest), (1 - _UNCERTAINTY) * seconds),
        "seconds_high": max(timing.total(schedule, step=timing.slowest), (1 + _UNCERTAINTY) * seconds),
        "cost": timing.total_cost(schedule),
    }


def time_plan(timing: Timing | None, schedule: Schedule, *, probe_command: str) -> dict[str, str]:
    """Return the plan's lines about total time and cost.

    :param probe_command: Command that measures the time.
    """
    if timing is None:
        return {"time": f"unknown before the first step; to measure it in one to three steps: {probe_command}"}
    total = estimate(timing, schedule)
    seconds, low, high = (duration_text(total[name]) for name in ("seconds", "seconds_low", "seconds_high"))
    step = timing.rollout + timing.update
    parts = [f"{schedule.steps} steps of {step:.1f} s ({timing.rollout:.1f} s rollout, {timing.update:.1f} s update)"]
    if count := schedule.all_validations:
        parts.append(f"{count} validations of {timing.validation:.1f} s")
    measured = f"measured in {timing.steps} step{'s' * (timing.steps > 1)} of {timing.source}"
    lines = {"time": f"about {seconds} ({low} to {high}): {', '.join(parts)}; {measured}"}
    if total["cost"]:
        lines["cost"] = f"about {total['cost']:,.2f} for helper models, {measured}"
    return lines


class ProbeEnd(Subscriber):
    """Stops a probe after enough steps."""

    direct = True

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self._steps, self._elapsed = 0, 0.0
        self.is_reached = False
        """Whether the probe has enough steps, and stopped itself."""

    def handle(self, event: Event) -> None:
        if isinstance(event, Progressed):
            self._elapsed = event.elapsed
        elif isinstance(event, StepEnded) and "time/rollout" in event.metrics:  # not a warm start
            self._steps += 1
        is_enough = self._steps >= PROBE_STEPS or (self._steps and self._elapsed > PROBE_SECONDS)
        if is_enough and not self.is_reached:
            self.is_reached = True
            self._interrupt.request()
