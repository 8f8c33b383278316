"""Read run folders and texts from untrusted sources."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import yaml

from astuner.contracts.errors import DataError

_DEEPEST, _LONGEST = 50, 1 << 20
"""Maximum nesting and bytes of a ``resolved.yaml``. ASTuner writes about ten levels and no aliases."""


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # several times faster, if PyYAML includes it


def read_resolved(path: Path) -> Any:
    """Return the content of a run folder's ``resolved.yaml``, within bounded memory and time.

    :raises FileNotFoundError: The file does not exist.
    :raises DataError: ASTuner did not write this file.
    """
    if path.exists() and not (path.is_file() and path.stat().st_size <= _LONGEST):
        raise DataError(f"{path} is not a regular file, or is larger than {_LONGEST:,} bytes.")
    try:
        text, depth = path.read_text(encoding="utf-8"), 0
        for event in yaml.parse(text, _Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth >= _DEEPEST or isinstance(event, yaml.AliasEvent):
                raise yaml.YAMLError(f"aliases or more than {_DEEPEST} levels: ASTuner did not write this file")
        return yaml.load(text, _Loader)
    except (UnicodeDecodeError, yaml.YAMLError) as e:
        raise DataError(f"{path}: {e}") from None


def is_plain_file(path: Path) -> bool:
    """Return whether the path is a regular file: not a link, pipe or device."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def shown(text: str) -> str:
    """Return ``text`` without control characters and bidirectional formatting, which a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
