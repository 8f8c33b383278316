"""Toy environments, and a service that serves them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from astuner_env.manager.served import ServedEnvironment

from ._service import TOYS, Live, served


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of its own, so that its path marks the processes of this session."""
    return Path(shutil.copy(TOYS, tmp_path_factory.mktemp("toys") / "toys.py"))


@pytest.fixture(scope="session")
def counter(toys: Path) -> ServedEnvironment:
    return served("counter", f"{toys}:Counter", splits=("train", "dev"), summary="counts")


@pytest.fixture(scope="session")
def hasty(counter: ServedEnvironment) -> ServedEnvironment:
    """The same, with no patience at all."""
    return served("hasty", counter.provider.target, create_timeout=2.0, step_timeout=0.7, evaluate_timeout=0.7)


@pytest.fixture(scope="session")
def service(
    counter: ServedEnvironment, hasty: ServedEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    """A service for all tests that leave nothing behind in it."""
    with Live([counter, hasty], max_instances=8, parent=tmp_path_factory.mktemp("root")) as live:
        yield live
