"""Conditions on episodes as people write them: ``reward>=0.5``, ``agent=wolf``, ``text~apple pie``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from astuner.contracts.errors import ConfigError
from astuner_record.episode_log.store import SEPARATOR, match_of

Value: TypeAlias = str | int | float
Query: TypeAlias = tuple[str, list[Value]]
"""SQL for the table ``episodes``, and its parameters."""

NUMBERS = {
    "step": "step",
    "attempt": "attempt",
    "reward": "reward",
    "seconds": "seconds",
    "retries": "retries",
    "turns": "turns",
    "tokens": "tokens",
    "prompt_tokens": "prompt_tokens",
    "branches": "branches",
}
"""Name in a condition -> column."""
WORDS = {
    "episode": "episode_id",
    "group": "group_id",
    "task": "task_id",
    "split": "split",
    "stop_reason": "stop_reason",
    "error": "error",
    "query": "query",
}
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
        return _number(NUMBERS[name], operator, value)
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
        return "id IN (SELECT rowid FROM text WHERE text MATCH ?)", [asked]
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
