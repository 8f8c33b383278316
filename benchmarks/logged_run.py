"""Run a training run in a separate process and measure the cost of its episode log.

Usage: ``python -m benchmarks.logged_run …``. CPU time is counted inside the calls to the log.  Other load on the
machine changes this number little, but it does change the difference between runs with and without a log.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from astuner import run
from astuner.support.collector import collect_rarely
from astuner_record.episode_log import EpisodeLogWriter

_CALLS = ("__init__", "episode", "credit", "close")


class _Spent:
    """Time spent in the log's code."""

    def __init__(self) -> None:
        self.calls = 0.0
        """CPU seconds."""
        self.waiting = 0.0
        """Wall seconds."""

    def watch(self) -> None:
        for name in _CALLS:
            setattr(EpisodeLogWriter, name, self._called(getattr(EpisodeLogWriter, name)))

    def _called(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*arguments: Any, **options: Any) -> Any:
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.calls += time.thread_time() - cpu
                self.waiting += time.perf_counter() - wall

        return timed


def main(experiment: str, folder: str, *overrides: str) -> None:
    """Run the experiment and print the measurements as JSON."""
    spent = _Spent()
    spent.watch()
    collect_rarely()  # as `astuner run` does
    started = time.perf_counter()
    run(experiment, [f"astuner.experiment_dir={folder}", *overrides], backbone="local", resume="never")
    episodes = next(Path(folder).glob("*/episodes"))
    found = {
        "cpu": time.process_time(),
        "wall": time.perf_counter() - started,
        "calls": spent.calls,
        "waiting": spent.waiting,
        "bytes": sum(p.stat().st_size for p in episodes.glob("*.sqlite*")),
        "pandas": "pandas" in sys.modules,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
