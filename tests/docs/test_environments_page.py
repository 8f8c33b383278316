"""The world, the workflow and the experiment of docs/environments.md work together, served and in process."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.table import table

pytest.importorskip("astuner_env")
pytest.importorskip("astuner_local")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
MODEL = ROOT / "examples" / "frozen_lake" / "tiny_skater"
COMMANDS = re.findall(r"^astuner run vault\.yaml .*--backbone debug.*$", PAGE, re.M)


def block(name: str) -> str:
    """What the page puts into the file ``name``."""
    found = re.search(rf"<!-- file: {re.escape(name)} -->\n```\w+\n(.*?)^```", PAGE, re.M | re.S)
    assert found is not None, name
    return found[1]


def test_the_page_shows_both_ways() -> None:
    assert len(COMMANDS) == 2
    assert "--with" in COMMANDS[0]
    assert "type=environment" in COMMANDS[1]


@table("command", COMMANDS)
def test_a_world_of_ones_own_runs_as_the_page_says(command: str, tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(block("astuner_vault/world.py"))
    for name in ("workflow.py", "vault.yaml"):
        (tmp_path / name).write_text(block(name))
    _, *arguments = shlex.split(command, comments=True)
    done = subprocess.run(
        [sys.executable, "-m", "astuner", *arguments, f"astuner.model.path={MODEL}"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "ASTUNER_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "900 to train on, 100 to validate on" in done.stderr
    (file,) = tmp_path.rglob("debug.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["reward"] is not None for row in rows] == [True, True]
    assert "The vault has a code of three digits" in file.read_text()
