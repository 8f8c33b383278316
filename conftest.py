"""What some tests need of the machine: without it they are skipped, or fail where the machine should have it.

``ASTUNER_TESTS_REQUIRE=appworld,confinement`` names what it should have; `make test` finds that out
(`tests/should_have.py`). Whatever was skipped for the lack of it is said at the end, in so many words.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

OF_ENGINES = {"transfer_queue": "verl", "trinity": "trinity", "llama_cpp": "llama_cpp", "vllm": "vllm"}
"""A module that only an engine's environment has -> the folder of the tests that run there, by make test-<engine>."""
collect_ignore = [f"tests/{folder}" for module, folder in OF_ENGINES.items() if not importlib.util.find_spec(module)]
collect_ignore += ["tests/nodes"] if "tests/verl" in collect_ignore else []  # it runs VERL, by make test-nodes
if importlib.util.find_spec("hypothesis"):  # not in those environments
    import hypothesis

    hypothesis.settings.register_profile("quick", deadline=None, max_examples=25)  # no deadline: machines may be busy
    hypothesis.settings.register_profile("thorough", deadline=None, max_examples=400)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what is started here inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)
SLOW_FOLDERS = tuple(f"tests/{name}" for name in ("frameworks", "llama_cpp", "packaging", "trinity", "verl", "vllm"))
SLOW_FIXTURES = {"appworld_python"}
AGENTS = ("frameworks", "agentscope-1.0.7", "agentscope-1.0.21")
"""The environments ``.venv-NAME`` of tests/frameworks, whose packages exclude one another."""
SLOW_NEEDS = {"appworld", "chromium", *AGENTS}
"""What needs an environment of its own is slow whatever it takes; the rest says so itself, by ``mark.slow``."""
REQUIRE = "ASTUNER_TESTS_REQUIRE"
ROOT = Path(__file__).resolve().parent
APPWORLD = ROOT / ".venv-appworld"


def _appworld() -> str:
    if (APPWORLD / ".done").is_file():
        return ""
    return "AppWorld's interpreter is not there; type: make .venv-appworld/.done (Python 3.11 to 3.13)"


def _confinement() -> str:
    from astuner_sandbox.isolation.confine import available  # most packages' own tests do without it

    return f"this kernel does not confine wholly: {available()}" if available().missing else ""


def _chromium() -> str:
    if shutil.which("chromium"):
        return ""
    return "the browser is not installed; as root, type: apt-get install --no-install-recommends chromium"


def _agents(name: str) -> str:
    folder = ROOT / f".venv-{name}"
    return "" if (folder / ".done").is_file() else f"{folder.name} is missing; type: make {folder.name}/.done"


def _tracker(name: str) -> str:
    there = all(importlib.util.find_spec(module) for module in (name, *(("alembic",) if name == "mlflow" else ())))
    return "" if there else f"{name} is not installed; type: pip install 'plugins/astuner_trackers[{name}]'"


NEEDS: dict[str, Callable[[], str]] = {
    "appworld": _appworld,
    "chromium": _chromium,
    "confinement": _confinement,
    **{name: partial(_agents, name) for name in AGENTS},
    **{name: partial(_tracker, name) for name in ("mlflow", "swanlab", "wandb")},
}
"""Name -> why it is not there; "" when it is."""
_missed: dict[str, int] = {}


def pytest_configure(config: pytest.Config) -> None:
    unknown = sorted(required() - set(NEEDS))
    if unknown:
        raise pytest.UsageError(f"{REQUIRE} names {unknown[0]!r}; there are {', '.join(NEEDS)}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        needs = {name for mark in item.iter_markers("needs") for name in mark.args}
        fixtures = set(getattr(item, "fixturenames", ()))
        folder = "/".join(item.path.relative_to(ROOT).parts[:2])
        if folder in SLOW_FOLDERS or SLOW_FIXTURES & fixtures or SLOW_NEEDS & needs:
            item.add_marker("slow")


def required() -> set[str]:
    return {name.strip() for name in os.environ.get(REQUIRE, "").split(",")} - {""}


def need(name: str) -> None:
    """Skip the test when ``name`` is not there; fail it where that is required."""
    if why := NEEDS[name]():
        if name in required():
            pytest.fail(f"{why}\n{REQUIRE} says that this machine has {name!r}; to skip: {REQUIRE}= make test", False)
        _missed[name] = _missed.get(name, 0) + 1
        pytest.skip(why)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            need(name)


@pytest.fixture(scope="session")
def needed() -> Callable[[str], None]:
    """`need`, for fixtures."""
    return need


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for name, tests in _missed.items():
        terminalreporter.section(f"NOT TESTED: {name}", sep="!")
        terminalreporter.write_line(f"{tests} tests were skipped. {NEEDS[name]()}")
        terminalreporter.write_line(f"Where it must be tested: {REQUIRE}={name} make test")
