"""Cost of Python's garbage collector in a training run, with and without excluding objects that are already loaded."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.collected_run import AS_USUAL, LEFT_OUT
from benchmarks.report import Report, ms

EXPERIMENT = Path(__file__).parents[1] / "examples" / "math_agent" / "math_agent.yaml"


def run(*, quick: bool) -> Report:
    steps, repeats = (3, 1) if quick else (40, 3)
    report = Report(
        "Cost of Python's garbage collector",
        f"The math agent with the `local` backbone, {steps} steps, in separate processes that alternate ({repeats} "
        "of each; medians). One uses Python's default, which examines all objects. The other does what `astuner "
        "run` does: it excludes objects loaded before the first episode and collects rarely. CPU time; the longest "
        "pass is wall time, during which all rollouts wait.",
    )
    found: dict[str, list[dict[str, float]]] = {AS_USUAL: [], LEFT_OUT: []}
    for number in range(repeats):
        for how in sorted(found, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory() as folder:
                found[how].append(_run(how, Path(folder), steps))
    median = {how: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for how, runs in found.items()}
    report.table(
        ("run", "CPU s to load", "of that the collector", "CPU s to train", "of that the collector", "longest pass ms"),
        [
            (
                how.replace("-", " "),
                f"{m['loading_cpu']:.1f}",
                f"{m['loading_collector']:.2f}",
                f"{m['cpu']:.1f}",
                f"{m['collector']:.2f}",
                ms(m["longest"]),
            )
            for how, m in median.items()
        ],
    )
    before, after = median[AS_USUAL], median[LEFT_OUT]
    report.text(
        f"Loading takes {after['loading_cpu'] / before['loading_cpu']:.2f}x and training "
        f"{after['cpu'] / before['cpu']:.2f}x of the CPU time with Python's default."
    )
    return report


def _run(how: str, folder: Path, steps: int) -> dict[str, float]:
    overrides = [f"astuner.trainer_common.total_steps={steps}"]
    command = [sys.executable, "-m", "benchmarks.collected_run", how, str(EXPERIMENT), str(folder / "run"), *overrides]
    done = subprocess.run(command, cwd=EXPERIMENT.parents[2], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result
