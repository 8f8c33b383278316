"""What the machine should be able to test is not skipped silently."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.table import table

ROOT = Path(__file__).resolve().parents[2]
NEEDY = """
import pytest

@pytest.mark.needs("appworld")
def test_it():
    pass
"""


def _pytest(folder: Path, required: str) -> Any:
    """A run of pytest, on a machine without AppWorld."""
    conftest = (ROOT / "conftest.py").read_text(encoding="utf-8")
    (folder / "conftest.py").write_text(f"{conftest}\nAPPWORLD = APPWORLD / 'nowhere'\n", encoding="utf-8")
    (folder / "test_needy.py").write_text(NEEDY, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(folder)]
    environ = {**os.environ, "ASTUNER_TESTS_REQUIRE": required}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("required", ["", "confinement"])
def test_what_is_not_required_is_skipped_and_that_is_said(tmp_path: Path, required: str) -> None:
    done = _pytest(tmp_path, required)
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout
    assert "NOT TESTED: appworld" in done.stdout


@pytest.mark.slow
def test_what_is_required_fails_and_says_how_to_go_on(tmp_path: Path) -> None:
    done = _pytest(tmp_path, "confinement,appworld")
    assert done.returncode == 1
    assert "1 error" in done.stdout
    assert "make .venv-appworld/.done" in done.stdout
    assert "ASTUNER_TESTS_REQUIRE= make test" in done.stdout


@pytest.mark.slow
def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = _pytest(tmp_path, "apworld")
    assert done.returncode == 4
    names = "appworld, chromium, confinement, frameworks, agentscope-1.0.7, agentscope-1.0.21, mlflow, swanlab, wandb"
    assert f"names 'apworld'; there are {names}" in done.stderr


@table(("version", "there"), [((3, 10), False), ((3, 11), True), ((3, 13), True), ((3, 14), False)])
def test_appworld_should_be_where_its_package_installs(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], there: bool
) -> None:
    spec = importlib.util.spec_from_file_location("should_have", ROOT / "tests" / "should_have.py")
    assert spec is not None
    assert spec.loader is not None
    should_have = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(should_have)
    monkeypatch.setattr(sys, "version_info", (*version, 0))
    assert ("appworld" in should_have.names()) is there
