"""Log sinks for the console and for the files of the run folder.

The console shows one line per step and, on a terminal, a live progress bar. All progress goes to stderr; stdout is for
results.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import told
from astuner.contracts.events import Event, Measured, Progressed, RunEnded
from astuner.contracts.log_sink import LogSink
from astuner.contracts.statistics import percent
from astuner.contracts.updated import SOLVED, no_signal
from astuner.rollout.metrics import counted, reward_beside
from astuner.runs.breakpoints import debugging
from astuner.runs.clock import duration_text
from astuner.runs.run_dir import RunDir
from astuner.support.json_lines import append_jsonl

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_SECONDS = 2.0
"""Minimum interval between two lines without a terminal."""
PHASE_LINE_SECONDS = 60.0
"""Minimum time since the last line before a new phase gets a line, without a terminal."""
PROGRESS_SECONDS = 1.0
"""Minimum interval between two progress rows of the same phase, in ``progress.json`` and in JSON output."""
JSON_EVENTS: ContextVar[bool] = ContextVar("JSON_EVENTS", default=False)
"""Whether the console prints JSON Lines instead of text, if stderr is not a terminal (``astuner run --json``)."""
_SHOWN = {"loss": "warm_start/loss", "reward": "reward/mean", "success": "success/mean"}
_UNITS = {
    "rollout": "episodes",
    "groups": "groups",
    "update": "samples",
    "validation": "episodes",
    "warm start": "steps",
}


class ConsoleSink(LogSink):
    """Prints progress to stderr."""

    direct = True

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        self._last_line = time.monotonic()
        self._first_step: int | None = None
        self._now = Progressed(step=0, total_steps=0, what="starting")
        self._due: float | None = None
        """Estimated end of the run, from `time.monotonic`."""
        self._missed = False
        self._rows = Throttle()
        self._live: Progress | None = None
        self._as_json = JSON_EVENTS.get() and not sys.stderr.isatty()
        if sys.stderr.isatty() and not debugging():  # a progress bar would overwrite pdb's output
            self._live = _live_bar(self)
            self._live.start()

    def handle(self, event: Event) -> None:
        if isinstance(event, (Progressed, Measured)):
            self._due = None if event.remaining is None else time.monotonic() + event.remaining
        super().handle(event)

    @property
    def remaining(self) -> str:
        """Text of the remaining time, or an empty string."""
        return "" if self._due is None else f"{duration_text(max(self._due - time.monotonic(), 1.0))} left"

    def progress(self, progress: Progressed) -> None:
        is_new = (progress.what, progress.step) != (self._now.what, self._now.step)
        self._now = progress
        if self._live is not None:
            (bar,) = self._live.tasks
            bar.total = progress.total or None
            self._live.update(bar.id, description=_phase_text(progress), completed=progress.done)
        elif self._as_json:
            if self._rows.is_due(is_new=is_new):
                self._print_row("progress", progress.as_dict())
        elif is_new and time.monotonic() - self._last_line >= PHASE_LINE_SECONDS:
            self._last_line = time.monotonic()
            self._print("  ".join(filter(None, [_phase_text(progress), self.remaining])))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._as_json:
            row = {"step": step, "metrics": dict(metrics)}
            self._print_row("validation" if "val/success" in metrics else "step", row)
            return
        if "val/success" in metrics:
            self._print(
                f"step {step:>4}  validation success {metrics['val/success']:.3f} "
                f"[{metrics['val/success_ci_low']:.3f}, {metrics['val/success_ci_high']:.3f}] "
                f"of {counted(metrics)}{reward_beside(metrics)}"
            )
            return
        if self._first_step is None:
            self._first_step = step
        now, total = time.monotonic(), self._now.total_steps
        nothing = no_signal(metrics)
        first, self._missed = bool(nothing) and not self._missed, self._missed or bool(nothing)
        often = now - self._last_line < LINE_SECONDS and step not in (self._first_step, total)
        if self._live is None and often and not first:
            return
        self._last_line = now
        parts = [
            f"step {step:>4}/{total}" if total else f"step {step:>4}",
            *(f"{name} {metrics[key]:.3f}" for name, key in _SHOWN.items() if key in metrics),
        ]
        if "throughput/tokens_per_s" in metrics:  # a warm start generates nothing
            parts.append(f"generated {metrics['throughput/tokens_per_s']:,.0f} tokens/s")
        if metrics.get("rollout/errored_frac"):
            parts.append(f"{percent(metrics['rollout/errored_frac'])} of episodes failed")
        if nothing:
            parts.append("solved: every attempt succeeded" if nothing == SOLVED else f"no signal: {nothing}")
        self._print("  ".join(filter(None, [*parts, self.remaining])))

    def note(self, text: str) -> None:
        if self._as_json:
            self._print_row("note", {"text": text})
        else:
            self._print(text)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _print_row(self, event: str, row: Mapping[str, Any]) -> None:
        print(json.dumps({"event": event, **row}, ensure_ascii=False), file=sys.stderr, flush=True)

    def _print(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)


def _phase_text(progress: Progressed) -> str:
    """Return step and phase, such as ``step 3/12  rollout``."""
    step = f"step {progress.step}/{progress.total_steps}  " if progress.total_steps and progress.step else ""
    return f"{step}{'rollout' if progress.what == 'groups' else progress.what}"


def _live_bar(sink: ConsoleSink) -> Progress:
    """Return a progress bar of the current phase that counts down the remaining time of the run."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class Remaining(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(sink.remaining)

    class Count(ProgressColumn):
        def render(self, task: Task) -> Text:
            unit = _UNITS.get(sink._now.what, "")
            return Text(f"{task.completed:.0f}/{task.total:.0f} {unit}" if task.total else "")

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), Count(), Remaining())
    bar = Progress(*columns, console=Console(stderr=True, highlight=False), transient=True, refresh_per_second=2)
    bar.add_task("starting", total=None)
    return bar


class Throttle:
    """Limit of progress rows to one per `PROGRESS_SECONDS` and phase."""

    def __init__(self) -> None:
        self._last = -PROGRESS_SECONDS

    def is_due(self, *, is_new: bool) -> bool:
        """Return whether to write a row now.

        :param is_new: Whether the phase has just started.
        """
        now = time.monotonic()
        if not is_new and now - self._last < PROGRESS_SECONDS:
            return False
        self._last = now
        return True


class JsonlSink(LogSink):
    """Appends to the files of the run folder. Each row is flushed, so a crash loses at most one row."""

    essential = True

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        self._metrics = run_dir / "metrics.jsonl"
        self._log = run_dir / "run.log"
        self._progress = run_dir / "progress.json"
        self._now = Progressed(step=0, total_steps=0, what="")
        self._opened = time.monotonic()
        self._rows = Throttle()
        self._is_finished = False

    def progress(self, progress: Progressed) -> None:
        is_new = (progress.what, progress.step) != (self._now.what, self._now.step)
        self._now, self._opened = progress, time.monotonic() - progress.elapsed
        if self._rows.is_due(is_new=is_new):
            self._write_progress(progress)

    def close(self) -> None:
        ending = {"what": "finished", "remaining": 0.0} if self._is_finished else {"what": "stopped", "remaining": None}
        self._write_progress(replace(self._now, elapsed=time.monotonic() - self._opened, **ending))

    def _write_progress(self, progress: Progressed) -> None:
        row = {"time": round(time.time(), 3), **progress.as_dict()}
        with suppress(OSError):  # the next metrics report a full disk
            RunDir.write_atomically(self._progress, json.dumps(row) + "\n")

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
        if isinstance(event, RunEnded):
            self._is_finished = event.error is None
            if event.error is not None:  # the terminal shows it as the last line
                self.note(f"the run stopped: {told(event.error)}")
        super().handle(event)
