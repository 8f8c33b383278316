"""Columns of the episode log, and conversion of episodes to rows and back.

The columns validate a row before it is stored and define the parquet schema; ``docs/episode_log.md`` describes them. A
column can be added within a format: readers treat a missing column as null.

A turn that continues another stores only the prompt tokens after that turn's prompt and response. Free-form values are
stored as JSON text: values that JSON cannot express become text, non-finite numbers become null, and values that are
endless or larger than `LARGEST` are truncated with a note.

Invariant: `read_episode` of an `episode_row` returns the same tokens, logprobs (as float32), messages and verdict.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import msgspec
import orjson

from astuner.contracts.environment import Evaluation
from astuner.contracts.errors import safe_text
from astuner.contracts.interrupt import let_the_person_stop
from astuner.contracts.messages import mapping_of
from astuner.contracts.types import (
    Episode,
    ExternalTurn,
    FinishReason,
    Generation,
    JudgeOutput,
    Sample,
    Split,
    StopReason,
    Task,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)

Row = dict[str, Any]
T = TypeVar("T")
Kind: TypeAlias = "type | str"
"""Type of a column: `str`, `int`, `float` or `bool`, or an `array` type code for lists of numbers."""
IDS, LOGPROBS = "i", "f"
"""Lists of int32 and of float32, stored as little-endian bytes."""

TURN: Mapping[str, Kind] = {
    "index": int,
    "agent": str,
    "role": str,
    "policy": str,
    "trained": bool,
    "lost": bool,
    "continues": int,
    "branch_reason": str,
    "approximation": str,
    "finish_reason": str,
    "policy_version": int,
    "prompt_tokens": int,
    "response_tokens": int,
    "prompt_ids": IDS,
    "response_ids": IDS,
    "logprobs": LOGPROBS,
    "request": str,
    "tools": str,
    "reply": str,
    "started": float,
    "seconds": float,
}
EXTERNAL: Mapping[str, Kind] = {
    "index": int,
    "agent": str,
    "role": str,
    "model": str,
    "request": str,
    "reply": str,
    "prompt_tokens": int,
    "response_tokens": int,
    "started": float,
    "seconds": float,
}
EPISODE: Mapping[str, Kind | Mapping[str, Kind]] = {
    "episode_id": str,
    "group_id": str,
    "task_id": str,
    "step": int,
    "split": str,
    "attempt": int,
    "time": float,
    "query": str,
    "stop_reason": str,
    "reward": float,
    "rewards": str,
    "reward_source": str,
    "is_success": bool,
    "error": str,
    "seconds": float,
    "retries": int,
    "task": str,
    "output": str,
    "metrics": str,
    "turns": TURN,
    "external": EXTERNAL,
    "started": float,
}
CREDIT: Mapping[str, Kind] = {
    "step": int,
    "episode_id": str,
    "group_id": str,
    "agent": str,
    "role": str,
    "policy": str,
    "sample": int,
    "advantage": float,
    "token_weight": float,
    "reward": float,
    "tokens": int,
    "trained_tokens": int,
    "policy_version": int,
    "trainer_logprobs": LOGPROBS,
}


class Rows:
    """Factory of a table's rows, with a fast path for values that already have the column types."""

    def __init__(self, columns: Mapping[str, Any], within: str = "") -> None:
        """Create the factory.

        :param within: Column that contains such rows.
        """
        self._columns, self._within = columns, within
        self._fitting: set[tuple[type, ...]] = set()
        """Type tuples of values that need no conversion."""
        self._made = msgspec.defstruct("Row", list(columns), gc=False)

    def row(self, *values: Any) -> Any:
        """Return the values as a struct with the columns as attributes."""
        return self._made(*self.values(*values))

    def values(self, *values: Any) -> Sequence[Any]:
        """Return the values converted to the column types.

        :param values: One value per column, in their order.
        :raises ValueError: A value does not fit its column; the message names the column.
        """
        types = (*map(type, values),)
        if types in self._fitting:
            return values
        try:
            made = (*fitted(dict(zip(self._columns, values, strict=True)), self._columns).values(),)
        except ValueError as e:
            raise ValueError(f"{self._within}{e}") from e
        self._fitting.add((*map(type, made),))
        return made


def packed(row: Any) -> tuple[bytes, Any]:
    """Return an episode row as MessagePack, and the row as encoded, with lone surrogates escaped for UTF-8."""
    try:
        return _pack(row), row
    except UnicodeEncodeError:
        whole = EPISODES.row(*fitted(msgspec.to_builtins(row, builtin_types=(bytes,)), EPISODE).values())
        return _pack(whole), whole


_pack = msgspec.msgpack.Encoder().encode
EPISODES, CREDITS = Rows(EPISODE), Rows(CREDIT)
_TURNS, _OUTSIDE = Rows(TURN, "turns: "), Rows(EXTERNAL, "external: ")


def fitted(row: Mapping[str, Any], columns: Mapping[str, Any]) -> Row:
    """Return ``row`` with values converted to the column types, and lists of numbers as bytes.

    :raises ValueError: A value does not fit its column; the message names the column.
    """
    made: Row = {}
    for name, kind in columns.items():
        value = row.get(name)  # missing in logs of older versions
        try:
            made[name] = None if value is None else _fitted(value, kind)
        except (TypeError, ValueError, AttributeError, OverflowError) as e:
            raise ValueError(f"{name}: {e}") from e
    return made


def unpacked(row: dict[str, Any], columns: Mapping[str, Any]) -> Row:
    """Undo `fitted`: return lists of numbers as lists, and missing columns as null."""
    for name, kind in columns.items():
        value: Any = row.setdefault(name, None)
        if isinstance(kind, Mapping):
            row[name] = [unpacked(one, kind) for one in value]
        elif isinstance(value, bytes):
            row[name] = numbers(value, kind)
    return row


def numbers(data: bytes, letter: str) -> list[Any]:
    """Return the list of numbers stored in ``data``."""
    return array(letter, data).tolist()


def plain(value: Any) -> Any:
    """Return number-like and string-like values (enums, subclasses, numpy scalars) as plain types, arrays as lists.

    :raises TypeError: The value has another type.
    """
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    made = value.tolist() if hasattr(value, "tolist") else value
    if type(made) is type(value):  # numpy's long double has no Python equivalent
        raise TypeError(type(value).__name__)
    return made


def _fitted(value: Any, kind: Any) -> Any:
    if isinstance(kind, Mapping):
        return [one if isinstance(one, msgspec.Struct) else fitted(one, kind) for one in value]
    if isinstance(kind, str):
        if getattr(value, "dtype", None) == "float32" and kind == LOGPROBS:
            return value.tobytes()
        return array(kind, value).tobytes()
    value = value if type(value) is kind else kind(plain(value))
    if kind is str and not value.isascii():  # escape lone surrogates, which UTF-8 cannot encode
        return value.encode("utf-8", "backslashreplace").decode()
    return value


_SAME_OF_EPISODE = ("reward_source", "error", "seconds", "retries", "started")
"""Columns that are fields of an episode. `_SAME` lists the columns of a turn."""
_of_sample = attrgetter("episode_id", "group_id", "agent", "role", "policy")
_credit_of = attrgetter("advantage", "token_weight", "reward")


def episode_row(step: int, episode: Episode, time: float) -> Any:
    """Return the row of an episode, with columns as attributes, ready for `packed`.

    :param time: End of the episode, in seconds since 1970.
    :raises ValueError: A value does not fit its column; the message names the column.
    """
    of, verdict, output = episode.workflow_task, episode.verdict, episode.output
    earlier = {turn.index: turn for turn in episode.turns}
    task = {"init_messages": of.task.init_messages, "env_type": of.task.env_type, "metadata": of.task.metadata}
    return EPISODES.row(
        of.episode_id,
        of.group_id,
        of.task.task_id,
        step,
        of.split.value,
        of.attempt,
        time,
        of.task.main_query,
        episode.stop_reason.value,
        episode.reward,
        json_text(verdict.rewards) if verdict and verdict.rewards else None,
        episode.reward_source,
        episode.is_success,
        episode.error,
        episode.seconds,
        episode.retries,
        json_text(task),
        None if output is None else _output(output),
        json_text(verdict.metrics) if verdict and verdict.metrics else None,
        [_turn(turn, earlier) for turn in episode.turns],
        [_external(turn) for turn in episode.external],
        episode.started,
    )


def credit_rows(
    step: int, samples: Sequence[Sample], trainer: Mapping[int, Any] = MappingProxyType({})
) -> list[Sequence[Any]]:
    """Return the rows of a step's samples, numbered within each episode in the given order.

    :param trainer: Index in ``samples`` -> the trainer's log-probabilities, float32 [trained tokens].
    :raises ValueError: Log-probabilities and trained tokens differ in number, or a value does not fit.
    """
    numbers: dict[str, int] = {}
    rows = []
    for place, s in enumerate(samples):
        number = numbers.get(s.episode_id, 0)
        numbers[s.episode_id] = number + 1
        trained, logprobs = s.trained_tokens, trainer.get(place)
        if logprobs is not None and len(logprobs) != trained:
            raise ValueError(
                f"step {step}, episode {s.episode_id}, sample {number}: {trained} trained tokens, but "
                f"{len(logprobs)} log-probabilities from the trainer"
            )
        rows.append(
            CREDITS.values(
                step, *_of_sample(s), number, *_credit_of(s), len(s.input_ids), trained, s.policy_version, logprobs
            )
        )
    return rows


def read_episode(row: Row) -> Episode:
    """Return the episode of a row, with complete prompts."""
    task, output = json.loads(row["task"]), json.loads(row["output"] or "null")
    evaluation = None if output is None else output.pop("evaluation")
    workflow_task = WorkflowTask(
        task=Task(
            task_id=row["task_id"],
            main_query=row["query"],
            init_messages=task["init_messages"],
            env_type=task["env_type"],
            metadata=task["metadata"],
        ),
        episode_id=row["episode_id"],
        group_id=row["group_id"],
        split=Split(row["split"]),
        attempt=row["attempt"],
    )
    verdict = None
    if row["reward"] is not None:
        verdict = JudgeOutput(
            reward=row["reward"],
            is_success=row["is_success"],
            metrics=json.loads(row["metrics"] or "{}"),
            rewards=json.loads(row["rewards"] or "{}"),
        )
    return Episode(
        workflow_task=workflow_task,
        turns=_read_turns(row["turns"]),
        output=None if output is None else WorkflowOutput(**output, evaluation=evaluation and Evaluation(**evaluation)),
        verdict=verdict,
        stop_reason=StopReason(row["stop_reason"]),
        external=tuple(_read_external(turn) for turn in row["external"]),
        **{name: row[name] for name in _SAME_OF_EPISODE},
    )


def json_text(value: Any) -> str:
    """Return standard JSON."""
    try:
        return _encode(value).decode()
    except TypeError:
        return _spelled_out(value)


def _spelled_out(value: Any) -> str:
    text = json.dumps(_Spelling().of(value, 0), ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()  # \ud800 is valid in JSON


_encode = partial(
    orjson.dumps,
    option=orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS,
)
"""Accept JSON's own types only, and encode non-finite numbers as null.

`_Spelling` converts everything else first. The encoder therefore runs no code of the values, and writes no hidden
fields of objects.
"""
_DEEPEST = 40
"""Nesting depth below which a value is written as text; this also ends cycles."""
_MOST_BITS = 2048
"""Bits of an integer that is written as a number. Python may refuse to read more digits."""
LARGEST = 16_000_000
"""Maximum characters of a workflow's output or a converted value; the remaining characters are dropped."""
_OF_A_MEMBER = 64
"""Characters counted for each member of a container."""


class _Spelling:
    """Conversion of one value to JSON types. It may run arbitrary code of the value."""

    def __init__(self) -> None:
        self._left = LARGEST

    def of(self, value: Any, depth: int) -> Any:
        try:
            return self._of(value, depth)
        except BaseException as e:
            let_the_person_stop(e)
            return f"<{type(value).__name__}>"

    def _of(self, value: Any, depth: int) -> Any:
        self._left -= _OF_A_MEMBER
        if type(value) is float:
            return value if math.isfinite(value) else None
        if type(value) is int:
            return value if value.bit_length() <= _MOST_BITS else f"<an integer of {value.bit_length():,} bits>"
        if type(value) is str:
            self._left -= len(value)
            return value if self._left >= 0 else f"<{len(value):,} characters, too many for the log>"
        if value is None or type(value) is bool:
            return value
        if depth >= _DEEPEST or self._left < 0:
            return f"<{type(value).__name__}>"
        value = mapping_of(value)
        if isinstance(value, Mapping):
            return {safe_text(k): self.of(v, depth + 1) for k, v in self._some(value.items())}
        if isinstance(value, (list, tuple)):
            return [self.of(v, depth + 1) for v in self._some(value)]
        try:
            return self.of(plain(value), depth + 1)
        except TypeError:
            return safe_text(value)

    def _some(self, members: Iterable[T]) -> list[T]:
        """Return the current members, up to the remaining limit."""
        return list(islice(members, self._left // _OF_A_MEMBER + 1))


def _fits(value: Any) -> bool:
    """Return whether the JSON types in a value are at most `LARGEST` in size, counting repeated objects each time."""
    left, waiting = LARGEST, [value]
    while waiting:
        one = waiting.pop()
        kind = type(one)
        left -= _OF_A_MEMBER
        if kind is str:
            left -= len(one)
        elif kind is dict:
            waiting += one
            waiting += one.values()
        elif kind is list or kind is tuple:
            waiting += one
        if left < len(waiting) * _OF_A_MEMBER:
            return False
    return True


def _output(output: WorkflowOutput) -> str:
    said = output.evaluation
    row: Row = {name: getattr(output, name) for name in ("reward", "is_success", "metrics")}
    row["evaluation"] = said and {"score": said.score, "success": said.success, "details": said.details}
    row |= {"metadata": output.metadata, "response": output.response}
    return json_text(row) if _fits(row) else _spelled_out(row)


_SAME = (
    "index", "agent", "role", "policy", "trained", "lost", "continues", "branch_reason", "approximation",
)  # fmt: skip
"""Columns that are fields of a turn, except `_TIMES`."""
_SAME_OUTSIDE = ("index", "agent", "role", "model")
_TIMES = ("started", "seconds")
_of_turn, _of_outside = attrgetter(*_SAME), attrgetter(*_SAME_OUTSIDE)


def _turn(turn: Turn, earlier: Mapping[int, Turn]) -> Any:
    said = turn.generation
    prompt, response = said.prompt_ids, said.response_ids
    inherited = 0
    if turn.continues is not None and turn.continues in earlier:
        before = earlier[turn.continues].generation
        inherited = len(before.prompt_ids) + len(before.response_ids)
    return _TURNS.row(
        *_of_turn(turn),
        said.finish_reason.value,
        said.policy_version,
        len(prompt),
        len(response),
        array(IDS, prompt[inherited:] if inherited else prompt).tobytes(),
        array(IDS, response).tobytes(),
        array(LOGPROBS, said.logprobs).tobytes(),
        json_text(turn.request),
        json_text(turn.tools) if turn.tools else None,
        json_text(turn.message),
        turn.started,
        turn.seconds,
    )


def _read_turns(rows: Sequence[Row]) -> tuple[Turn, ...]:
    turns: dict[int, Turn] = {}
    for row in rows:
        new = tuple(row["prompt_ids"])
        if inherited := row["prompt_tokens"] - len(new):
            before = turns[row["continues"]].generation
            new = (*before.prompt_ids, *before.response_ids)[:inherited] + new
        generation = Generation(
            prompt_ids=new,
            response_ids=tuple(row["response_ids"]),
            logprobs=tuple(row["logprobs"]),
            finish_reason=FinishReason(row["finish_reason"]),
            policy_version=row["policy_version"],
        )
        turns[row["index"]] = Turn(
            **{name: row[name] for name in (*_SAME, *_TIMES)},
            generation=generation,
            request=tuple(json.loads(row["request"])),
            tools=tuple(json.loads(row["tools"] or "[]")),
            message=json.loads(row["reply"]),
        )
    return tuple(turns.values())


def _external(turn: ExternalTurn) -> Any:
    request, reply = json_text(turn.request), json_text(turn.message)
    counts = turn.prompt_tokens, turn.completion_tokens
    return _OUTSIDE.row(*_of_outside(turn), request, reply, *counts, turn.started, turn.seconds)


def _read_external(row: Row) -> ExternalTurn:
    return ExternalTurn(
        **{name: row[name] for name in (*_SAME_OUTSIDE, *_TIMES, "prompt_tokens")},
        request=tuple(json.loads(row["request"])),
        message=json.loads(row["reply"]),
        completion_tokens=row["response_tokens"],
    )
