"""Which keys Trinity has, and of which kind their values are: asked of Trinity's own `Config`.

Importing it takes a second and brings Ray and OmegaConf, no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from astuner.contracts.errors import MissingDependency
from astuner_ray.native.compose import HAS_KEYS, no_key
from astuner_trinity.always import VERL
from astuner_trinity.locked import why_locked

OF_VERL = tuple(f"{VERL}.{name}" for name in ("model", "actor", "ref"))
"""What of VERL's configuration Trinity takes from a person; it drops the rest in silence."""


def trinity_config() -> type[Any]:
    """Trinity's `Config`.

    :raises MissingDependency: Trinity is not installed.
    """
    try:
        from trinity.common.config import Config
    except ImportError as e:
        raise MissingDependency(
            f"the backbone trinity needs Trinity-RFT, which cannot be imported here ({e}): pip install astuner-trinity"
        ) from e
    found: type[Any] = Config
    return found


@functools.cache
def every_key() -> Mapping[str, Any]:
    """Trinity's keys and sections, dotted, with their types; `HAS_KEYS` for one that has keys."""
    known = dict(_walk(trinity_config(), ""))
    known[VERL] = HAS_KEYS
    return {**known, **dict.fromkeys(OF_VERL, dict)}


def wrong(key: str, value: Any, known: Mapping[str, Any]) -> str:
    """What is wrong with one of a person's keys, or an empty string."""
    if reason := why_locked(key):
        return f"is set by ASTuner: {reason}"
    if key in known:
        return _unlike(key, value, known[key])
    if _is_free(key, known):
        return ""
    return no_key(key, known, why_locked, engine="Trinity")


def _walk(config: type[Any], prefix: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        kind, key = _without_none(hints[field.name]), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(kind):
            yield key, HAS_KEYS
            yield from _walk(kind, f"{key}.")  # type: ignore[arg-type]  # a class, not an instance
        else:
            yield key, kind


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return next(one for one in get_args(kind) if one is not type(None))
    return kind


def _is_free(key: str, known: Mapping[str, Any]) -> bool:
    """Whether Trinity leaves what stands below a section of ``key`` to the person."""
    while key and key not in known:
        key = key.rpartition(".")[0]
    return bool(key) and (known[key] is Any or (get_origin(known[key]) or known[key]) is dict)


def _unlike(key: str, value: Any, kind: Any) -> str:
    """What kind of value Trinity asks for, if ``value`` is of another; Trinity's schema is the judge."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if kind is HAS_KEYS:
        return "" if isinstance(value, Mapping) else "is a section of Trinity's; write keys below it"
    if key in OF_VERL:
        return "" if isinstance(value, Mapping) else "is a section of VERL's; write keys below it"
    if kind is bool and not isinstance(value, bool):  # OmegaConf would take "no", 1 and 0
        return f"should be true or false, got {value!r}"
    if kind is str and not isinstance(value, str):  # OmegaConf would take any number
        return f"should be text, got {value!r}"
    section, _, name = key.rpartition(".")
    try:
        OmegaConf.merge(OmegaConf.structured(_class_of(section)), {name: value})
    except (OmegaConfBaseException, AttributeError) as e:  # Trinity's enumerations ask any value for its lower case
        reason = " ".join(str(e).split("full_key")[0].split())
        return f"should be {_named(kind)}, got {value!r}" if _named(kind) else f"is not what Trinity takes: {reason}"
    return ""


def _class_of(section: str) -> type[Any]:
    """Trinity's class for a section of keys."""
    found = trinity_config()
    for name in filter(None, section.split(".")):
        found = _without_none(get_type_hints(found)[name])
    return found


def _named(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(str(member.value) for member in kind)}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, "")
