"""What is looked at may be somebody else's: a run folder from elsewhere, and texts that models wrote."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import yaml

from astuner.contracts.errors import DataError

_DEEPEST, _LONGEST = 50, 1 << 20
"""Levels and bytes of a ``resolved.yaml``; ours have about ten levels, and no aliases, which multiply."""


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # several times as fast, where PyYAML came with it


def read_resolved(path: Path) -> Any:
    """What a run folder's ``resolved.yaml`` holds, in memory and time that its size bounds.

    :raises FileNotFoundError: there is none.
    :raises DataError: it is nothing that a run wrote.
    """
    if path.exists() and not (path.is_file() and path.stat().st_size <= _LONGEST):
        raise DataError(f"{path}: it is no file, or has more than {_LONGEST:,} bytes")
    try:
        text, depth = path.read_text(encoding="utf-8"), 0
        for event in yaml.parse(text, _Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth >= _DEEPEST or isinstance(event, yaml.AliasEvent):
                raise yaml.YAMLError(f"it has aliases, or more than {_DEEPEST} levels, as no run writes it")
        return yaml.load(text, _Loader)
    except (UnicodeDecodeError, yaml.YAMLError) as e:
        raise DataError(f"{path}: {e}") from None


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
