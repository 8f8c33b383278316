"""Which settings of two sides differ, from what their runs wrote down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from astuner import RunDir
from astuner.config.loaded import RESOLVED
from astuner.contracts.errors import DataError

UNINTERESTING = ("astuner.experiment_name", "astuner.experiment_dir")
"""Where a run is written differs always."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key with other values on one side than on the other."""

    key: str
    a: tuple[Any, ...]
    """The different values of the runs of this side; None where a run has no such key."""
    b: tuple[Any, ...]


def differences(a: Sequence[Path], b: Sequence[Path]) -> list[Difference]:
    """The keys that differ, in the order of the config.

    :raises DataError: a run has no ``resolved.yaml``.
    """
    of_a, of_b = [[_settings(run) for run in side] for side in (a, b)]
    keys = dict.fromkeys(key for run in (*of_a, *of_b) for key in run)
    found = []
    for key in keys:
        values_a, values_b = [_different([run.get(key) for run in side]) for side in (of_a, of_b)]
        if values_a != values_b and key not in UNINTERESTING:
            found.append(Difference(key=key, a=values_a, b=values_b))
    return found


def _settings(run: Path) -> dict[str, Any]:
    path = RunDir(run).resolved
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise DataError(f"{run} is not a run folder: it has no {path.name}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise DataError(f"{path} cannot be read: {e}") from None
    data.pop(RESOLVED, None)
    return dict(_leaves(data, ""))


def _leaves(data: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _different(values: Sequence[Any]) -> tuple[Any, ...]:
    """Without repetitions, in a fixed order; values may be lists."""
    unique: list[Any] = []
    for value in values:
        if value not in unique:
            unique.append(value)
    return tuple(sorted(unique, key=repr))
