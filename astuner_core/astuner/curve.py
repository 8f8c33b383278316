"""The picture of a run: reward and success over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_reward_curve(rows: Sequence[Mapping[str, Any]], path: Path) -> str:
    """Draw ``rows`` (those of ``metrics.jsonl``) into the PNG ``path``; says where it is, or what is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return 'not drawn: install it with: pip install "astuner-core[plot]"'
    train = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    held_out = [row for row in rows if "val/success" in row]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if train:
        steps, rewards = zip(*train, strict=True)
        axes.plot(steps, rewards, color="#9db8d9", linewidth=1, label="mean reward of a step")
        axes.plot(steps, _smoothed(rewards), color="#1f5fa8", linewidth=2, label="moving average (10 steps)")
    if held_out:
        x = [row["step"] for row in held_out]
        y = [row["val/success"] for row in held_out]
        low = [row["val/success"] - row["val/success_ci_low"] for row in held_out]
        high = [row["val/success_ci_high"] - row["val/success"] for row in held_out]
        axes.errorbar(x, y, yerr=[low, high], fmt="o", color="#c4501b", capsize=4, label="held-out success, 95 %")
    axes.set_xlabel("step")
    axes.set_ylabel("reward / success")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", frameon=False)
    figure.savefig(path, dpi=120)
    return str(path)


def _smoothed(values: Sequence[float], window: int = 10) -> list[float]:
    return [
        sum(values[max(0, i + 1 - window) : i + 1]) / len(values[max(0, i + 1 - window) : i + 1])
        for i in range(len(values))
    ]
