"""`astuner new experiment` writes an agent for the AgentScope of each environment, whose own test passes there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from .harness import ENVIRONMENTS

VERSIONS = {"here": "2", "agentscope-1.0.7": "1", "agentscope-1.0.21": "1"}
"""Environment -> the major version of its AgentScope."""


@pytest.mark.parametrize(
    ("environment", "major"),
    [
        pytest.param(name, major, marks=() if name == "here" else pytest.mark.needs(name))
        for name, major in VERSIONS.items()
    ],
)
def test_a_scaffolded_agent_passes_its_own_test(environment: str, major: str, tmp_path: Path) -> None:
    def python(*arguments: str, folder: Path) -> str:
        command = [str(ENVIRONMENTS[environment]), "-m", *arguments]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    variables = {**os.environ, "ASTUNER_HOME": str(tmp_path / "home")}
    written = python("astuner", "new", "experiment", "sums", folder=tmp_path)
    assert re.search(rf"uses AgentScope {major}\.x \({major}\.\S+ is installed\)", written)
    tested = python("pytest", "-q", "-p", "no:cacheprovider", "test_workflow.py", folder=tmp_path / "sums")
    assert "1 passed" in tested
