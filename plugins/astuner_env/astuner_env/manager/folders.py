"""The service's root: a folder of its own with a scratch folder for each instance, and nothing is written elsewhere.

Names in it are chosen here and never come from a request.  A service that was killed leaves its root behind; the next
one to start removes it.
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from types import TracebackType

from astuner_sandbox.isolation import scratch

_PREFIX = "astuner-env-"

log = logging.getLogger("astuner_env.folders")


class Root:
    """A fresh root; a context manager that removes it."""

    def __init__(self, parent: Path | None = None) -> None:
        self._root = scratch.Root(_PREFIX, parent)
        self.path = self._root.path

    def home(self, environment: str) -> Path:
        """The folder of an environment's zygote."""
        return self.path / environment / "zygote"

    def scratch(self, environment: str) -> Path:
        """A new, empty folder for an instance."""
        folder = self.path / environment / f"i-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700, parents=True)
        return folder

    def __enter__(self) -> Root:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._root.close()
        except OSError as e:
            _left(self.path, e)


def remove(*left: Path) -> None:
    """Remove what an instance left; what resists is logged, and stays until the machine is cleaned."""
    for path in left:
        try:
            scratch.remove(path)
        except OSError as e:
            _left(path, e)


def _left(path: Path, error: OSError) -> None:
    log.error("cannot be removed", extra={"path": str(path), "error": str(error)})
