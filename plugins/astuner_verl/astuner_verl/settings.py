"""The ``verl:`` section of an experiment file: VERL's own keys, spelled as VERL spells them.

Nested (``trainer: {device: npu}``) or dotted (``trainer.device: npu``), in the file or as ``verl.trainer.device=npu``
on the command line.  A leading ``+`` adds a key that VERL's YAML files do not have, as in Hydra.  What the keys mean
is VERL's business: whether it has them, and which of them ASTuner must set itself, `astuner_verl.native` knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import model_validator

from astuner.config.schema import OpenSection


class VerlSettings(OpenSection):
    """VERL's own keys; they win over what ASTuner would have told VERL."""

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        nested: dict[str, Any] = {}
        seen: set[str] = set()
        for key, value in _flat(data):
            if spelled(key) in seen:
                raise ValueError(f"{key} is written twice, in two spellings; keep one")
            seen.add(spelled(key))
            _put(nested, key, value)
        return nested

    def keys(self) -> dict[str, Any]:
        """VERL's key as `spelled` -> what the person wrote."""
        return {spelled(key): value for key, value in _flat(self.model_extra or {})}


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of nested ``data`` that hold no further section, dotted."""
    for name, value in data.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping) and value:
            yield from _flat(value, key)
        else:
            yield key, value


def spelled(key: str) -> str:
    """A dotted key with its ``+`` at the last name: ``+a.b`` and ``a.+b`` are one key."""
    parts = key.split(".")
    added = any(part.startswith("+") for part in parts)
    *sections, name = (part.removeprefix("+") for part in parts)
    return ".".join([*sections, f"+{name}" if added else name])


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        if data.get(section) is None:  # `rollout:` alone is empty
            data[section] = {}
        data = data[section]
        if not isinstance(data, dict):
            raise ValueError(f"{key} is written below {section}, which is given a value too; keep one")
    if value or not isinstance(data.get(name), dict):
        data[name] = value
