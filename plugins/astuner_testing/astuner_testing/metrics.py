"""Describe every metric of a run, as in ``metrics.yaml``, and check which of them a backbone logs.

``docs/metrics.md`` is generated from that table: names, meanings, and which backbones log them when. Invariant: a name
means the same on every backbone that logs it. Metrics of an engine without a name in the table are logged below the
name of the backbone, such as ``verl/…``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from astuner_testing.checks import is_finite_number

When = Literal["step", "update", "validation", "sometimes"]
Table = Literal["episodes", "samples", "update", "speed", "validation"]
Better = Literal["higher", "lower", ""]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One name, or a pattern of names."""

    name: str
    """Name; a word in ``<…>`` is a placeholder for a name that users choose."""
    meaning: str
    """Meaning, in Markdown."""
    table: Table
    """Table of the documentation."""
    unit: str = ""
    """Unit; empty for a plain number. "share" is between 0 and 1, "nat" is a unit of log-probability."""
    better: Better = ""
    """Better direction; empty for neither, or if it depends."""
    when: When = "step"
    """Time of logging: ``step``: in every training step; ``update``: in every step with an optimizer step;
    ``validation``: in every validation; ``sometimes``: as described in the meaning."""
    backbones: tuple[str, ...] = ()
    """Backbones that log it; empty for all that train."""

    def is_of(self, backbone: str) -> bool:
        """Return whether a backbone logs this metric."""
        return not self.backbones or backbone in self.backbones


@lru_cache(maxsize=4096)
def find(name: str) -> Metric | None:
    """Return the metric of a logged name, also if the name contains a policy; None if it is unknown."""
    bare = _bare(name)
    return next((m for m in metrics() if _pattern(m.name).fullmatch(bare)), None)


def required(when: When, backbone: str) -> Iterator[str]:
    """Yield the names that a backbone logs at this time."""
    for metric in metrics():
        if metric.when == when and metric.is_of(backbone) and "<" not in metric.name:
            yield metric.name


@lru_cache(maxsize=1024)
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"(<\w+>)", name)
    return re.compile("".join(_PLACEHOLDER.get(p, r"[^/]+") if p[:1] == "<" else re.escape(p) for p in parts))


_POLICY = re.compile(r"policy/[^/]+/(.+)")
_PLACEHOLDER = {"<name>": ".+", "<metric>": ".+", "<k>": r"\d+"}


@cache
def metrics() -> tuple[Metric, ...]:
    """Return all metrics in the order of the documentation. The first call reads the file and is slower."""
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


_BESIDE = {"step", "time"}


def check_metrics(rows: Iterable[Mapping[str, Any]], *, backbone: str) -> None:
    """Check the rows of a training run's ``metrics.jsonl`` (`RunDir.read_metrics`).

    Every name must be one of `metrics` or start with ``<backbone>/``; every step, update and validation must have all
    of its names; every value must be a finite number.

    :param rows: Rows with at least one step whose update took an optimizer step.
    :param backbone: Name of the backbone, as in ``astuner run --backbone``.
    """
    updates = 0
    for row in rows:
        where = f"step {row['step']}"
        numbers = {name: value for name, value in row.items() if name not in _BESIDE}
        _check_names(numbers, backbone, where)
        if "val/success" in numbers:
            _check_all_there(numbers, required("validation", backbone), f"the validation after {where}")
            continue
        if "warm_start/loss" in numbers:  # such a step has no episodes
            continue
        _check_all_there(numbers, required("step", backbone), where)
        if any(value == 0 for name, value in numbers.items() if _bare(name) == "nothing_learnable"):
            updates += 1
            _check_all_there(numbers, required("update", backbone), f"the update of {where}")
    assert updates, "no step has nothing_learnable = 0, so no update can be checked. Pass the rows of a run that learns"


def _check_names(numbers: Mapping[str, Any], backbone: str, where: str) -> None:
    for name, value in numbers.items():
        metric = find(name)
        known = name.startswith(f"{backbone}/") or (metric is not None and metric.is_of(backbone))
        close = get_close_matches(name, [m.name for m in metrics()], n=1)
        assert known, f"{where} has {name!r}, which is not a metric of {backbone} in astuner_testing.metrics" + (
            f". Did you mean {close[0]}?" if close else f". Put its own metrics below {backbone}/"
        )
        assert not isinstance(value, bool), f"{where}: {name} is {value!r}, but must be a number"
        assert is_finite_number(value), (
            f"{where}: {name} is {value!r}, but must be a finite number. Leave out unknown values"
        )


def _check_all_there(numbers: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    missing = sorted(set(names) - set(map(_bare, numbers)))
    assert not missing, f"{where} lacks {', '.join(missing)}, which every backbone logs (docs/metrics.md)"


def _bare(name: str) -> str:
    """Return a name without the policy, for a run with several."""
    return policy[1] if (policy := _POLICY.fullmatch(name)) else name
