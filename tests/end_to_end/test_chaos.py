"""A round of 200 episodes of which half misbehave, killed and gone on with; and that its checker can fail."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zstandard

from tests.chaos.checking import problems, rows_of
from tests.chaos.known import NOT_HELD
from tests.chaos.running import MARK, Round

pytest.importorskip("astuner_local")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SEED = 19


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Round:
    round_ = Round(SEED, tmp_path_factory.mktemp("chaos"), NOT_HELD)
    try:
        return round_.play(print)
    finally:
        round_.end_what_is_left()


def test_a_round_of_chaos(played: Round) -> None:
    assert problems(played) == []
    ends = Counter(row["stop_reason"] for row in rows_of(played.run))
    assert {"completed", "workflow_failed", "judge_failed", "environment_failed"} <= set(ends), ends
    assert {"kill", "disk"} <= {leg.ended_by for leg in played.legs}


def database(round_: Round) -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(sqlite3.connect(round_.run / "episodes" / "episodes.sqlite", isolation_level=None))


NEWEST = "SELECT id FROM data WHERE episode_id LIKE 'g%' ORDER BY id DESC LIMIT 1"


def lose(round_: Round) -> None:
    with database(round_) as db:
        db.execute(f"DELETE FROM data WHERE id = ({NEWEST})")


def double(round_: Round) -> None:
    with database(round_) as db:
        db.execute(f"INSERT INTO data SELECT id + 1000000, episode_id, step, row FROM data WHERE id = ({NEWEST})")


def invent(round_: Round) -> None:
    row = next(row for row in reversed(rows_of(round_.run)) if row["reward"] is not None)
    frame = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode({**row, "reward": row["reward"] + 0.25}))
    with database(round_) as db:
        db.execute("UPDATE data SET row = ? WHERE episode_id = ?", (frame, row["episode_id"]))


def cut(round_: Round) -> None:
    file = round_.run / "metrics.jsonl"
    kept = [line for line in file.read_text().splitlines(keepends=True) if json.loads(line)["step"] != 5]
    file.write_text("".join(kept))


def litter(round_: Round) -> None:
    (round_.temp / "left").touch()


def crash(round_: Round) -> None:
    round_.legs[-1] = replace(round_.legs[-1], code=1, err="Traceback (most recent call last):\nValueError")


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (lose, "has 15 episodes in the log"),
        (double, "is 2 times in the log"),
        (invent, "has the reward"),
        (cut, "the curve has the steps"),
        (litter, "left in the temporary folder"),
        (crash, "return code 1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_planted_is_found(played: Round, tmp_path: Path, plant: Callable[[Round], None], said: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(played.folder, folder)
    copy = replace(played, folder=folder, legs=list(played.legs))
    before = problems(copy)
    plant(copy)
    found = set(problems(copy)) - set(before)
    assert any(said in line for line in found), found


def test_a_process_that_is_left_is_found(played: Round) -> None:
    for options in ({"env": {MARK: played.mark}}, {"cwd": played.folder}):
        with subprocess.Popen(["/bin/sleep", "600"], **options) as process:  # type: ignore[call-overload]
            try:
                assert any(f"still runs: {process.pid} " in line for line in problems(played))
            finally:
                process.kill()
