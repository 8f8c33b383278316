"""A JSON schema's validator that counts what it does and gives up in time.

A schema that leads back to itself can double the work with every level of the answer, so the schema alone does not
bound it.  Invariant: inside `limited`, validation ends after a number of steps, by its result or by `TooMuchWork`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

from astuner_gateway.endpoint.patterns import MOST_WORK, work_of
from astuner_gateway.endpoint.schema_limits import LONGEST_KEY

_CHARACTERS = 1000
"""Of an answer, that are quoted in a mistake for the price of one step."""


class TooMuchWork(Exception):
    """The answer cannot be checked in the steps that there are."""


class _Budget:
    def __init__(self, steps: int, length: int) -> None:
        self.left = steps
        self.mistake = 1 + length // _CHARACTERS  # each quotes the value it is about

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooMuchWork("the schema needs too many steps for it")


_budget: contextvars.ContextVar[_Budget] = contextvars.ContextVar("astuner_schema_budget")


@contextlib.contextmanager
def limited(steps: int, length: int = 0) -> Iterator[None]:
    """Validators made by `counted` may take ``steps`` in here.

    :param length: characters of the text that is checked.
    """
    token = _budget.set(_Budget(steps, length))
    try:
        yield
    finally:
        _budget.reset(token)


@functools.lru_cache(maxsize=16)
def counted(kind: Any) -> Any:
    """A validator class like ``kind``, to be used inside `limited` only."""
    import jsonschema

    special = {"pattern": _pattern, "patternProperties": _keys, "uniqueItems": _unique}
    keywords = {}
    for name, keyword in kind.VALIDATORS.items():
        keywords[name] = _counting(special[name](keyword) if name in special else keyword)
    return jsonschema.validators.extend(kind, validators=keywords)


def _counting(keyword: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    def count(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        budget = _budget.get()
        budget.spend(1 + _length(value) // 4 + _length(instance) // 4)
        for error in keyword(validator, value, instance, schema) or ():
            budget.spend(budget.mistake)
            yield error

    return count


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, dict)) else 0


def _pattern(keyword: Callable[..., Any]) -> Callable[..., Any]:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if not isinstance(instance, str):
            return ()
        steps = work_of(value).steps(len(instance))
        if steps > MOST_WORK:
            raise TooMuchWork(f"a text of {len(instance)} characters is too long for the pattern {value[:80]!r}")
        _budget.get().spend(steps // 1000)
        return keyword(validator, value, instance, schema)

    return check


def _keys(keyword: Callable[..., Any]) -> Callable[..., Any]:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if not isinstance(instance, dict):
            return ()
        if any(len(key) > LONGEST_KEY for key in instance):
            raise TooMuchWork(f"a key has more than the {LONGEST_KEY} characters that patternProperties looks at")
        each = sum(1 + sum(work_of(pattern).steps(len(key)) for pattern in value) // 1000 for key in instance)
        _budget.get().spend(2 * each)  # additionalProperties compares them once more
        return keyword(validator, value, instance, schema)

    return check


def _unique(keyword: Callable[..., Any]) -> Callable[..., Any]:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        import jsonschema

        if not value or not isinstance(instance, list):
            return
        if len({_frozen(item) for item in instance}) < len(instance):  # theirs compares each with each
            yield jsonschema.ValidationError("it has the same item twice")

    return check


def _frozen(value: Any) -> Any:
    """Hashable, and equal for what JSON Schema calls equal."""
    if isinstance(value, list):
        return ("list", *(_frozen(item) for item in value))
    if isinstance(value, dict):
        return "dict", frozenset((key, _frozen(item)) for key, item in value.items())
    return (type(value).__name__, value) if isinstance(value, (bool, str)) or value is None else ("number", value)
