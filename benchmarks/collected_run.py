"""Run a training run in a separate process and measure the cost of Python's garbage collector.

``python -m benchmarks.collected_run as-usual|left-out EXPERIMENT FOLDER [OVERRIDE ...]`` prints the result as JSON.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from typing import Any

from astuner.rollout import runner
from astuner.runs import launch
from astuner.support.collector import collect_rarely

AS_USUAL, LEFT_OUT = "as-usual", "left-out"


class _Passes:
    """CPU seconds of all garbage collections, and wall time of the longest; all threads wait during a collection."""

    def __init__(self) -> None:
        self.cpu = self.longest = 0.0
        self._began: dict[int, tuple[float, float]] = {}
        gc.callbacks.append(self._called)

    def _called(self, phase: str, info: object) -> None:
        thread = threading.get_ident()
        if phase == "start":
            self._began[thread] = time.thread_time(), time.perf_counter()
        else:
            cpu, wall = self._began.pop(thread)
            self.cpu += time.thread_time() - cpu
            self.longest = max(self.longest, time.perf_counter() - wall)


def main(how: str, experiment: str, folder: str, *overrides: str) -> None:
    """Run the experiment and print its cost, up to the first episode and after it."""
    started = passes = _Passes()
    loading: dict[str, float] = {}
    running: Any = runner  # where an episode finds it
    leave_out = running.leave_out_what_is_loaded

    def first_episode() -> None:
        nonlocal passes
        if not loading:
            loading.update(loading_cpu=time.process_time(), loading_collector=started.cpu)
            passes = _Passes()
        if how == LEFT_OUT:
            leave_out()

    running.leave_out_what_is_loaded = first_episode
    if how == LEFT_OUT:
        collect_rarely()
    launch.run(experiment, [f"astuner.experiment_dir={folder}", *overrides], backbone="local", resume="never")
    cpu = time.process_time() - loading["loading_cpu"]
    print(json.dumps({**loading, "cpu": cpu, "collector": passes.cpu, "longest": passes.longest}))


if __name__ == "__main__":
    main(*sys.argv[1:])
