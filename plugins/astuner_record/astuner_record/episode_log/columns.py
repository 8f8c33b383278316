"""The columns of the episode log: what it holds of an episode, a turn, an answer from outside, and a sample.

The same table checks a row before it is stored, makes the columns of a parquet file, and is described in
``docs/episode_log.md``.  A column may be added within a format: who reads a row takes one that is not there for null.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeAlias

Row = dict[str, Any]
Kind: TypeAlias = "type | str"
"""Of a column: `str`, `int`, `float` or `bool`; or numbers, `IDS` or `LOGPROBS`, by `array`'s letters."""
IDS, LOGPROBS = "i", "f"
"""Lists of int32, of float32; stored as their bytes, little-endian."""

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


def fitted(row: Mapping[str, Any], columns: Mapping[str, Any]) -> Row:
    """``row`` with each value as its column has it; lists of numbers as their bytes.

    :raises ValueError: a value does not fit its column; names the column.
    """
    made: Row = {}
    for name, kind in columns.items():
        value = row.get(name)  # an older log may not have it
        if value is not None and (type(value) is not kind or (kind is str and not value.isascii())):
            try:
                value = [fitted(one, kind) for one in value] if isinstance(kind, Mapping) else _fitted(value, kind)
            except (TypeError, ValueError, AttributeError, OverflowError) as e:
                raise ValueError(f"{name}: {e}") from e
        made[name] = value
    return made


def unpacked(row: dict[str, Any], columns: Mapping[str, Any]) -> Row:
    """What was `fitted`, with lists of numbers as such; a column that is not there is null."""
    for name, kind in columns.items():
        value: Any = row.setdefault(name, None)
        if isinstance(kind, Mapping):
            row[name] = [unpacked(one, kind) for one in value]
        elif isinstance(value, bytes):
            row[name] = numbers(value, kind)
    return row


def numbers(data: bytes, letter: str) -> list[Any]:
    """The list whose bytes these are."""
    return array(letter, data).tolist()


def plain(value: Any) -> Any:
    """What is nearly a number or text, as judges, readers and agents' names bring it, as one; arrays as lists.

    :raises TypeError: it is something else.
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
    if type(made) is type(value):  # numpy's long double is its own
        raise TypeError(type(value).__name__)
    return made


def _fitted(value: Any, kind: Any) -> Any:
    if isinstance(kind, str):
        if getattr(value, "dtype", None) == "float32" and kind == LOGPROBS:
            return value.tobytes()
        return array(kind, value).tobytes()
    value = value if type(value) is kind else kind(plain(value))
    if kind is str and not value.isascii():  # half a character, which UTF-8 cannot hold, is spelled out
        return value.encode("utf-8", "backslashreplace").decode()
    return value
