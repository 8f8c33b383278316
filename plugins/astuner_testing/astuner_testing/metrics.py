"""Every number that a run logs, as ``metrics.yaml`` has it, and whether a backbone logs what every backbone logs.

``docs/metrics.md`` is made of that table: names, what they mean, and which backbones log them when.  Invariant: a name
means the same on every backbone that logs it.  What an engine counts that has no name here is logged below the
backbone's own, as ``verl/…``.
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

    def is_of(self, backbone: str) -> bool:
        """Whether it logs this one."""
        return not self.backbones or backbone in self.backbones


@lru_cache(maxsize=4096)
def find(name: str) -> Metric | None:
    """What a logged name is; a policy's number is what it is without the policy."""
    bare = _bare(name)
    return next((m for m in metrics() if _pattern(m.name).fullmatch(bare)), None)


def required(when: When, backbone: str) -> Iterator[str]:
    """The names that a backbone logs at such a time."""
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


_BESIDE = {"step", "time"}


def check_metrics(rows: Iterable[Mapping[str, Any]], *, backbone: str) -> None:
    """Check the rows of a training run's ``metrics.jsonl`` (`RunDir.read_metrics`).

    Every name is one of `metrics`, or below ``<backbone>/`` where the backbone's engine has more
    to say; every step, every update and every validation has all the names that it is to have; every value is a finite
    number.

    :param rows: with at least one step whose update took an optimizer step.
    :param backbone: its name, as in ``astuner run --backbone``.
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
    assert updates, "no step has nothing_learnable = 0, so no update can be looked at: give rows of a run that learns"


def _check_names(numbers: Mapping[str, Any], backbone: str, where: str) -> None:
    for name, value in numbers.items():
        metric = find(name)
        known = name.startswith(f"{backbone}/") or (metric is not None and metric.is_of(backbone))
        close = get_close_matches(name, [m.name for m in metrics()], n=1)
        assert known, f"{where} has {name!r}, which {backbone} does not log by astuner_testing.metrics" + (
            f"; did you mean {close[0]}?" if close else f"; what only it has belongs below {backbone}/"
        )
        assert not isinstance(value, bool), f"{where}: {name} is {value!r} and must be a number"
        assert is_finite_number(value), (
            f"{where}: {name} is {value!r} and must be a finite number; leave out what is not known"
        )


def _check_all_there(numbers: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    missing = sorted(set(names) - set(map(_bare, numbers)))
    assert not missing, f"{where} lacks {', '.join(missing)}, which every backbone logs (docs/metrics.md)"


def _bare(name: str) -> str:
    """Without the policy, where a run has several."""
    return policy[1] if (policy := _POLICY.fullmatch(name)) else name
