"""Read the engine's own keys, which users write below the root section of its backbone.

Keys are nested (``trainer: {device: npu}``) or dotted (``trainer.device: npu``), in the file or on the command line
(``verl.trainer.device=npu``).  A leading ``+`` adds a key that the engine's own files do not have, as in Hydra.  The
engine defines the meaning of the keys.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from astuner.contracts.errors import ConfigError
from astuner.contracts.places import Place
from astuner.contracts.section import OpenSection

if TYPE_CHECKING:
    from astuner import Config


class EngineSection(OpenSection):
    """Settings of the engine itself in the ``verl:`` or ``trinity:`` section, with the engine's own keys.

    They take precedence over values that ASTuner sets.
    """

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        nested: dict[str, Any] = {}
        seen: set[str] = set()
        for key, value in flat(data):
            if spelled(key) in seen:
                raise ValueError(f"{key} is written twice in different forms; keep one")
            seen.add(spelled(key))
            put(nested, key, value)
        return nested

    def keys(self) -> dict[str, Any]:
        """Return the engine keys, as `spelled`, with the values that the user wrote."""
        return {spelled(key): value for key, value in flat(self.model_extra or {})}


def flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaf keys of nested ``data`` in dotted form."""
    for name, value in data.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping) and value:
            yield from flat(value, key)
        else:
            yield key, value


def put(data: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted ``key`` of nested ``data``; an empty section removes nothing.

    :raises ValueError: A parent section has a value.
    """
    *sections, name = key.split(".")
    for section in sections:
        if data.get(section) is None:  # `rollout:` alone is empty
            data[section] = {}
        data = data[section]
        if not isinstance(data, dict):
            raise ValueError(f"{key} is below {section}, which also has a value; keep one")
    if value or not isinstance(data.get(name), dict):
        data[name] = value


def get(data: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of the dotted ``key`` of nested ``data``."""
    at: Any = data
    for name in key.split("."):
        if not isinstance(at, Mapping) or name not in at:
            return default
        at = at[name]
    return at


def spelled(key: str) -> str:
    """Return a dotted key with its ``+`` at the last name: ``+a.b`` and ``a.+b`` are the same key."""
    parts = key.split(".")
    added = any(part.startswith("+") for part in parts)
    *sections, name = (part.removeprefix("+") for part in parts)
    return ".".join([*sections, f"+{name}" if added else name])


def written(config: Config, section: str) -> Mapping[str, Any]:
    """Return the engine keys below ``section`` that the user wrote; empty for another backbone's section."""
    found = config.backbone_section(section)
    return found.keys() if isinstance(found, EngineSection) else {}


def place_of(config: Config, section: str, key: str) -> Place:
    """Return where the user wrote an engine key in any form; for a section, the place of its first key."""
    places = []
    for other, place in config.origins.items():
        root, _, below = other.partition(".")
        if root == section and spelled(below) == key:
            return place
        if root == section and spelled(below).startswith(f"{key}."):
            places.append(place)
    return min(places, key=_order, default=Place(str(config.path)))


def refuse(problems: list[tuple[Place, str]]) -> None:
    """Raise an error for ``problems``, if there are any.

    :raises ConfigError: All problems, in the order of the file.
    """
    if problems:
        raise ConfigError([f"{place}: {message}" for place, message in sorted(problems, key=lambda p: _order(p[0]))])


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the key with the most similar last name, then section; empty if none is similar."""
    known = list(known)
    last = difflib.get_close_matches(name.rpartition(".")[2], {k.rpartition(".")[2] for k in known}, n=1)
    named = [k for k in known if k.rpartition(".")[2] in last]
    return next(iter(difflib.get_close_matches(name, named, n=1)), "")


def _order(place: Place) -> tuple[bool, int, int]:
    return not place.line, place.line, place.column
