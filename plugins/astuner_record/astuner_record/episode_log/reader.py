"""Read the log of a run: count, list, filter, search, and open episodes.

A reader of a running log sees the state at the time of each call. Statistics of verdicts cover the episodes that have
a verdict, and are None if there are none.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from astuner import build_samples
from astuner.contracts.display import Displayed
from astuner.contracts.errors import ConfigError, DataError
from astuner.contracts.rows import QUERY_FIELDS
from astuner.contracts.types import Episode, Sample, Split, StopReason
from astuner_record.episode_log.metadata import FEW_VALUES, METADATA, fields_of, metadata_query
from astuner_record.episode_log.rows import LOGPROBS, Row, numbers, read_episode
from astuner_record.episode_log.salvage import open_whole
from astuner_record.episode_log.store import FOUND, SEPARATOR, Database, connect_to_read, list_all, match_of
from astuner_record.exam import answer_of, cause_of, expected_of, labels_at, read_labels

ORDERS = ("written", "step", "query", "reward", "success", "stop_reason", "seconds", "turns", "tokens", "time")
"""Columns that sort a list. ``written`` is the order in which episodes were written."""
MOST_VALUES = 100
"""Maximum values per kind in `EpisodeLog.facets`, most frequent first."""
T = TypeVar("T")
Counts = tuple[tuple[str, int], ...]
"""Values with the number of episodes that have them."""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """List entry of an episode."""

    id: int
    """Row ID. Rows written later have greater IDs."""
    episode_id: str
    group_id: str
    task_id: str
    step: int
    split: str
    attempt: int
    time: float
    """End of the episode, in seconds since 1970."""
    query: str
    """First 300 characters of the query."""
    stop_reason: str
    reward: float | None
    success: bool | None
    error: str
    seconds: float
    retries: int
    agents: tuple[str, ...]
    tools: tuple[str, ...]
    """Tools that were called."""
    turns: int
    """Number of turns, including turns of external models."""
    tokens: int
    """Generated tokens."""
    prompt_tokens: int
    """Prompt tokens, each counted once."""
    branches: int
    """Number of turns that continue no earlier turn."""
    label: str
    """Human label, of `astuner_record.exam.LABELS`; empty without a label."""
    why: str


@dataclass(frozen=True, kw_only=True)
class Credited:
    """Credit of one sample of an episode."""

    step: int
    """Step in which the sample was trained."""
    sample: int
    agent: str
    policy: str
    advantage: float
    token_weight: float
    reward: float
    trained_tokens: int
    trainer_logprobs: tuple[float, ...] | None = None
    """Log-probability of each trained token under the weights before the update. None if the trainer computed none, see
    `astuner.contracts.events.LogprobsComputed`."""


CREDITED = tuple(field.name for field in fields(Credited))


NO_FACETS: Mapping[str, Any] = {
    **dict.fromkeys(("stop_reason", "split", "agent", "tool", "error", "limit"), ()), "step": None, "reward": None
}  # fmt: skip
"""Value of `EpisodeLog.facets` for a log without episodes."""


@dataclass(frozen=True, kw_only=True, repr=False)
class LoggedEpisode(Displayed):
    """An episode from the log, with its credit."""

    step: int
    row: Row
    """Row as written; free-form values are JSON text."""
    credit: tuple[Credited, ...]
    """One entry per sample, in order; empty if the episode was not trained."""

    def __repr__(self) -> str:
        return f"LoggedEpisode({self.row['episode_id']} of step {self.step}: reward {self.row['reward']})"

    @cached_property
    def episode(self) -> Episode:
        """Return the episode as it ended, with complete prompts."""
        return read_episode(self.row)

    def samples(self) -> tuple[Sample, ...]:
        """Return the trained samples, with loss masks, advantages and weights.

        The samples are in the order of `credit`, whose ``trainer_logprobs`` cover the tokens in the loss mask.
        """
        if not self.credit:
            return ()
        built = build_samples(self.episode, max_samples=len(self.credit)).samples
        return tuple(
            replace(s, advantage=c.advantage, token_weight=c.token_weight, reward=c.reward)
            for s, c in zip(built, self.credit, strict=True)
        )


_AT_LIMIT = f"stop_reason IN ({', '.join(repr(reason.value) for reason in StopReason if reason.is_limit)})"


class EpisodeLog:
    """Log of one run, open for reading by one thread."""

    def __init__(self, run: Path, *, check: bool = True) -> None:
        """Open the log.

        :param run: Run folder.
        :param check: Verify the complete log, and read the intact parts of a damaged one.
        :raises DataError: The log is missing, has a newer format, or has no intact part.
        """
        self.folder = run / "episodes"
        self._db, self.problems, self.lost = open_whole(run) if check else (connect_to_read(self.folder), (), ())
        """``problems``: a message for each unreadable part; ``lost``: known episodes that cannot be read."""
        self._labels: object = None
        """State of the label file that the labels table contains."""
        self._db.create_function("cause", 1, cause_of, deterministic=True)
        self._db.execute("CREATE TEMP TABLE labels (id INTEGER PRIMARY KEY, label TEXT NOT NULL, why TEXT NOT NULL)")
        self._db.executescript(METADATA)
        self._with_metadata, self._last_with_metadata = set[str](), 0
        """Groups and the last row whose metadata are in the table of `METADATA`."""
        self._counted: dict[str, tuple[int, Any]] = {}
        """Method -> the version of the database, and the method's result."""

    def count(self, where: Sequence[str] = ()) -> int:
        """Return the number of episodes that match all conditions.

        :raises ConfigError: A condition is malformed.
        """
        if where:
            return self._count("*", where)
        # counting does not require listing the newest rows first
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
        """Return episodes that match all conditions, e.g. ``["reward>=0.5", "agent=wolf"]``.

        :param order: One of `ORDERS`.
        :param limit: -1 for all.
        :raises ConfigError: A condition is malformed.
        """
        sql, values = self._query(where)
        ordering = _ordering(order, descending)
        rows = self._now.execute(  # sort IDs instead of complete rows; WITH makes SQLite evaluate them once
            f"WITH page AS (SELECT id FROM episodes WHERE {sql} ORDER BY {ordering} LIMIT ? OFFSET ?) "
            f"SELECT episodes.*, {LABEL} AS label, {WHY} AS why FROM page JOIN episodes USING (id) ORDER BY {ordering}",
            [*values, limit, offset],
        )
        return [_listed(row) for row in _named(rows)]

    def exams(self, listed: Sequence[Listed]) -> Sequence[tuple[str, str]]:
        """Return answer and expected answer of each episode; empty if unknown."""
        return [self._exam(one.id) for one in listed]

    def _exam(self, id_: int) -> tuple[str, str]:
        try:
            (frame,) = self._db.execute("SELECT row FROM data WHERE id = ?", (id_,)).fetchone()
            row, _ = self._db.decoded(frame)
            return answer_of(row), expected_of(row)
        except (ValueError, LookupError, TypeError, AttributeError):  # deleted meanwhile, or not written by ASTuner
            return "", ""

    def find(self, episode_id: str) -> Listed:
        """Return an episode by ID.

        :raises DataError: The episode does not exist.
        """
        found = self.list([f"episode={episode_id}"])
        if not found:
            raise DataError(f"{self.folder} has no episode {episode_id!r}. To list episodes, use `astuner export`.")
        return found[0]

    def read(self, listed: Listed | str) -> LoggedEpisode:
        """Return an episode with everything that the log contains about it.

        :param listed: List entry, or episode ID.
        :raises DataError: The episode does not exist, or was deleted after it was listed.
        """
        at = self.find(listed) if isinstance(listed, str) else listed
        row = self._db.unpack(self._frame(at))
        return LoggedEpisode(step=row["step"], row=row, credit=self.credit(at.episode_id))

    def task(self, listed: Listed) -> tuple[str, dict[str, Any]]:
        """Return the query and the remaining task of an episode, in half the time of `read`; raise as `read`."""
        row, _ = self._db.decoded(self._frame(listed))
        return row["query"], json.loads(row["task"])

    def _frame(self, listed: Listed) -> bytes:
        found = self._db.execute("SELECT row FROM data WHERE id = ?", (listed.id,)).fetchone()
        if found is None:
            raise DataError(f"{listed.episode_id} was replaced by a resumed run. Run the command again.")
        return bytes(found[0])

    def read_all(self, where: Sequence[str] = ()) -> Iterator[LoggedEpisode]:
        """Yield the episodes that match all conditions, in the order in which they were written."""
        for listed in self.list(where):
            yield self.read(listed)

    def credit(self, episode_id: str) -> tuple[Credited, ...]:
        """Return the credit of an episode's samples."""
        rows = self._db.execute(
            f"SELECT {', '.join(CREDITED)} FROM credit WHERE episode_id = ?1 AND step = "
            "(SELECT max(step) FROM credit WHERE episode_id = ?1) ORDER BY sample",
            (episode_id,),
        )
        return tuple(map(_credited, _named(rows)))

    def strongest(self) -> tuple[str, Credited] | None:
        """Return the ID and the credit of the episode with the largest absolute advantage; None without credit.

        Of several, it is the newest one.
        """
        rows = self._db.execute(
            f"SELECT episode_id, {', '.join(CREDITED)} FROM credit WHERE advantage IS NOT NULL "
            "ORDER BY abs(advantage) DESC, step DESC LIMIT 1"
        )
        row = next(_named(rows), None)
        return None if row is None else (row.pop("episode_id"), _credited(row))

    def position(
        self, episode_id: str, where: Sequence[str] = (), *, order: str = "written", descending: bool = False
    ) -> int | None:
        """Return the index of an episode in `list` with the same arguments, or None if it is not in it."""
        sql, values = self._query(where)
        row = self._now.execute(
            f"SELECT place FROM (SELECT id, row_number() OVER (ORDER BY {_ordering(order, descending)}) - 1 AS place "
            f"FROM episodes WHERE {sql}) WHERE id = (SELECT id FROM episodes WHERE episode_id = ?)",
            [*values, episode_id],
        ).fetchone()
        return None if row is None else int(row[0])

    def steps(self, split: str = Split.TRAIN.value) -> Sequence[dict[str, Any]]:
        """Return statistics of each step of a split, in order. Step 0 is before training.

        ``scored`` episodes have a verdict, and ``success`` is the successful share of these. ``failed`` episodes have
        no verdict and were not cancelled. ``tokens`` counts generated tokens.
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
        """Return the groups of the episodes that match all conditions, in the order of their first rows.

        ``step`` is the step of the first episode that ended. ``reward_std`` is the population standard deviation of the
        group: the sum of squares is divided by ``scored``. Raises as `list`.
        """
        sql, values = self._query(where)
        rows = self._now.execute(  # a single min() makes SQLite take the bare columns from that row
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
        """Return the number of groups of the episodes that match all conditions; raise as `list`."""
        return self._count("DISTINCT group_id", where)

    def _count(self, what: str, where: Sequence[str]) -> int:
        sql, values = self._query(where)
        return int(self._now.execute(f"SELECT count({what}) FROM episodes WHERE {sql}", values).fetchone()[0])

    def facets(self) -> Mapping[str, Any]:
        """Return the values to filter by, as `Counts`.

        ``error`` lists causes as returned by `astuner_record.exam.cause_of`, ``limit`` the causes of episodes that a
        limit on tokens or calls ended. ``step`` and ``reward`` are (lowest, highest).
        """
        return self._once("facets", self._facets)

    def _facets(self) -> Mapping[str, Any]:
        columns = "stop_reason", "split", "agents", "tools"
        counted = self._now.execute(
            f"SELECT count(*), min(step), max(step), min(reward), max(reward), {', '.join(columns)} FROM episodes "
            f"GROUP BY {', '.join(columns)}"  # a single scan of the list
        ).fetchall()
        steps, rewards = ([v for row in counted for v in row[i : i + 2] if v is not None] for i in (1, 3))
        return {
            **{name: _most((row[i], row[0]) for row in counted) for i, name in ((5, "stop_reason"), (6, "split"))},
            **{
                name: _most((word, row[0]) for row in counted for word in filter(None, row[i].split(SEPARATOR)))
                for i, name in ((7, "agent"), (8, "tool"))
            },
            **{
                name: _most(
                    self._db.execute(
                        "SELECT cause(error), count(*) FROM episodes "
                        f"WHERE error != '' AND {negation}{_AT_LIMIT} GROUP BY 1"
                    )
                )
                for name, negation in (("error", "NOT "), ("limit", ""))
            },
            "step": (min(steps), max(steps)) if steps else None,
            "reward": (min(rewards), max(rewards)) if rewards else None,
        }

    def fields(self) -> Sequence[tuple[str, Counts]]:
        """Return the metadata fields of tasks, except the query, that have two to `FEW_VALUES` values.

        :returns: Fields with the episodes of each value.
        """
        return self._once("fields", self._fields)

    def _fields(self) -> Sequence[tuple[str, Counts]]:
        self._read_metadata()
        rows = self._now.execute(
            "WITH counted AS (SELECT group_id, count(*) AS episodes FROM episodes GROUP BY 1), few AS "
            "(SELECT field FROM temp.metadata GROUP BY 1 HAVING count(DISTINCT value) BETWEEN 2 AND ?) "
            "SELECT field, value, sum(episodes) FROM few JOIN temp.metadata USING (field) "
            "JOIN counted USING (group_id) GROUP BY 1, 2 ORDER BY 1, 3 DESC, 2",
            (FEW_VALUES,),
        )
        return [
            (field, tuple((value, count) for _, value, count in counts))
            for field, counts in itertools.groupby(rows, key=lambda row: row[0])
            if field not in QUERY_FIELDS
        ]

    def _once(self, name: str, compute: Callable[[], T]) -> T:
        """Return the result of a function that is called again only when the database has changed."""
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        if self._counted.get(name, (None,))[0] != version:
            self._counted[name] = version, compute()
        result: T = self._counted[name][1]
        return result

    def _query(self, where: Sequence[str]) -> Query:
        """Combine conditions, which may name metadata fields of tasks; see `query_of`."""
        names = {match[1] for condition in where if (match := _CONDITION.fullmatch(condition))}
        return query_of(where, self._read_metadata() if names.difference(FIELDS) else ())

    def _read_metadata(self) -> Collection[str]:
        """Update the table of the tasks' metadata, and return the fields; decode an episode of each new group."""
        rows = self._now.execute(
            "WITH new AS (SELECT max(id) AS id, group_id FROM episodes WHERE id > ? GROUP BY group_id) "
            "SELECT id, group_id, row FROM new JOIN main.data USING (id)",
            (self._last_with_metadata,),
        ).fetchall()
        self._last_with_metadata = max((id_ for id_, *_ in rows), default=self._last_with_metadata)
        new = [(group, frame) for _, group, frame in rows if group not in self._with_metadata]
        self._with_metadata.update(group for group, _ in new)
        self._db.executemany(
            "INSERT INTO temp.metadata VALUES (?, ?, ?, ?, ?)",
            ((group, *field) for group, frame in new for field in self._metadata(frame)),
        )
        return [name for (name,) in self._db.execute("SELECT DISTINCT field FROM temp.metadata ORDER BY 1")]

    def _metadata(self, frame: bytes) -> Sequence[tuple[Any, ...]]:
        try:
            return fields_of(self._db.task(frame))
        except (ValueError, LookupError, TypeError, AttributeError):  # not written by ASTuner
            return ()

    def close(self) -> None:
        self._db.close()

    @property
    def _now(self) -> Database:
        """Database with up-to-date lists and labels."""
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
    return (dict(zip(names, row, strict=True)) for row in rows)  # half the time of `sqlite3.Row`


def _ordering(order: str, descending: bool) -> str:
    """Return SQL for ORDER BY, with missing values last and ties in the order of writing."""
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    columns = ("id",) if order == "written" else (order, "id")
    return ", ".join(f"{column} {'DESC' if descending else 'ASC'} NULLS LAST" for column in columns)


def _listed(row: dict[str, Any]) -> Listed:
    success = row.pop("success")
    agents, tools = (tuple(filter(None, row.pop(key).split(SEPARATOR))) for key in ("agents", "tools"))
    return Listed(**row, agents=agents, tools=tools, success=None if success is None else bool(success))


def _credited(row: dict[str, Any]) -> Credited:
    packed = row.pop("trainer_logprobs")
    return Credited(**row, trainer_logprobs=None if packed is None else tuple(numbers(packed, LOGPROBS)))


def _most(counts: Iterable[tuple[Any, int]]) -> Counts:
    """Return the sum of the counts of each value, most frequent first."""
    sums: Counter[str] = Counter()
    for value, count in counts:
        sums[str(value)] += count
    return tuple(sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:MOST_VALUES])


Value: TypeAlias = str | int | float
Query: TypeAlias = tuple[str, list[Value]]
"""SQL condition on the table ``episodes``, and its parameters."""

NUMBERS = ("step", "attempt", "reward", "seconds", "retries", "turns", "tokens", "prompt_tokens", "branches")
_SAME_WORDS = ("split", "stop_reason", "error", "query")
LABEL, WHY = (
    f"ifnull((SELECT {column} FROM temp.labels WHERE temp.labels.id = episodes.id), '')" for column in ("label", "why")
)
WORDS = {
    "episode": "episode_id", "group": "group_id", "task": "task_id", **{name: name for name in _SAME_WORDS},
    "cause": "cause(error)", "label": LABEL, "why": WHY,
}  # fmt: skip
"""Name in a condition -> SQL expression."""
LISTS = {"agent": "agents", "tool": "tools"}
FIELDS = (*NUMBERS, *WORDS, *LISTS, "success", "text")
_CONDITION = re.compile(r"\s*([\w.-]+)\s*(!=|>=|<=|=|>|<|~)(.*)", re.DOTALL)
_BOOLEANS = {"true": "success = 1", "false": "success = 0", "none": "success IS NULL"}


def query_of(where: Sequence[str], metadata: Collection[str] = ()) -> Query:
    """Combine conditions. An episode without a value, such as a reward, matches only ``!=`` conditions on it.

    :param metadata: Metadata fields of the tasks.
    :raises ConfigError: Conditions are malformed; the message lists all of them.
    """
    parts: list[str] = []
    values: list[Value] = []
    wrong: list[str] = []
    for condition in where:
        try:
            sql, more = _one(condition, metadata)
        except ValueError as e:
            wrong.append(f"--where {condition!r}: {e}")
            continue
        parts.append(f"({sql})")
        values += more
    if wrong:
        raise ConfigError(wrong)
    return " AND ".join(parts) or "1", values


def _one(condition: str, metadata: Collection[str]) -> Query:
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
            raise ValueError("success accepts =true, =false, and =none (no verdict)")
        return _BOOLEANS[value.lower()], []
    if name == "text":
        if operator != "~" or not (asked := match_of(value)):
            raise ValueError("text accepts ~ and words to search for, e.g. text~'apple pie'")
        return f"id IN ({FOUND})", [asked, asked]
    if (field := name.removeprefix("metadata.")) in metadata:
        return metadata_query(field, operator, value)
    of_tasks = f"; in the tasks' metadata: {', '.join(metadata)}" if metadata else ""
    raise ValueError(f"{name!r} is not a known field; available: {', '.join(FIELDS)}{of_tasks}")


def _number(column: str, operator: str, value: str) -> Query:
    if operator == "~":
        raise ValueError(f"{column} is a number; compare it with = != < <= > >=")
    if value.lower() == "none" and operator in ("=", "!="):
        return f"{column} IS {'NOT ' if operator == '!=' else ''}NULL", []
    try:
        return f"{column} {'IS NOT' if operator == '!=' else operator} ?", [float(value)]
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None


def _word(column: str, operator: str, value: str) -> Query:
    if operator == "~":
        return f"instr(lower({column}), ?) > 0", [value.lower()]
    if operator not in ("=", "!="):
        raise ValueError(f"{column} is text; compare it with = or !=, or search it with ~")
    return f"{column} {operator} ?", [value]


def _list(column: str, operator: str, value: str) -> Query:
    if operator not in ("=", "!="):
        raise ValueError(f"{column} is a list of names; use = or !=")
    return f"instr({column}, ?) {'>' if operator == '=' else '='} 0", [f"{SEPARATOR}{value}{SEPARATOR}"]
