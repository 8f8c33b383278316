"""Does an agent learn to cross FrozenLake over the environment service, and only from rewards that mean something?

Runs the example as a person would, ``astuner run examples/frozen_lake/frozen_lake.yaml --with frozen_lake --backbone
local``: every run starts a service of its own, and every episode's world is a process behind HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import Report
from benchmarks.trained import AS_SHIPPED, FRESH, REPOSITORY, Condition, Runs, Trained, draw, table, train_all, verdict

EXPERIMENT = REPOSITORY / "examples/frozen_lake/frozen_lake.yaml"
COMMAND = (str(EXPERIMENT), "--with", "frozen_lake", "--backbone", "local")
SEEDS = (10, 11, 12)
"""Untouched: the recipe was tuned on 1."""
QUICK_SEEDS = (3,)
SHUFFLED = f"{REPOSITORY / 'benchmarks/frozen_lake_judge.py'}->ShuffledLakeJudge"


def conditions(seeds: Sequence[int]) -> dict[str, Condition]:
    return {
        AS_SHIPPED: Condition((), seeds),
        "shuffled rewards": Condition((f"astuner.task_judge.judge={SHUFFLED}",), seeds, learns=False),
    }


LEAST_HELD_OUT = 200


def run(*, quick: bool, runs: Runs = FRESH) -> Report:
    arguments = (*COMMAND, *(("astuner.trainer_common.total_steps=6",) if quick else ()))
    tried = conditions(QUICK_SEEDS if quick else SEEDS)
    found = train_all(tried, arguments, LEAST_HELD_OUT, runs)
    shipped = found[AS_SHIPPED]
    report = Report(
        "FrozenLake over the environment service: success on held-out lakes",
        "`astuner run examples/frozen_lake/frozen_lake.yaml --with frozen_lake --backbone local`: the real AgentScope "
        f"agent, {len(shipped[0].rewards)} steps of GRPO on a model of 0.12 million weights that starts by moving at "
        "random. Each run is a process of its own with a fresh run folder and a service of its own; every episode's "
        "lake is a process behind HTTP (`/create`, `/step`, `/evaluate`, `/release`). The score is the environment's: "
        "1 at the goal, else 0. What the agent reads at each step is the tile on its left, below, on its right and "
        "above, and how far the goal is (`view: neighbours`), not the whole map. Success is measured on all "
        f"{shipped[0].after.tasks} tasks of the split `validation`, one episode each, sampled as in training, with "
        "Wilson's 95 % interval. No lake of that split is in the split that is trained on (the map itself decides "
        "which split it belongs to). The recipe was tuned on seed 1; those here were run for this page.",
    )
    table(report, found)
    report.text(_infrastructure([run for runs in found.values() for run in runs]))
    if not quick:
        verdict(report, found, tried)
        report.text(
            "*Shuffled rewards*: in training each episode gets the verdict of another, randomly chosen one "
            "(`benchmarks/frozen_lake_judge.py`); in validation its own. The change is the difference of two "
            "proportions over the tasks of all seeds together; *learned* means that its interval lies above 0. "
            "For scale: who moves at random crosses 1 % of these lakes; who goes down or right without looking, 21 %; "
            "who goes down or right where there is ice, else left or up where there is ice, 86 %."
        )
    caption = "Training reward and held-out success of every run"
    report.picture("frozen_lake.png", lambda path: draw(found, path), caption)
    return report


def _infrastructure(runs: Sequence[Trained]) -> str:
    """How many episodes the service lost."""
    rows = [row for run in runs for row in run.rows if "rollout/episodes" in row]
    episodes = sum(row["rollout/episodes"] for row in rows)
    failed = sum(row["rollout/errored_frac"] * row["rollout/episodes"] for row in rows)
    return f"Of the {episodes:,.0f} training episodes of all runs together, {failed:.0f} failed and were left out."
