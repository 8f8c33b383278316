"""The run folder's own books: ``metrics.jsonl``, one row per step and per validation, and ``run.log``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astuner.contracts.log_sink import LogSink
from astuner.support.json_lines import append_jsonl


class JsonlSink(LogSink):
    """Appends; each row is written whole and flushed, so a crash loses at most the row being written."""

    essential = True

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        self._metrics = run_dir / "metrics.jsonl"
        self._log = run_dir / "run.log"

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {name: _rounded(value) for name, value in metrics.items()}
        append_jsonl(self._metrics, {"step": step, "time": round(time.time(), 3), **numbers})

    def note(self, text: str) -> None:
        with self._log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def _rounded(value: float) -> float:
    """Nine significant digits: more than float32 holds, and no 0.30000000000000004."""
    return float(f"{value:.9g}")
