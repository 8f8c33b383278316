"""Compare the total time that a plan predicts with the time that the run takes, for ten small experiments.

Each experiment is probed (``astuner run --probe``) and then run. The remaining time is read from the run's JSON events,
and compared with the time that was really left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Report
from benchmarks.trained import REPOSITORY

EXAMPLES = (
    "math_agent", "countdown", "search_documents", "learning_to_ask", "shop_lookup",
    "ticket_triage", "word_problems", "werewolves", "frozen_lake",
)  # fmt: skip
STEPS = 20
WITHIN = 0.3
"""Largest accepted relative error of the predicted total time."""


@dataclass(frozen=True)
class Result:
    """Predicted and actual seconds of one run."""

    name: str
    predicted: float
    low: float
    high: float
    actual: float
    remaining: list[tuple[float, float | None]]
    """Elapsed seconds and estimated remaining seconds of each progress event."""

    @property
    def error(self) -> float:
        return self.predicted / self.actual - 1

    def error_at(self, share: float) -> float:
        """Return the error of elapsed plus remaining time, at the first estimate after a share of the run."""
        later = [(now, left) for now, left in self.remaining if left is not None and now >= share * self.actual]
        now, left = later[0]
        return (now + float(left or 0.0)) / self.actual - 1


def _astuner(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    command = [sys.executable, "-m", "astuner", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment)


def measure(name: str, file: Path, folder: Path, steps: int) -> Result:
    """Probe and run one experiment in ``folder``."""
    common = ["run", str(file), "--backbone", "local", "--steps", str(steps), "--run-dir", str(folder), "--json"]
    common += ["--with", name] if name == "frozen_lake" else []
    estimate = json.loads(_astuner(*common, "--probe").stdout)["estimate"]
    started = time.perf_counter()
    run = _astuner(*common)
    actual = time.perf_counter() - started
    events = [json.loads(line) for line in run.stderr.splitlines() if line.startswith('{"event"')]
    remaining = [(e["elapsed_seconds"], e["remaining_seconds"]) for e in events if e["event"] == "progress"]
    return Result(
        name=name,
        predicted=estimate["seconds"],
        low=estimate["seconds_low"],
        high=estimate["seconds_high"],
        actual=actual,
        remaining=remaining,
    )


def run(*, quick: bool = False) -> Report:
    report = Report(
        "Predicted and actual time of a run",
        f"`astuner run FILE --probe`, then the run with {STEPS} steps, on the `local` backbone. *Error* is the "
        "relative error of the predicted total time; *at 10 %* and *at 50 %* are the errors of elapsed plus remaining "
        "time in the first progress event after that share of the run. *Least* is the smallest remaining time before "
        "the end.",
    )
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        _astuner("new", "experiment", "agent", "--into", temporary)
        files = {name: REPOSITORY / f"examples/{name}/{name}.yaml" for name in EXAMPLES}
        files["new experiment"] = home / "agent" / "agent.yaml"
        for name, file in list(files.items())[: 1 if quick else None]:
            result = measure(name, file, home / name.replace(" ", "_"), 3 if quick else STEPS)
            least = min((left for _, left in result.remaining if left is not None), default=0.0)
            within = f"{result.low:.0f} to {result.high:.0f}"
            errors = [f"{error:+.0%}" for error in (result.error, result.error_at(0.1), result.error_at(0.5))]
            rows.append([name, f"{result.predicted:.0f}", within, f"{result.actual:.0f}", *errors, f"{least:.0f} s"])
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
            report.failed |= abs(result.error) > WITHIN or least <= 0
    report.table(["run", "predicted s", "range s", "actual s", "error", "at 10 %", "at 50 %", "least"], rows)
    return report
