"""The real AppWorld: its package in its own interpreter, a root of invented people, and the environment service.

Everything is made at test time in temporary folders, once for all tests: one root, one service.  Where AppWorld's
interpreter is missing (Python 3.10), the tests that need it are skipped, or fail where they must not be
(`conftest.py` of the repository).
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from astuner import Evaluation
from astuner.contracts.environment import StepResult
from astuner.contracts.types import Task
from astuner_appworld.setup import AppWorldSetup
from astuner_env import settings as kept_settings
from astuner_env.env_service.client import EnvClient, RemoteEnvironment
from astuner_env.environment_setup import EnvironmentSettings

REPOSITORY = Path(__file__).resolve().parents[3]


_PATIENCE = 600
"""Seconds; the first test makes the root and imports AppWorld, which takes minutes on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(2 * _PATIENCE))


def action(code: str) -> dict[str, Any]:
    """What an agent says that runs ``code``."""
    return {"role": "assistant", "content": f"Let me do this.\n```python\n{code}\n```"}


@dataclass
class Played:
    """One episode: what the agent saw, and what it was worth."""

    opening: StepResult
    steps: list[StepResult]
    evaluation: Evaluation

    @property
    def seen(self) -> str:
        return "\n".join(step.observation for step in self.steps)


Play = Callable[..., Played]


@pytest.fixture(scope="session")
def appworld_python(needed: Callable[[str], None]) -> str:
    needed("appworld")
    return str(REPOSITORY / ".venv-appworld" / "bin" / "python")


@pytest.fixture(scope="session")
def appworld_settings(appworld_python: str, tmp_path_factory: pytest.TempPathFactory) -> EnvironmentSettings:
    """As ``astuner env setup appworld synthetic=true`` leaves them."""
    folder = tmp_path_factory.mktemp("appworld")
    settings = EnvironmentSettings(python=appworld_python)
    return AppWorldSetup().setup(settings, folder, {"synthetic": "true"}, lambda line: None)


@pytest.fixture(scope="session")
def root(appworld_settings: EnvironmentSettings) -> Path:
    return Path(appworld_settings.environ["APPWORLD_ROOT"])


@pytest.fixture(scope="session")
def service_home(appworld_settings: EnvironmentSettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose settings lead to the interpreter and the root."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASTUNER_HOME", str(home))
        kept_settings.save("appworld", appworld_settings)
    return home


@pytest.fixture(scope="session")
def service_url(service_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real service with the real AppWorld, on a port of its own."""
    log = tmp_path_factory.mktemp("service") / "service.log"
    command = [sys.executable, "-m", "astuner_env", "serve", "appworld", "--port", "0"]
    environ = {**os.environ, "ASTUNER_HOME": str(service_home), "PYTHONUNBUFFERED": "1"}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        lines: queue.Queue[str] = queue.Queue()
        assert process.stdout is not None
        reader = threading.Thread(target=lambda out: [lines.put(line) for line in out], args=(process.stdout,))
        reader.start()
        try:
            line = lines.get(timeout=_PATIENCE)
            assert line.startswith("Starting server on "), f"{line}\n{log.read_text()}"
            yield "http://" + line.removeprefix("Starting server on ").strip()
        finally:
            process.terminate()
            try:
                process.wait(timeout=_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            finally:
                reader.join(timeout=_PATIENCE)


@pytest.fixture(scope="session")
def client(service_url: str) -> EnvClient:
    return EnvClient(service_url)


@pytest.fixture(scope="session")
def play(client: EnvClient) -> Play:
    """Play a task with these pieces of code, one per step; evaluated after the last."""

    def play(task_id: str, *codes: str, **params: Any) -> Played:
        environment = RemoteEnvironment(params, client=client, env_type="appworld")
        try:
            opening = environment.reset(Task(task_id=task_id, env_type="appworld"))
            steps = [environment.step(action(code)) for code in codes]
            return Played(opening, steps, environment.evaluate())
        finally:
            environment.close()

    return play
