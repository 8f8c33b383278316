"""VERL on several machines: these tests run in `.venv-verl` (``make test-nodes``); `tests/NODES.md` tells more."""

from __future__ import annotations

from tests.verl.conftest import cpu_env, pytest_configure

__all__ = ["cpu_env", "pytest_configure"]
