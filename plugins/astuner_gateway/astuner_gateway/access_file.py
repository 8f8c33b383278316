"""Write the file in which applications find the address and key of an ASTuner server.

Invariant: only the current user can read the file, and readers never see a partial file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from astuner import home_folder


def write(kind: str, name: int | str, access: Mapping[str, object]) -> Path:
    """Write ``$ASTUNER_HOME/KIND/NAME.json`` and return its path.

    A server uses its port as the name and removes the file when it stops.

    :raises RunError: The directory cannot be created.
    """
    folder = home_folder(kind)
    path = folder / f"{name}.json"
    temporary = folder / f".{name}.{os.getpid()}"
    temporary.unlink(missing_ok=True)  # left by a killed process that had the same process ID
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(access, file, indent=1)
    os.replace(temporary, path)  # also replaces the file of a killed server, whatever its permissions
    return path


@contextmanager
def kept(kind: str, port: int, access: Mapping[str, object]) -> Iterator[Path]:
    """Keep the file for as long as the block runs."""
    path = write(kind, port, access)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
