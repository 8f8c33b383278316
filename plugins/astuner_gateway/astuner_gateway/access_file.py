"""The file by which applications find a server of ours: its address and its key.

Invariant: it is for this user only, and whoever sees it sees all of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from astuner import home_folder


def write(kind: str, name: int | str, access: Mapping[str, object]) -> Path:
    """Write ``$ASTUNER_HOME/KIND/NAME.json``; a server, whose name is its port, removes it when it ends.

    :raises RunError: the folder cannot be made.
    """
    folder = home_folder(kind)
    path = folder / f"{name}.json"
    temporary = folder / f".{name}.{os.getpid()}"
    temporary.unlink(missing_ok=True)  # of a process that was killed and had the same number
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(access, file, indent=1)
    os.replace(temporary, path)  # and with it one of a server that was killed, whatever its permissions
    return path


@contextmanager
def kept(kind: str, port: int, access: Mapping[str, object]) -> Iterator[Path]:
    """The file, for as long as the block runs."""
    path = write(kind, port, access)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
