"""The curve of a run: reward and success over steps, as data and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WINDOW = 10
"""Steps of the moving average."""


@dataclass(frozen=True, kw_only=True)
class Validated:
    """Success on held-out tasks after a step, with its 95 % interval."""

    step: int
    success: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What is drawn."""

    steps: tuple[int, ...]
    rewards: tuple[float, ...]
    """The mean reward of each step."""
    held_out: tuple[Validated, ...]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Curve:
        """:param rows: of ``metrics.jsonl``."""
        trained = [row for row in rows if row.get("reward/mean") is not None]
        return cls(
            steps=tuple(row["step"] for row in trained),
            rewards=tuple(row["reward/mean"] for row in trained),
            held_out=tuple(
                Validated(
                    step=row["step"],
                    success=row["val/success"],
                    low=row["val/success_ci_low"],
                    high=row["val/success_ci_high"],
                )
                for row in rows
                if "val/success" in row
            ),
        )

    @property
    def smoothed(self) -> list[float]:
        """The moving average of the rewards, over the steps before."""
        parts = [self.rewards[max(0, i + 1 - _WINDOW) : i + 1] for i in range(len(self.rewards))]
        return [sum(part) / len(part) for part in parts]


def draw_reward_curve(rows: Sequence[Mapping[str, Any]], path: Path) -> str:
    """Draw ``rows`` (those of ``metrics.jsonl``) into the PNG ``path``; says where it is, or what is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return 'not drawn: install it with: pip install "astuner-report[plot]"'
    curve = Curve.of(rows)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if curve.steps:
        axes.plot(curve.steps, curve.rewards, color="#9db8d9", linewidth=1, label="mean reward of a step")
        axes.plot(curve.steps, curve.smoothed, color="#1f5fa8", linewidth=2, label="moving average (10 steps)")
    if curve.held_out:
        x = [point.step for point in curve.held_out]
        y = [point.success for point in curve.held_out]
        low = [point.success - point.low for point in curve.held_out]
        high = [point.high - point.success for point in curve.held_out]
        axes.errorbar(x, y, yerr=[low, high], fmt="o", color="#c4501b", capsize=4, label="held-out success, 95 %")
    axes.set_xlabel("step")
    axes.set_ylabel("reward / success")
    axes.grid(alpha=0.3)
    if curve.steps or curve.held_out:
        axes.legend(loc="best", frameon=False)
    figure.savefig(path, dpi=120)
    return str(path)
