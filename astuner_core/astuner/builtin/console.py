"""Log sinks for the console and for the files of the run folder.

The console shows one line per step and, on a terminal, a live status line. All progress goes to stderr; stdout is for
results.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import told
from astuner.contracts.events import Event, RunEnded
from astuner.contracts.log_sink import LogSink
from astuner.contracts.statistics import percent
from astuner.contracts.updated import SOLVED, no_signal
from astuner.rollout.metrics import counted, reward_beside
from astuner.runs.breakpoints import debugging
from astuner.support.json_lines import append_jsonl

if TYPE_CHECKING:
    from rich.status import Status

LINE_SECONDS = 2.0
"""Minimum interval between two lines without a terminal."""
RECENT = 8
"""Number of recent steps used to estimate the remaining time. Earlier steps, such as a warm start, may differ."""
_SHOWN = {"loss": "warm_start/loss", "reward": "reward/mean", "success": "success/mean"}


class ConsoleSink(LogSink):
    """Prints progress to stderr."""

    direct = True

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        self._last_line = time.monotonic()
        self._first_step: int | None = None
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT + 1)
        """Steps and their end times."""
        self._steps_left = ""
        self._missed = False
        self._total = 0
        self._live: Status | None = None
        if sys.stderr.isatty() and not debugging():  # a status line would overwrite pdb's output
            from rich.console import Console

            self._live = Console(stderr=True, highlight=False).status("starting")
            self._live.start()

    def progress(self, step: int, total_steps: int, done: int, total: int, what: str) -> None:
        self._total = total_steps
        if self._live is not None:
            self._live.update(f"step {step}/{total_steps}  {what} {done}/{total} episodes  {self._steps_left}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        if "val/success" in metrics:
            self._print(
                f"step {step:>4}  validation success {metrics['val/success']:.3f} "
                f"[{metrics['val/success_ci_low']:.3f}, {metrics['val/success_ci_high']:.3f}] "
                f"of {counted(metrics)}{reward_beside(metrics)}"
            )
            return
        if self._first_step is None:
            self._first_step = step
        self._recent.append((step, now))
        since, then = self._recent[0]
        if step > since:
            left = (now - then) / (step - since) * (self._total - step)
            self._steps_left = f"{_duration(left)} left"
        nothing = no_signal(metrics)
        first, self._missed = bool(nothing) and not self._missed, self._missed or bool(nothing)
        often = now - self._last_line < LINE_SECONDS and step not in (self._first_step, self._total)
        if self._live is None and often and not first:
            return
        self._last_line = now
        parts = [
            f"step {step:>4}/{self._total}" if self._total else f"step {step:>4}",  # unknown before the first episode
            *(f"{name} {metrics[key]:.3f}" for name, key in _SHOWN.items() if key in metrics),
        ]
        if "throughput/tokens_per_s" in metrics:  # a warm start generates nothing
            parts.append(f"{metrics['throughput/tokens_per_s']:,.0f} tok/s")
        if metrics.get("rollout/errored_frac"):
            parts.append(f"{percent(metrics['rollout/errored_frac'])} of episodes failed")
        if nothing:
            parts.append("solved: every attempt succeeded" if nothing == SOLVED else f"no signal: {nothing}")
        self._print("  ".join([*parts, self._steps_left]))

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _print(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


class JsonlSink(LogSink):
    """Appends to the files of the run folder. Each row is flushed, so a crash loses at most one row."""

    essential = True

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        self._metrics = run_dir / "metrics.jsonl"
        self._log = run_dir / "run.log"

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        # Nine significant digits: more than float32 has, without artifacts such as 0.30000000000000004.
        numbers = {name: float(f"{value:.9g}") for name, value in metrics.items()}
        append_jsonl(self._metrics, {"step": step, "time": round(time.time(), 3), **numbers})

    def note(self, text: str) -> None:
        with self._log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def wants(self, event: Event) -> bool:
        return isinstance(event, RunEnded) or super().wants(event)

    def handle(self, event: Event) -> None:
        if isinstance(event, RunEnded) and event.error is not None:  # the terminal shows it as the last line
            self.note(f"the run stopped: {told(event.error)}")
        super().handle(event)
