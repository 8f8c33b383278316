"""What a log holds as a whole: steps, groups, and which values there are to filter by; all of it from the index.

Numbers are of the episodes that a condition leaves; where none of them has a verdict, what needs one is None.
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from astuner_record.episode_log.index import SEPARATOR
from astuner_record.episode_log.where import query_of

MOST_VALUES = 100
"""Values that `Facets` names of a kind, the most frequent first."""
Counts = tuple[tuple[str, int], ...]
"""Value, and how many episodes have it."""


@dataclass(frozen=True, kw_only=True)
class StepOverview:
    """The episodes of a step and split."""

    step: int
    split: str
    episodes: int
    groups: int
    scored: int
    """With a verdict."""
    reward_mean: float | None
    reward_min: float | None
    reward_max: float | None
    success: float | None
    """Share of those with a verdict."""
    failed: int
    """Without a verdict, apart from those that were cancelled."""
    seconds_max: float
    tokens: int
    """Generated."""


@dataclass(frozen=True, kw_only=True)
class GroupOverview:
    """The episodes of a group."""

    group_id: str
    task_id: str
    query: str
    """Its first 300 characters."""
    step: int
    """Of the first that ended."""
    split: str
    episodes: int
    scored: int
    reward_mean: float | None
    reward_std: float | None
    """Of the group as a whole: the sum of squares is divided by ``scored``."""
    success: float | None


@dataclass(frozen=True, kw_only=True)
class Facets:
    """Which values there are."""

    stop_reason: Counts
    split: Counts
    agent: Counts
    tool: Counts
    error: Counts
    """By their first lines."""
    step: tuple[int, int] | None
    """The first and the last one."""
    reward: tuple[float, float] | None
    """The lowest and the highest."""


def steps(db: sqlite3.Connection, split: str) -> list[StepOverview]:
    rows = db.execute(
        "SELECT step, split, count(*) AS episodes, count(DISTINCT group_id) AS groups, count(reward) AS scored, "
        "avg(reward) AS reward_mean, min(reward) AS reward_min, max(reward) AS reward_max, avg(success) AS success, "
        "sum(reward IS NULL AND stop_reason != 'cancelled') AS failed, max(seconds) AS seconds_max, "
        "sum(tokens) AS tokens FROM episodes WHERE split = ? GROUP BY step ORDER BY step",
        (split,),
    )
    return [StepOverview(**row) for row in _named(rows)]


def count_groups(db: sqlite3.Connection, where: Sequence[str]) -> int:
    sql, values = query_of(where)
    return int(db.execute(f"SELECT count(DISTINCT group_id) FROM episodes WHERE {sql}", values).fetchone()[0])


def groups(db: sqlite3.Connection, where: Sequence[str], limit: int, offset: int) -> list[GroupOverview]:
    sql, values = query_of(where)
    rows = db.execute(  # min() once, and no max(): then SQLite takes the columns that are not aggregated from that row
        "SELECT min(id), group_id, task_id, query, step, split, count(*) AS episodes, count(reward) AS scored, "
        "avg(reward) AS reward_mean, avg(reward * reward) AS squares, count(DISTINCT reward) > 1 AS spread, "
        f"avg(success) AS success FROM episodes WHERE {sql} GROUP BY group_id ORDER BY 1 LIMIT ? OFFSET ?",
        [*values, limit, offset],
    )
    found = []
    for row in _named(rows):
        del row["min(id)"]
        squares, spread, mean = row.pop("squares"), row.pop("spread"), row["reward_mean"]
        std = None if mean is None else math.sqrt(max(squares - mean * mean, 0.0)) if spread else 0.0
        found.append(GroupOverview(**row, reward_std=std))
    return found


def facets(db: sqlite3.Connection) -> Facets:
    step_min, step_max, reward_min, reward_max = db.execute(
        "SELECT min(step), max(step), min(reward), max(reward) FROM episodes"
    ).fetchone()
    line_end = "instr(error || char(10), char(10)) - 1"
    return Facets(
        stop_reason=_counts(db, "stop_reason"),
        split=_counts(db, "split"),
        agent=_names(db, "agents"),
        tool=_names(db, "tools"),
        error=_counts(db, f"substr(error, 1, {line_end})", "WHERE error != ''"),
        step=None if step_min is None else (step_min, step_max),
        reward=None if reward_min is None else (reward_min, reward_max),
    )


def position(db: sqlite3.Connection, episode_id: str, where: Sequence[str], ordering: str) -> int | None:
    """Which place an episode has in a list, counted from 0; None where it is not in it.

    :param ordering: SQL after ORDER BY.
    """
    sql, values = query_of(where)
    row = db.execute(
        f"SELECT place FROM (SELECT id, row_number() OVER (ORDER BY {ordering}) - 1 AS place FROM episodes "
        f"WHERE {sql}) WHERE id = (SELECT id FROM episodes WHERE episode_id = ?)",
        [*values, episode_id],
    ).fetchone()
    return None if row is None else int(row[0])


def _counts(db: sqlite3.Connection, expression: str, condition: str = "") -> Counts:
    rows = db.execute(
        f"SELECT {expression}, count(*) FROM episodes {condition} GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT {MOST_VALUES}"
    )
    return tuple((str(value), int(count)) for value, count in rows)


def _names(db: sqlite3.Connection, column: str) -> Counts:
    """How many episodes have each of the names in a column that holds several."""
    counted: Counter[str] = Counter()
    for text, count in db.execute(f"SELECT {column}, count(*) FROM episodes GROUP BY 1"):
        for name in filter(None, text.split(SEPARATOR)):
            counted[name] += count
    return tuple(sorted(counted.items(), key=lambda item: (-item[1], item[0]))[:MOST_VALUES])


def _named(rows: sqlite3.Cursor) -> list[dict[str, Any]]:
    names = [column[0] for column in rows.description]
    return [dict(zip(names, row, strict=True)) for row in rows]
