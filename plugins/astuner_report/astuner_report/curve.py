"""The reward curve of a run: data, an SVG, and a PNG if matplotlib is installed.

The SVG is small, contains no scripts, and is readable in light mode, in dark mode and in print.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from astuner_report.rendering import rendered

_WINDOW = 10
"""Window of the moving average, in steps."""
WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 34, 40
MOST_POINTS = 600
"""Maximum number of points of a line; more are not visible."""


class Validated(NamedTuple):
    """Validation success after a step, with its 95 % interval."""

    step: int
    success: float
    low: float
    high: float


class Curve:
    """The data of the curve."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Read the data of the curve.

        :param rows: rows of ``metrics.jsonl``.
        """
        trained = [row for row in rows if row.get("reward/mean") is not None]
        self.steps: list[int] = [row["step"] for row in trained]
        self.rewards: list[float] = [row["reward/mean"] for row in trained]
        """Mean reward of each step."""
        parts = [self.rewards[max(0, i + 1 - _WINDOW) : i + 1] for i in range(len(self.rewards))]
        self.smoothed = [sum(part) / len(part) for part in parts]
        """Moving average of the rewards over the preceding steps."""
        names = ("step", "val/success", "val/success_ci_low", "val/success_ci_high")
        self.held_out = [Validated(*(row[name] for name in names)) for row in rows if row.get(names[1]) is not None]


def draw_reward_curve(rows: Sequence[Mapping[str, Any]], path: Path) -> str:
    """Draw ``rows`` of ``metrics.jsonl`` into the PNG ``path``; return its path, or what to install."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return 'not drawn, because matplotlib is missing; install it with: pip install "astuner-report[plot]"'
    curve = Curve(rows)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if curve.steps:
        axes.plot(curve.steps, curve.rewards, color="#9db8d9", linewidth=1, label="mean reward per step")
        axes.plot(curve.steps, curve.smoothed, color="#1f5fa8", linewidth=2, label="moving average (10 steps)")
    if curve.held_out:
        x, y, *_ = zip(*curve.held_out, strict=True)
        down, up = [p.success - p.low for p in curve.held_out], [p.high - p.success for p in curve.held_out]
        axes.errorbar(x, y, yerr=[down, up], fmt="o", color="#c4501b", capsize=4, label="validation success, 95 %")
    axes.set_xlabel("step")
    axes.set_ylabel("reward / success")
    axes.grid(alpha=0.3)
    if curve.steps or curve.held_out:
        axes.legend(loc="best", frameon=False)
    path.unlink(missing_ok=True)  # in a folder from an untrusted source it may be a link
    figure.savefig(path, dpi=120)
    return str(path)


_Scale: TypeAlias = Callable[[float], float]


def _scale(low: float, high: float, start: float, end: float) -> _Scale:
    span = (high - low) or 1.0
    return lambda value: round(start + (value - low) / span * (end - start), 1)


def reward_curve_svg(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the curve as an SVG.

    :param rows: rows of ``metrics.jsonl``.
    """
    curve = Curve(rows)
    steps = [*curve.steps, *(p.step for p in curve.held_out)]
    values = [*curve.rewards, *(v for p in curve.held_out for v in (p.low, p.high))]
    y_ticks = _ticks(min(values, default=0.0), max(values, default=1.0))
    x_ticks = _ticks(min(steps, default=0), max(steps, default=1), whole=True)
    x = _scale(min(x_ticks[0], *steps) if steps else 0, max(x_ticks[-1], *steps) if steps else 1, LEFT, WIDTH - RIGHT)
    y = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    lines = [("rc-raw", curve.rewards), ("rc-mean", curve.smoothed)] if curve.steps else []
    return rendered(
        "curve.svg",
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=WIDTH - RIGHT,
        bottom=HEIGHT - BOTTOM,
        x=x,
        y=y,
        x_ticks=x_ticks,
        y_ticks=y_ticks,
        lines=[(style, _points(curve.steps, values, x, y)) for style, values in lines],
        held_out=curve.held_out,
    )


def _points(steps: Sequence[int], values: Sequence[float], x: _Scale, y: _Scale) -> str:
    size = math.ceil(len(steps) / MOST_POINTS)
    points = []
    for start in range(0, len(steps), size):
        some = values[start : start + size]
        points.append(f"{x(steps[min(start + size // 2, len(steps) - 1)])},{y(math.fsum(some) / len(some))}")
    return " ".join(points)


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return about five round numbers that span ``low`` to ``high``."""
    if high <= low:
        low, high = (low, low + 1) if whole else (low - 0.5, low + 0.5)
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * 0.999)
    size = max(size, 1.0) if whole else size
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [round(i * size, 10) for i in range(first, last + 1)]
