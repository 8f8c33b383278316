"""Success and reward by a field of the tasks' metadata: the choice of fields, and the metrics of each slice.

A slice contains the tasks with one value of a field. Fields are chosen from all tasks before the first step, so the
choice depends only on the tasks and the config, and a resumed run chooses the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from astuner.contracts.errors import ConfigError, did_you_mean, problems_of
from astuner.contracts.rows import ID_FIELDS, QUERY_FIELDS
from astuner.contracts.statistics import mean
from astuner.contracts.types import Episode, Split, Task
from astuner.contracts.validation import TaskResult
from astuner_record.episode_log.metadata import metric_name
from astuner_record.exam import REFERENCES
from astuner_report.settings import ReportKeys

KEY = "astuner.report.slices"
MAX_FIELDS = 4
"""Fields that are chosen automatically."""
MAX_SLICES = 30
"""Values of a configured field, and of all automatically chosen fields together."""
_MAX_VALUES = 8
"""Values of an automatically chosen field."""
_MIN_TASKS, _MIN_SHARE = 3, 0.05
"""A value of an automatically chosen field needs one of the two."""
_LONGEST = 40
"""Characters of the longest value of an automatically chosen field."""
_NOT_SLICES = {*REFERENCES, *QUERY_FIELDS, *ID_FIELDS, "answers", "gold", "labels", "split"}
"""Fields that are never chosen automatically."""

Slices = Mapping[str, Mapping[str, str]]
"""Field -> value as text -> name of the value in metrics."""


def value_of(metadata: Mapping[str, Any], field: str) -> str | None:
    """Return the value of a field as text (JSON for numbers and booleans); None if it is missing or not a scalar."""
    value: Any = metadata.get(field)
    if value is None:
        value = metadata
        for part in field.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, (bool, int, float)) else None


def choose_slices(
    fields: Sequence[str] | None, train: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, str]]:
    """Return the slices of a run.

    :param fields: `ReportSection.slices`.
    :param train: metadata of the training tasks.
    :param validation: metadata of the validation tasks.
    :raises ConfigError: no task has a value for a configured field, or it has more than `MAX_SLICES` values.
    """
    if fields is None:
        return _choose(train, validation)
    tasks = [*train, *validation]
    mistakes, slices = [], {}
    for field in dict.fromkeys(fields):
        values = {value for metadata in tasks if (value := value_of(metadata, field)) is not None}
        if len(values) > MAX_SLICES:
            most = f"at most {MAX_SLICES} are possible. Choose a field with fewer values"
            mistakes.append(f"{KEY}: {field} has {len(values):,} values, and {most}")
        elif not values and tasks:
            available = _scalar_fields(tasks)
            hint = did_you_mean(field, available, f". Available fields: {', '.join(available) or 'none'}")
            mistakes.append(f"{KEY}: no task has a value for {field!r}{hint}")
        slices[field] = _named(values)
    if mistakes:
        raise ConfigError(mistakes)
    return slices


def _choose(train: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return up to `MAX_FIELDS` fields with few values, in the order of the tasks' fields."""
    tasks, splits = [*train, *validation], [split for split in (train, validation) if split]
    chosen: dict[str, dict[str, str]] = {}
    partitions: set[tuple[int, ...]] = set()
    for field in dict.fromkeys(name for metadata in tasks for name in metadata):
        if field.lower() in _NOT_SLICES or not _has_few_values([metadata.get(field) for metadata in tasks]):
            continue
        values = [value_of(metadata, field) for metadata in tasks]
        numbers: dict[str | None, int] = {}
        partition = tuple(numbers.setdefault(value, len(numbers)) for value in values)
        varies = all(len({value_of(metadata, field) for metadata in split} - {None}) > 1 for split in splits)
        named = _named(value for value in numbers if value is not None)
        if not varies or partition in partitions or len(named) + sum(map(len, chosen.values())) > MAX_SLICES:
            continue
        partitions.add(partition)
        chosen[field] = named
        if len(chosen) == MAX_FIELDS:
            break
    return chosen


def _has_few_values(values: Sequence[Any]) -> bool:
    """Return whether at least half of the values are short scalars, and few of these are distinct and none is rare."""
    counts: Counter[tuple[type, Any]] = Counter()
    for value in values:
        if value is None:
            continue
        if not isinstance(value, (str, bool, int)) or len(str(value)) > _LONGEST:
            return False
        counts[type(value), value] += 1
        if len(counts) > _MAX_VALUES:
            return False
    given, rarest = counts.total(), min(counts.values(), default=0)
    is_rare = rarest < _MIN_TASKS and rarest < _MIN_SHARE * given
    return len(counts) >= 2 and 2 * given >= len(values) and given >= 2 * len(counts) and not is_rare


def _scalar_fields(tasks: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the dotted paths of all scalar values, except the query."""

    def paths(value: Mapping[str, Any], prefix: str) -> Iterable[str]:
        for name, inner in value.items():
            if isinstance(inner, Mapping):
                yield from paths(inner, f"{prefix}{name}.")
            elif isinstance(inner, (str, bool, int, float)) and name not in QUERY_FIELDS:
                yield f"{prefix}{name}"

    return list(dict.fromkeys(path for metadata in tasks for path in paths(metadata, "")))


def _named(values: Iterable[str]) -> dict[str, str]:
    """Return the values in order, each with a unique name for metrics."""
    names: dict[str, str] = {}
    used: set[str] = set()
    for value in sorted(values, key=_in_order):
        base = name = metric_name(value)
        number = 2
        while name in used:
            name, number = f"{base}-{number}", number + 1
        used.add(name)
        names[value] = name
    return names


def _in_order(value: str) -> tuple[bool, float, str]:
    try:
        return False, float(value), value
    except ValueError:
        return True, 0.0, value


def slice_metrics(slices: Slices, split: Split, episodes: Sequence[Episode]) -> dict[str, float]:
    """Return success and reward of each slice, as means over scored episodes (training) or tasks (validation).

    :param episodes: all episodes of a step or a validation, grouped by task.
    """
    groups: dict[str, list[Episode]] = {}
    for episode in episodes if slices else ():
        groups.setdefault(episode.workflow_task.group_id, []).append(episode)
    validates = split is Split.VALIDATION
    prefix, count = ("val/slice", "tasks") if validates else ("slice", "episodes")
    results: dict[tuple[str, str], list[TaskResult]] = {}
    for group in groups.values():
        metadata = group[0].workflow_task.task.metadata
        for field, names in slices.items():
            if (value := value_of(metadata, field)) is None or value not in names:
                continue
            for scored in (group,) if validates else ((episode,) for episode in group):
                if (result := TaskResult.of(scored)) is not None:
                    results.setdefault((field, names[value]), []).append(result)
    metrics = {}
    for field, names in slices.items():
        for name in names.values():
            if of_slice := results.get((field, name)):
                at = f"{prefix}/{metric_name(field)}/{name}"
                metrics[f"{at}/success"] = mean([result.success for result in of_slice])
                metrics[f"{at}/reward"] = mean([result.reward for result in of_slice])
                metrics[f"{at}/{count}"] = float(len(of_slice))
    return metrics


def slices_of(config: Any, train: Sequence[Task], validation: Sequence[Task]) -> dict[str, dict[str, str]]:
    """Return the slices of an experiment; raise as `choose_slices`."""
    fields = config.keys_of(ReportKeys).report.slices
    try:
        return choose_slices(fields, [task.metadata for task in train], [task.metadata for task in validation])
    except ConfigError as e:
        raise ConfigError([f"{config.place(KEY)}: {text}" for text in problems_of(e)]) from None
