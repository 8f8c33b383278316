"""Does a backbone log what every backbone logs, under the names that everybody knows?"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from astuner.contracts.metric_names import find, metrics, required

_BESIDE = {"step", "time"}


def check_metrics(rows: Iterable[Mapping[str, Any]], *, backbone: str) -> None:
    """Check the rows of a training run's ``metrics.jsonl`` (`RunDir.read_metrics`).

    Every name is one of `astuner.contracts.metric_names`, or below ``<backbone>/`` where the backbone's engine has more
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
            _check_all_there(numbers, list(required("validation", backbone)), f"the validation after {where}")
            continue
        _check_all_there(numbers, list(required("step", backbone)), where)
        if any(value == 0 for name, value in numbers.items() if _bare(name) == "nothing_learnable"):
            updates += 1
            _check_all_there(numbers, list(required("update", backbone)), f"the update of {where}")
    assert updates, "no step has nothing_learnable = 0, so no update can be looked at: give rows of a run that learns"


def _check_names(numbers: Mapping[str, Any], backbone: str, where: str) -> None:
    for name, value in numbers.items():
        metric = find(name)
        known = name.startswith(f"{backbone}/") or (metric is not None and _may_log(metric.backbones, backbone))
        close = get_close_matches(name, [m.name for m in metrics()], n=1)
        assert known, (
            f"{where} has {name!r}, which {backbone} does not log by astuner.contracts.metric_names"
            + (f"; did you mean {close[0]}?" if close else f"; what only it has belongs below {backbone}/")
        )
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        assert number, f"{where}: {name} is {value!r} and must be a finite number; leave out what is not known"


def _may_log(on: Collection[str], backbone: str) -> bool:
    return not on or backbone in on


def _check_all_there(numbers: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    there = {_bare(name) for name in numbers}
    missing = sorted(set(names) - there)
    assert not missing, f"{where} lacks {', '.join(missing)}, which every backbone logs (docs/metrics.md)"


def _bare(name: str) -> str:
    """Without the policy, where a run has several."""
    return name.split("/", 2)[2] if name.startswith("policy/") and name.count("/") >= 2 else name
