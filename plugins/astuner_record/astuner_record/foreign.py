"""What is looked at may be somebody else's: a run folder from elsewhere, and texts that models wrote."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import yaml

from astuner.contracts.errors import DataError

_DEEPEST, _LONGEST = 50, 1 << 20
"""Levels and characters of a ``resolved.yaml``; ours have about ten levels, and no aliases, which multiply."""


class _Resolved(yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > _DEEPEST or self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"it has aliases, or more than {_DEEPEST} levels, as no run writes it")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def read_resolved(path: Path) -> Any:
    """What a run folder's ``resolved.yaml`` holds, in memory and time that its size bounds.

    :raises FileNotFoundError: there is none.
    :raises DataError: it is nothing that a run wrote.
    """
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is no file")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_LONGEST + 1)
        if len(text) > _LONGEST:
            raise yaml.YAMLError(f"it has more than {_LONGEST:,} characters")
        return yaml.load(text, _Resolved)
    except (UnicodeDecodeError, yaml.YAMLError) as e:
        raise DataError(f"{path} cannot be read: {e}") from None


def is_plain_file(path: Path) -> bool:
    """Whether it is a file that stands there itself: no link to somewhere else, and nothing that never ends."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def shown(text: str) -> str:
    """``text`` without what nobody can see and a terminal obeys: control characters, and those that turn the direction
    of writing."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
