"""Every number that a run logs: its name, what it means, and which backbones log it when, as ``metrics.yaml`` has it.

``docs/metrics.md`` is made of that table, and `astuner.testing.check_metrics` holds backbones to it.  Invariant: a name
means the same on every backbone that logs it.  What an engine counts that has no name here is logged below the
backbone's own, as ``verl/…``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

import yaml

When = Literal["step", "update", "validation", "sometimes"]
Table = Literal["episodes", "samples", "update", "speed", "validation"]
Better = Literal["higher", "lower", ""]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One name, or a pattern of names."""

    name: str
    """A word in ``<…>`` stands for a name that somebody chose."""
    meaning: str
    """Markdown."""
    table: Table
    """Where it stands in the documentation."""
    unit: str = ""
    """Empty: a plain number. "share" is between 0 and 1, a nat is a unit of log-probability."""
    better: Better = ""
    """Empty: neither, or it depends."""
    when: When = "step"
    """``step``: in every training step; ``update``: in every one whose update took an optimizer step;
    ``validation``: in every validation; ``sometimes``: where the meaning says so."""
    backbones: tuple[str, ...] = ()
    """The backbones that log it; none: all that train."""

    def matches(self, name: str) -> bool:
        """Whether a logged name is this one."""
        return _pattern(self.name).fullmatch(name) is not None


def find(name: str) -> Metric | None:
    """What a logged name is; a policy's number is what it is without the policy."""
    return _find(policy[2] if (policy := _POLICY.fullmatch(name)) else name)


def required(when: When, backbone: str) -> Iterator[str]:
    """The names that a backbone logs at such a time."""
    for metric in metrics():
        if metric.when == when and backbone in (metric.backbones or (backbone,)) and "<" not in metric.name:
            yield metric.name


def derived(metrics: Mapping[str, float]) -> dict[str, float]:
    """The numbers that follow from others; `Run.publish` adds them, so that they are the same everywhere."""
    found = {}
    for name, value in metrics.items():
        whose, bare = (policy[1], policy[2]) if (policy := _POLICY.fullmatch(name)) else ("", name)
        if bare == "staleness/mean":
            found[f"{whose}policy_staleness"] = value
        if bare == "clip_frac/low" and (high := metrics.get(f"{whose}clip_frac/high")) is not None:
            found[f"{whose}clip_frac"] = value + high
    return found


@lru_cache(maxsize=4096)
def _find(name: str) -> Metric | None:
    return next((m for m in metrics() if m.matches(name)), None)


@lru_cache(maxsize=1024)
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"(<\w+>)", name)
    return re.compile("".join(_PLACEHOLDER.get(p, r"[^/]+") if p[:1] == "<" else re.escape(p) for p in parts))


_POLICY = re.compile(r"(policy/[^/]+/)(.+)")
_PLACEHOLDER = {"<name>": ".+", "<metric>": ".+", "<k>": r"\d+"}


@cache
def metrics() -> tuple[Metric, ...]:
    """Every name, in the documentation's order; read when first asked for, which takes some hundredths of a second."""
    text = Path(__file__).with_name("metrics.yaml").read_text(encoding="utf-8")
    return tuple(
        Metric(
            table=table,
            when=row.pop("when", table if table in ("update", "validation") else "step"),
            backbones=tuple(row.pop("backbones", ())),
            **row,
        )
        for table, rows in yaml.safe_load(text).items()
        for row in rows
    )
