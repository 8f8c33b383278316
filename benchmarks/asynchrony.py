"""Gain of rollouts that do not wait for training: Trinity's synchronization styles on the same experiment.

Run it in Trinity's environment: ``.venv-trinity/bin/python -m benchmarks asynchrony``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from statistics import mean, median

from benchmarks.report import Report
from benchmarks.trained import REPOSITORY, Command, Condition, Trained, draw, train_all

EXPERIMENT = REPOSITORY / "examples/math_agent/math_agent.yaml"
SECONDS = 4.0
"""Mean wait of an episode in seconds; see `benchmarks.slow_math_agent`."""
SYNCHRONOUS = "synchronous"
STYLES: Mapping[str, tuple[str, ...]] = {
    SYNCHRONOUS: (),
    "one step off": ("trinity.synchronizer.sync_offset=1",),
    "fully asynchronous, staleness at most 2": (
        "trinity.synchronizer.sync_style=fully_async",
        "trinity.algorithm.sample_strategy_args.max_staleness=2",
    ),
}
SEEDS = (10, 11, 12)
GROUPS = 8
POINTS = 6
"""Points of a learning curve, each the mean of the same number of steps."""


def run(*, quick: bool) -> Report:
    os.environ.setdefault("TRINITY_PLATFORM", "cpu")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a tiny model, in several processes
    os.environ["SLOW_MATH_AGENT_SECONDS"] = str(SECONDS)
    steps, tasks = (6, 16) if quick else (24, 256)
    arguments = (
        *(str(EXPERIMENT), "--backbone", "trinity"),
        f"astuner.rollout.workflow={REPOSITORY / 'benchmarks/slow_math_agent.py'}->SlowMathAgent",
        f"astuner.data.train_batch_size={GROUPS}",
        f"trinity.explorer.runner_per_model={GROUPS}",  # all groups of a step wait at the same time
        f"astuner.trainer_common.total_steps={steps}",
        "astuner.trainer_common.optim.lr=5.0e-3",
        f"astuner.trainer_common.test_freq={steps}",
        f"astuner.data.max_validation_tasks={tasks}",
    )
    found: dict[str, list[Trained]] = {}
    for seed in SEEDS[:1] if quick else SEEDS:  # outermost: whatever else the machine did fell on all styles
        styles = {style: Condition(overrides, (seed,)) for style, overrides in STYLES.items()}
        for style, runs in train_all(styles, Command(arguments, tasks)).items():
            found.setdefault(style, []).extend(runs)
    report = Report(
        "Rollouts that do not wait for training, on Trinity",
        "`astuner run examples/math_agent/math_agent.yaml --backbone trinity` in three synchronization styles, with "
        f"larger updates than the example, so that {steps} steps show learning. The agent waits {SECONDS:g} s on "
        "average before it begins a training task (0.5 to 1.5 times that, by episode), to simulate tools, browsers "
        "or people. The styles take turns, seed by seed. Real Trinity 0.6.0 with VERL 0.8.0's trainer; rollouts and "
        "training share the CPU, so only waiting overlaps here, not computation. A step's time is the median over "
        "steps, from the end of one update to the end of the next, without validations.",
    )
    rows = []
    for style, runs in found.items():
        step = mean(_step_seconds(run) for run in runs)
        gains = [_step_seconds(sync) / _step_seconds(run) for sync, run in zip(found[SYNCHRONOUS], runs, strict=True)]
        rows.append(
            (
                style,
                f"{step:.1f} s",
                f"{mean(gains):.2f}x ({min(gains):.2f} to {max(gains):.2f})",
                f"{mean(_of(runs, 'staleness/mean')):.2f}",
                f"{max(_of(runs, 'staleness/max')):.0f}",
            )
        )
    report.table(("style", "a step", "throughput", "staleness", "at most"), rows)
    report.heading("Learning curve")
    width = steps // POINTS
    starts = range(0, steps, width)
    report.table(
        ("mean training reward in the steps", *(f"{start + 1}-{start + width}" for start in starts)),
        [
            (style, *(f"{mean(r for run in runs for r in run.rewards[at : at + width]):.3f}" for at in starts))
            for style, runs in found.items()
        ],
    )
    report.picture("asynchrony.png", lambda path: draw(found, path), "Training reward and held-out success of all runs")
    report.heading("Held-out success")
    report.table(
        ("style", "seed", "before", "after", "steps", "seconds"),
        [
            (style, r.seed, r.before, r.after, r.after.step, f"{r.seconds:.0f}")
            for style, runs in found.items()
            for r in runs
        ],
    )
    return report


def _step_seconds(run: Trained) -> float:
    return median(row["time/step"] for row in run.rows if "time/step" in row)


def _of(runs: Sequence[Trained], name: str) -> list[float]:
    return [row[name] for run in runs for row in run.rows if name in row]
