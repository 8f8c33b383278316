"""A run's log for whoever looks at it: count, list, filter, search, and jump to one episode.

Whoever asks a run that goes on is told how it stands at that moment.  What needs a verdict is of the episodes that have
one, and None where none has.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from astuner import build_samples
from astuner.contracts.errors import ConfigError, DataError
from astuner.contracts.types import Episode, Sample, Split
from astuner_record.episode_log.rows import LOGPROBS, Row, numbers, read_episode
from astuner_record.episode_log.salvage import open_whole
from astuner_record.episode_log.store import FOUND, SEPARATOR, Database, connect_to_read, list_all, match_of
from astuner_record.exam import answer_of, cause_of, expected_of, labels_at, read_labels

ORDERS = ("written", "step", "query", "reward", "success", "stop_reason", "seconds", "turns", "tokens", "time")
"""What a list can be sorted by; ``written`` is the order in which episodes were written."""
MOST_VALUES = 100
"""Values that `EpisodeLog.facets` names of a kind, the most frequent first."""
Counts = tuple[tuple[str, int], ...]
"""Value, and how many episodes have it."""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """An episode as a list shows it."""

    id: int
    """Of its row; greater than of what was written before."""
    episode_id: str
    group_id: str
    task_id: str
    step: int
    split: str
    attempt: int
    time: float
    """When it ended, in seconds since 1970."""
    query: str
    """Its first 300 characters."""
    stop_reason: str
    reward: float | None
    success: bool | None
    error: str
    seconds: float
    retries: int
    agents: tuple[str, ...]
    tools: tuple[str, ...]
    """Those that were called."""
    turns: int
    """Those of models outside of the run among them."""
    tokens: int
    """Generated."""
    prompt_tokens: int
    """Of the prompts, each counted once."""
    branches: int
    """How many turns continue no earlier one."""
    label: str
    """What a person says of it, `astuner_record.exam.LABELS`; empty where nobody did."""
    why: str


@dataclass(frozen=True, kw_only=True)
class Credited:
    """What one sample of an episode was credited with."""

    step: int
    """The one it was trained in."""
    sample: int
    agent: str
    policy: str
    advantage: float
    token_weight: float
    reward: float
    trained_tokens: int
    trainer_logprobs: tuple[float, ...] | None = None
    """Of each trained token, in their order, under the weights before the update; None where the trainer computed none:
    see `astuner.contracts.events.LogprobsComputed`."""


CREDITED = tuple(field.name for field in fields(Credited))


NO_FACETS: Mapping[str, Any] = {
    **dict.fromkeys(("stop_reason", "split", "agent", "tool", "error"), ()), "step": None, "reward": None
}  # fmt: skip
"""What `EpisodeLog.facets` says of a log without episodes."""


@dataclass(frozen=True, kw_only=True)
class LoggedEpisode:
    """An episode out of the log, with its credit."""

    step: int
    row: Row
    """As it was written; free-form values are JSON text."""
    credit: tuple[Credited, ...]
    """One per sample, in their order; empty where the episode was not trained on."""

    @cached_property
    def episode(self) -> Episode:
        """With whole prompts, as it was when it ended."""
        return read_episode(self.row)

    def samples(self) -> tuple[Sample, ...]:
        """The samples that were trained on: which token was trained, with which advantage and weight.

        Each is that of `credit` at the same place, whose ``trainer_logprobs`` are of the ones in its loss mask.
        """
        if not self.credit:
            return ()
        built = build_samples(self.episode, max_samples=len(self.credit)).samples
        return tuple(
            replace(s, advantage=c.advantage, token_weight=c.token_weight, reward=c.reward)
            for s, c in zip(built, self.credit, strict=True)
        )


class EpisodeLog:
    """The log of one run, open for reading; of one thread."""

    def __init__(self, run: Path, *, check: bool = True) -> None:
        """
        :param run: a run folder.
        :param check: look at everything that is in it, and read of a damaged log what is whole.
        :raises DataError: it has no log, one of a newer format, or one of which nothing is whole.
        """
        self.folder = run / "episodes"
        self._db, self.problems, self.lost = open_whole(run) if check else (connect_to_read(self.folder), (), ())
        """``problems``: what of it cannot be read, a sentence each; ``lost``: the episodes that anything names."""
        self._labels: object = None
        """Which file of labels is in the table."""
        self._db.create_function("cause", 1, cause_of, deterministic=True)
        self._db.execute("CREATE TEMP TABLE labels (id INTEGER PRIMARY KEY, label TEXT NOT NULL, why TEXT NOT NULL)")

    def count(self, where: Sequence[str] = ()) -> int:
        """How many episodes meet all conditions.

        :raises ConfigError: a condition cannot be read.
        """
        if where:
            return self._count("*", where)
        # what is not listed yet need not be for that
        sql = (
            "SELECT count(*) + (SELECT count(DISTINCT episode_id) FROM main.data WHERE id > (SELECT ifnull(max(id), 0) "
            "FROM main.episodes) AND episode_id NOT IN (SELECT episode_id FROM main.episodes)) FROM main.episodes"
        )
        return int(self._db.execute(sql).fetchone()[0])

    def list(
        self,
        where: Sequence[str] = (),
        *,
        order: str = "written",
        descending: bool = False,
        limit: int = -1,
        offset: int = 0,
    ) -> list[Listed]:
        """Episodes that meet all conditions, e.g. ``["reward>=0.5", "agent=wolf"]``.

        :param order: one of `ORDERS`.
        :param limit: -1 for all.
        :raises ConfigError: a condition cannot be read.
        """
        sql, values = query_of(where)
        ordering = _ordering(order, descending)
        rows = self._now.execute(  # what is sorted are ids, and not whole rows; WITH has SQLite look for them once
            f"WITH page AS (SELECT id FROM episodes WHERE {sql} ORDER BY {ordering} LIMIT ? OFFSET ?) "
            f"SELECT episodes.*, {LABEL} AS label, {WHY} AS why FROM page JOIN episodes USING (id) ORDER BY {ordering}",
            [*values, limit, offset],
        )
        return [_listed(row) for row in _named(rows)]

    def exams(self, listed: Sequence[Listed]) -> Sequence[tuple[str, str]]:
        """What was answered in each of these, and what was expected; empty where that is not known."""
        return [self._exam(one.id) for one in listed]

    def _exam(self, id_: int) -> tuple[str, str]:
        try:
            (frame,) = self._db.execute("SELECT row FROM data WHERE id = ?", (id_,)).fetchone()
            row, _ = self._db.decoded(frame)
            return answer_of(row), expected_of(row)
        except (ValueError, LookupError, TypeError, AttributeError):  # it is gone, or no run wrote it
            return "", ""

    def find(self, episode_id: str) -> Listed:
        """:raises DataError: there is no such episode."""
        found = self.list([f"episode={episode_id}"])
        if not found:
            raise DataError(f"there is no episode {episode_id!r} in {self.folder}; `astuner export` lists them")
        return found[0]

    def read(self, listed: Listed | str) -> LoggedEpisode:
        """One episode with everything that the log knows about it.

        :param listed: what a list says, or an episode's id.
        :raises DataError: there is no such episode, or it is gone since the list was made.
        """
        at = self.find(listed) if isinstance(listed, str) else listed
        row = self._db.unpack(self._frame(at))
        return LoggedEpisode(step=row["step"], row=row, credit=self.credit(at.episode_id))

    def task(self, listed: Listed) -> tuple[str, dict[str, Any]]:
        """What an episode was asked: the query, and the rest of its task; half the time of `read`, and raises as it."""
        row, _ = self._db.decoded(self._frame(listed))
        return row["query"], json.loads(row["task"])

    def _frame(self, listed: Listed) -> bytes:
        found = self._db.execute("SELECT row FROM data WHERE id = ?", (listed.id,)).fetchone()
        if found is None:
            raise DataError(f"{listed.episode_id} was replaced by a run that was resumed; type the command again")
        return bytes(found[0])

    def read_all(self, where: Sequence[str] = ()) -> Iterator[LoggedEpisode]:
        """The episodes that meet all conditions, as they were written."""
        for listed in self.list(where):
            yield self.read(listed)

    def credit(self, episode_id: str) -> tuple[Credited, ...]:
        """What the samples of an episode were credited with."""
        rows = self._db.execute(
            f"SELECT {', '.join(CREDITED)} FROM credit WHERE episode_id = ?1 AND step = "
            "(SELECT max(step) FROM credit WHERE episode_id = ?1) ORDER BY sample",
            (episode_id,),
        )
        return tuple(map(_credited, _named(rows)))

    def position(
        self, episode_id: str, where: Sequence[str] = (), *, order: str = "written", descending: bool = False
    ) -> int | None:
        """Which place an episode has in such a `list`, counted from 0; None where it is not in it; raises as that."""
        sql, values = query_of(where)
        row = self._now.execute(
            f"SELECT place FROM (SELECT id, row_number() OVER (ORDER BY {_ordering(order, descending)}) - 1 AS place "
            f"FROM episodes WHERE {sql}) WHERE id = (SELECT id FROM episodes WHERE episode_id = ?)",
            [*values, episode_id],
        ).fetchone()
        return None if row is None else int(row[0])

    def steps(self, split: str = Split.TRAIN.value) -> Sequence[dict[str, Any]]:
        """The steps of a split, in order; step 0 is before training.

        Of each, ``scored`` have a verdict, and ``success`` is their share; ``failed`` have none, apart from those
        that were cancelled; ``tokens`` were generated.
        """
        rows = self._now.execute(
            "SELECT step, split, count(*) AS episodes, count(DISTINCT group_id) AS groups, count(reward) AS scored, "
            "avg(reward) AS reward_mean, min(reward) AS reward_min, max(reward) AS reward_max, "
            "avg(success) AS success, sum(reward IS NULL AND stop_reason != 'cancelled') AS failed, "
            "max(seconds) AS seconds_max, sum(tokens) AS tokens FROM episodes WHERE split = ? "
            "GROUP BY step ORDER BY step",
            (split,),
        )
        return list(_named(rows))

    def groups(self, where: Sequence[str] = (), *, limit: int = -1, offset: int = 0) -> Sequence[dict[str, Any]]:
        """The groups of the episodes that meet all conditions, as they were begun to be written; raises as `list`.

        Each has the ``step`` of the first episode that ended, and ``reward_std`` of the group as a whole: the sum of
        squares is divided by ``scored``.
        """
        sql, values = query_of(where)
        rows = self._now.execute(  # min() once, no max(): so the columns that are not aggregated are of that row
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
            found.append({**row, "reward_std": std})
        return found

    def count_groups(self, where: Sequence[str] = ()) -> int:
        """How many groups there are of the episodes that meet all conditions; raises as `list`."""
        return self._count("DISTINCT group_id", where)

    def _count(self, what: str, where: Sequence[str]) -> int:
        sql, values = query_of(where)
        return int(self._now.execute(f"SELECT count({what}) FROM episodes WHERE {sql}", values).fetchone()[0])

    def facets(self) -> Mapping[str, Any]:
        """Which values there are to filter by, and how many episodes have each, as `Counts`.

        An ``error`` is its cause as of `astuner_record.exam.cause_of`; of ``step`` and ``reward`` there are the lowest
        and the highest.
        """
        step_min, step_max, reward_min, reward_max = self._now.execute(
            "SELECT min(step), max(step), min(reward), max(reward) FROM episodes"
        ).fetchone()
        return {
            "stop_reason": _counts(self._now, "stop_reason"),
            "split": _counts(self._now, "split"),
            "agent": _names(self._now, "agents"),
            "tool": _names(self._now, "tools"),
            "error": _counts(self._now, "cause(error)", "WHERE error != ''"),
            "step": None if step_min is None else (step_min, step_max),
            "reward": None if reward_min is None else (reward_min, reward_max),
        }

    def close(self) -> None:
        self._db.close()

    @property
    def _now(self) -> Database:
        """With all in the lists that was written until now, and all labels."""
        list_all(self._db)
        if (labels := labels_at(self.folder.parent)) != self._labels:
            said = [(id_, *one) for id_, one in read_labels(self.folder.parent).items()]
            self._db.execute("DELETE FROM temp.labels")
            self._db.executemany("INSERT INTO temp.labels VALUES (?, ?, ?)", said)
            self._labels = labels
        return self._db

    def __enter__(self) -> EpisodeLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _named(rows: sqlite3.Cursor) -> Iterator[dict[str, Any]]:
    names = [column[0] for column in rows.description]
    return (dict(zip(names, row, strict=True)) for row in rows)  # half as long as with `sqlite3.Row`


def _ordering(order: str, descending: bool) -> str:
    """SQL after ORDER BY; those without a value are last either way, and equal ones in the order of writing."""
    if order not in ORDERS:
        raise ValueError(f"order is one of {', '.join(ORDERS)}, not {order!r}")
    columns = ("id",) if order == "written" else (order, "id")
    return ", ".join(f"{column} {'DESC' if descending else 'ASC'} NULLS LAST" for column in columns)


def _listed(row: dict[str, Any]) -> Listed:
    success = row.pop("success")
    agents, tools = (tuple(filter(None, row.pop(key).split(SEPARATOR))) for key in ("agents", "tools"))
    return Listed(**row, agents=agents, tools=tools, success=None if success is None else bool(success))


def _credited(row: dict[str, Any]) -> Credited:
    packed = row.pop("trainer_logprobs")
    return Credited(**row, trainer_logprobs=None if packed is None else tuple(numbers(packed, LOGPROBS)))


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


Value: TypeAlias = str | int | float
Query: TypeAlias = tuple[str, list[Value]]
"""SQL for the table ``episodes``, and its parameters."""

NUMBERS = ("step", "attempt", "reward", "seconds", "retries", "turns", "tokens", "prompt_tokens", "branches")
_SAME_WORDS = ("split", "stop_reason", "error", "query")
LABEL, WHY = (
    f"ifnull((SELECT {column} FROM temp.labels WHERE temp.labels.id = episodes.id), '')" for column in ("label", "why")
)
WORDS = {
    "episode": "episode_id", "group": "group_id", "task": "task_id", **{name: name for name in _SAME_WORDS},
    "cause": "cause(error)", "label": LABEL, "why": WHY,
}  # fmt: skip
"""Name in a condition -> column, or what is worked out of them."""
LISTS = {"agent": "agents", "tool": "tools"}
FIELDS = (*NUMBERS, *WORDS, *LISTS, "success", "text")
_CONDITION = re.compile(r"\s*(\w+)\s*(!=|>=|<=|=|>|<|~)(.*)", re.DOTALL)
_BOOLEANS = {"true": "success = 1", "false": "success = 0", "none": "success IS NULL"}


def query_of(where: Sequence[str]) -> Query:
    """All of the conditions at once; an episode without a value, such as a reward, meets none on it but ``!=``.

    :raises ConfigError: some cannot be read; names all of them.
    """
    parts: list[str] = []
    values: list[Value] = []
    wrong: list[str] = []
    for condition in where:
        try:
            sql, more = _one(condition)
        except ValueError as e:
            wrong.append(f"--where {condition!r}: {e}")
            continue
        parts.append(f"({sql})")
        values += more
    if wrong:
        raise ConfigError(wrong)
    return " AND ".join(parts) or "1", values


def _one(condition: str) -> Query:
    match = _CONDITION.fullmatch(condition)
    if match is None:
        raise ValueError("write a name, one of = != < <= > >= ~, and a value, e.g. reward>=0.5")
    name, operator, value = match[1], match[2], match[3].strip()
    if name in NUMBERS:
        return _number(name, operator, value)
    if name == "label" and value.lower() == "none":
        value = ""
    if name in WORDS:
        return _word(WORDS[name], operator, value)
    if name in LISTS:
        return _list(LISTS[name], operator, value)
    if name == "success":
        if operator != "=" or value.lower() not in _BOOLEANS:
            raise ValueError("success is =true, =false, or =none where there is no verdict")
        return _BOOLEANS[value.lower()], []
    if name == "text":
        if operator != "~" or not (asked := match_of(value)):
            raise ValueError("text is searched for words, e.g. text~'apple pie'")
        return f"id IN ({FOUND})", [asked, asked]
    raise ValueError(f"there is no {name!r}; there are {', '.join(FIELDS)}")


def _number(column: str, operator: str, value: str) -> Query:
    if operator == "~":
        raise ValueError(f"{column} is a number; compare it with = != < <= > >=")
    if value.lower() == "none" and operator in ("=", "!="):
        return f"{column} IS {'NOT ' if operator == '!=' else ''}NULL", []
    try:
        return f"{column} {'IS NOT' if operator == '!=' else operator} ?", [float(value)]
    except ValueError:
        raise ValueError(f"{value!r} is no number") from None


def _word(column: str, operator: str, value: str) -> Query:
    if operator == "~":
        return f"instr(lower({column}), ?) > 0", [value.lower()]
    if operator not in ("=", "!="):
        raise ValueError(f"{column} is text; compare it with = or !=, or look into it with ~")
    return f"{column} {operator} ?", [value]


def _list(column: str, operator: str, value: str) -> Query:
    if operator not in ("=", "!="):
        raise ValueError(f"{column} are names; ask for one with = or !=")
    return f"instr({column}, ?) {'>' if operator == '=' else '='} 0", [f"{SEPARATOR}{value}{SEPARATOR}"]
