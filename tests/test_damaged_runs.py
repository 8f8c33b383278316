"""Run folders that are damaged: export, report, replay and view take what is whole, and count and name what is not.

By hand, with any run folder and more of them: ``python -m tests.test_damaged_runs RUN COUNT [SEED]``.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("pyarrow")
pytest.importorskip("tokenizers")

from astuner import RunDir
from astuner.cli import main
from astuner.contracts.types import (
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    StopReason,
    Task,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)
from astuner.rollout.turns import build_samples
from astuner.support.json_lines import write_jsonl
from astuner_record.conversations import transcript
from astuner_record.episode_log import EpisodeLog, EpisodeLogWriter, rewind
from astuner_record.episode_log.salvage import mend
from astuner_record.episode_log.store import DATABASE, list_some
from astuner_report.run_report import origin
from astuner_view.book import Book
from astuner_view.log_thread import LogReader, count
from astuner_view.runs import Runs
from tests.table import table

STEPS, EACH = 5, 8
NAMES = [f"g{step}-{attempt}" for step in range(1, STEPS + 1) for attempt in range(EACH)]
PAGE = 4096


def episode(name: str, dice: random.Random) -> Episode:
    """With tokens that no compression shortens, so that each has pages of its own."""
    prompt, said = [[dice.randrange(1 << 16) for _ in range(n)] for n in (500, 1500)]
    one = Turn(
        index=0,
        agent="default",
        continues=None,
        generation=Generation(
            prompt_ids=prompt,
            response_ids=said,
            logprobs=[-dice.random() for _ in said],
            finish_reason=FinishReason.STOP,
            policy_version=0,
        ),
        request=({"role": "user", "content": f"question {name}"},),
        message={"role": "assistant", "content": dice.randbytes(2000).hex()},
    )
    reward = float(name.endswith(("1", "3")))
    group, _, attempt = name.rpartition("-")
    return Episode(
        workflow_task=WorkflowTask(
            task=Task(task_id="t", main_query="q"), episode_id=name, group_id=group, attempt=int(attempt)
        ),
        turns=(one,),
        output=WorkflowOutput(reward=reward),
        verdict=JudgeOutput(reward=reward, is_success=bool(reward)),
        reward_source="workflow",
        stop_reason=StopReason.COMPLETED,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps with eight episodes each; its database's write-ahead log is not sorted in since step 3."""
    run_dir, dice = RunDir(tmp_path_factory.mktemp("whole") / "run"), random.Random(0)
    run_dir.start()
    run_dir.resolved.write_text(yaml.safe_dump({"astuner": {"backbone": "debug", "seed": 1}}))
    origin.begin(run_dir, command=["astuner", "run"], config_file=run_dir.resolved, plan={}, energy="")
    writer = EpisodeLogWriter(run_dir.episodes)
    rows = []
    for step in range(1, STEPS + 1):
        if step == 4:
            list_some(writer._db)  # as the writer does every 16 MiB
            writer.close()
        episodes = [episode(f"g{step}-{attempt}", dice) for attempt in range(EACH)]
        for one in episodes:
            writer.episode(step, one)
        samples = [replace(s, advantage=0.5) for one in episodes for s in build_samples(one).samples]
        writer.credit(step, samples)
        write_jsonl(run_dir.episodes / f"step_{step:06d}.jsonl", map(transcript, episodes[:4]))
        counted = {"rollout/episodes": float(EACH), "tokens/generated": 12000.0}
        rows.append({"step": step, "time": 1.0 * step, "reward/mean": 0.25, **counted})
    write_jsonl(run_dir.metrics, rows)
    write_jsonl(run_dir.failures, [{"step": 1, "stop_reason": "timed_out", "error": "slow"}])
    copy = run_dir.path.with_name("copy")
    shutil.copytree(run_dir.path, copy)  # as `kill -9` leaves it
    writer.close()
    assert (copy / "episodes" / f"{DATABASE}-wal").stat().st_size > PAGE
    return copy


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def astuner(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; anything but `SystemExit` is a traceback."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([*map(str, arguments)])
        except SystemExit as e:
            return int(e.code or 0), out.getvalue(), err.getvalue()
    raise AssertionError("main always exits")


def settle(run: Path) -> Path:
    """Its database, with everything in one file."""
    with closing(sqlite3.connect(run / "episodes" / DATABASE)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return run / "episodes" / DATABASE


def place_of(path: Path, name: str) -> int:
    """A byte in the middle of an episode's tokens."""
    with closing(sqlite3.connect(path)) as db:
        (frame,) = db.execute("SELECT row FROM data WHERE episode_id = ?", (name,)).fetchone()
    data = path.read_bytes()
    middle = len(frame) // 2
    return next(found for n in range(64) if (found := data.find(frame[middle + 64 * n :][:32])) >= 0)


def flip_in_rows(run: Path) -> None:
    path = settle(run)
    data = bytearray(path.read_bytes())
    for name in ("g2-3", "g5-0"):
        data[place_of(path, name)] ^= 1
    path.write_bytes(data)


def cut_in_half(run: Path) -> None:
    path = settle(run)
    with path.open("r+b") as file:
        file.truncate(place_of(path, "g3-2") // PAGE * PAGE)


def page_of_zeros(run: Path) -> None:
    path = settle(run)
    with path.open("r+b") as file:
        file.seek(place_of(path, "g3-7") // PAGE * PAGE)
        file.write(bytes(PAGE))


def first_page_of_noise(run: Path) -> None:
    """What SQLite finds everything by."""
    with settle(run).open("r+b") as file:
        file.write(random.Random(1).randbytes(PAGE))


def second_page_of_zeros(run: Path) -> None:
    """What SQLite finds all episodes by; there are the lists, and they are not."""
    with settle(run).open("r+b") as file:
        file.seek(PAGE)
        file.write(bytes(PAGE))


def other_row(run: Path) -> None:
    with closing(sqlite3.connect(run / "episodes" / DATABASE)) as db, db:
        (frame,) = db.execute("SELECT row FROM data WHERE episode_id = 'g1-1'").fetchone()
        db.execute("UPDATE data SET row = ? WHERE episode_id = 'g4-4'", (frame,))


def name_of_bytes(run: Path) -> None:
    with closing(sqlite3.connect(run / "episodes" / DATABASE)) as db, db:
        db.execute("UPDATE data SET episode_id = CAST(episode_id AS BLOB) WHERE episode_id = 'g4-4'")


def listed_otherwise(run: Path) -> None:
    with closing(sqlite3.connect(run / "episodes" / DATABASE)) as db, db:
        db.execute("UPDATE episodes SET reward = 0.0 WHERE episode_id = 'g1-1'")


def no_dictionary(run: Path) -> None:
    with closing(sqlite3.connect(run / "episodes" / DATABASE)) as db, db:
        db.execute("UPDATE dictionary SET content = zeroblob(length(content))")


def no_wal(run: Path) -> None:
    (run / "episodes" / f"{DATABASE}-wal").unlink()


def flip_in_wal(run: Path) -> None:
    wal = run / "episodes" / f"{DATABASE}-wal"
    data = bytearray(wal.read_bytes())
    data[32 + 24 + 4000] ^= 1  # in its first page: SQLite reads none after it
    wal.write_bytes(data)


OF_STEPS_4_AND_5 = [n for n in NAMES if n[1] in "45"]
DAMAGES: Sequence[tuple[Callable[[Path], None], Sequence[str], Sequence[str], str]] = [
    (flip_in_rows, ["g2-3", "g5-0"], [], "2 of 40 episodes are lost: 'g2-3' of step 2, 'g5-0' of step 5"),
    (cut_in_half, NAMES[NAMES.index("g3-2") :], ["g3-2 and later"], "episodes are lost: 'g3-2' of step 3"),
    (page_of_zeros, ["g3-7"], [], "1 of 40 episodes are lost: 'g3-7' of step 3"),
    (first_page_of_noise, [], [], "no known episode is lost"),
    (other_row, ["g4-4"], [], "1 of 40 episodes are lost: 'g4-4' of step 4"),
    (name_of_bytes, ["g4-4"], [], "1 of 40 episodes are lost: 'g4-4' of step 4"),
    (listed_otherwise, [], [], "the row of g1-1 or its entry in the list is damaged"),
    (no_wal, OF_STEPS_4_AND_5, ["unnamed"], "24 of 40 training episodes"),
    (flip_in_wal, OF_STEPS_4_AND_5, ["unnamed"], "24 of 40 training episodes"),
]
"""What is damaged, which episodes that costs, those of them that nothing names, and what is said."""


@table("harm, gone, unnamed, says", DAMAGES, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_whole_is_exported_and_what_is_not_is_named(
    tmp_path: Path, whole: Path, harm: Any, gone: Sequence[str], unnamed: Sequence[str], says: str
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    harm(run)
    before = contents(run)
    out = tmp_path / "out.jsonl"
    code, text, err = astuner("export", run, "--to", "jsonl", "--out", out, "--json")
    told = json.loads(text)
    kept = [name for name in NAMES if name not in gone]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert (code, [row["episode_id"] for row in rows]) == (3, kept), err
    assert told["rows"] == len(kept)
    assert says in err
    if not unnamed:
        assert sorted(one["episode_id"] for one in told["lost"]) == sorted(gone)
    with EpisodeLog(whole) as log:
        assert [(row["turns"][0]["response_ids"], row["reward"], row["credit"][0]["advantage"]) for row in rows] == [
            (one.row["turns"][0]["response_ids"], one.row["reward"], 0.5)
            for one in log.read_all()
            if one.row["episode_id"] in kept
        ]
    code, _, err = astuner("report", run)
    assert (code, says in err) == (3, True)
    shown = re.sub(r"\\(.)", r"\1", RunDir(run).report_md.read_text())
    assert says in shown
    reader = LogReader(run)
    assert count(reader) == len(kept)
    assert says in str(reader.problems())
    reader.close()
    code, text, err = astuner("replay", run, "--list", "--json")
    assert (code, json.loads(text)["total"], says in err) == (3, len(kept), True)
    if gone and not unnamed:
        code, _, err = astuner("replay", run, gone[0])
        assert (code, f"{gone[0]} is damaged" in err) == (1, True)
    assert contents(run) == before, "who reads changes nothing"


def contents(run: Path) -> dict[str, bytes]:
    """Of the log's files; SQLite leaves an empty one, and what it shares with other processes."""
    files = [path for path in (run / "episodes").iterdir() if not path.name.endswith("-shm")]
    return {path.name: data for path in files if (data := path.read_bytes())}


def test_a_dictionary_that_is_lost_costs_what_is_written_with_it_and_says_so(run: Path) -> None:
    with closing(sqlite3.connect(run / "episodes" / DATABASE)) as db, db:
        db.execute("UPDATE dictionary SET content = zeroblob(length(content))")
    with EpisodeLog(run) as log:
        assert log.count() + len(log.lost) == len(NAMES)
        assert len(log.lost) > 0
        assert f"{len(log.lost)} of 40 episodes are lost" in log.problems[0]


def test_a_run_with_a_damaged_log_goes_on_with_what_is_whole(run: Path) -> None:
    flip_in_rows(run)
    done = mend(run)
    assert "2 of 40 episodes are lost: 'g2-3' of step 2, 'g5-0' of step 5" in done[0]
    assert "the damaged log is now episodes.sqlite.damaged" in done[1]
    assert mend(run) == []
    assert rewind(run / "episodes", 4) == (done[0],)
    writer = EpisodeLogWriter(run / "episodes")
    writer.episode(5, episode("g5-0", random.Random(1)))
    writer.close()
    with EpisodeLog(run) as log:
        assert [one.episode_id for one in log.list()] == [n for n in NAMES[:32] if n != "g2-3"] + ["g5-0"]
        assert log.read("g1-1").credit[0].advantage == 0.5
        assert done[0] in log.problems
    assert (run / "episodes" / "episodes.sqlite.damaged").exists()


DEEP = "[" * 100_000
FILES: Sequence[tuple[str, str, str]] = [
    ("origin.json", "{", "origin.json is damaged and was ignored (JSONDecodeError"),
    ("origin.json", '{"starts": [{"started": "now"}]}', "origin.json is damaged and was ignored (ValueError"),
    ("origin.json", "[]", "origin.json is damaged and was ignored (TypeError"),
    (
        "metrics.jsonl",
        f'{{"a": {DEEP}\n',
        "metrics.jsonl is damaged: 1 rows were ignored (metrics.jsonl:6: maximum rec",
    ),
    ("metrics.jsonl", '{"step": "x"}\n', "were ignored (metrics.jsonl:6: not a valid row"),
    ("metrics.jsonl", '{"step": 6, "reward/mean": "x"}\n', "1 rows were ignored (metrics.jsonl:6: bad operand"),
    (
        "metrics.jsonl",
        '{"step": 6, "val/success": 0.5}\n',
        "1 rows were ignored (metrics.jsonl:6: 'val/success_ci_low'",
    ),
    ("metrics.jsonl", "\xff\n", "metrics.jsonl:6: 'utf-8' codec can't decode"),
    ("failures.jsonl", "[1]\n", "failures.jsonl is damaged: 1 rows were ignored"),
    ("alarms.jsonl", '{"step": 1}\n', "alarms.jsonl is damaged: 1 rows were ignored"),
    ("certificate.json", "{}", "certificate.json is damaged and was ignored (KeyError"),
    ("summary.json", '{"ledger": 5}', "summary.json is damaged and was ignored"),
]
"""A file, what is in it (behind what is there, where it has rows), and what is said."""


@table("name, text, says", FILES, ids=lambda value: value[:40])
def test_of_a_damaged_file_a_report_has_what_is_whole(
    tmp_path: Path, whole: Path, name: str, text: str, says: str
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    path = run / name
    before = path.read_bytes() if name.endswith("jsonl") and path.exists() else b""
    path.write_bytes(before + text.encode("latin-1"))
    code, out, err = astuner("report", run, "--json")
    assert (code, says in err) == (3, True), err
    facts = json.loads(out)
    assert (facts["steps"], facts["failures"]["kinds"]["timed_out"]["episodes"]) == (5, 1)
    assert look(run) == 40


def look(run: Path) -> int:
    """All that the viewer's pages ask of a run; how many episodes it shows."""
    place = next(iter(Runs(run.parent, run).all().values()))
    book, reader = Book(place), LogReader(run)
    try:
        number = count(reader)
        if (log := reader.fresh()) is not None:
            log.facets(), log.steps(), log.groups()
            for listed in log.list():
                log.read(listed)
        book.page(number, {}, reader.problems())
        book.metrics(), book.alarms()
        return number
    finally:
        reader.close()


def test_a_run_goes_on_with_a_damaged_origin_which_is_kept(run: Path) -> None:
    run_dir = RunDir(run)
    run_dir.origin.write_text("{")
    origin.begin(run_dir, command=["astuner", "run"], config_file=run_dir.resolved, plan={}, energy="")
    assert run_dir.origin.with_name("origin.json.damaged").read_text() == "{"
    assert len(json.loads(run_dir.origin.read_text())["starts"]) == 1


@table(
    "file, start, says, many",
    [
        ("tokens-000003.arrows", 0.45, "bytes are not a complete batch", 4),
        ("tokens-000003.arrows", 0.9, "bytes are not a complete batch", 5),
        ("credit-000002.arrows", 0.6, "bytes are not a complete batch", 5),
    ],
)
def test_an_older_log_has_the_batches_that_are_whole(
    tmp_path: Path, file: str, start: float, says: str, many: int
) -> None:
    older = Path(__file__).parents[1] / "plugins/astuner_record/tests/data/format1/episodes"
    for harm in ("flip", "cut"):
        run = tmp_path / harm
        shutil.copytree(older, run / "episodes")
        path = run / "episodes" / file
        data = bytearray(path.read_bytes())
        data[int(start * len(data))] ^= 0xFF
        path.write_bytes(data[: int(start * len(data))] if harm == "cut" else data)
        code, _, err = astuner("export", run, "--to", "jsonl", "--out", tmp_path / "out", "--force")
        assert (code, says in err, len((tmp_path / "out").read_text().splitlines())) == (3, True, many)


# ---------------------------------------------------------------------------------------------------------- at random


def damage(run: Path, dice: random.Random) -> str:
    """Damage some file of a run; says how."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.suffix not in (".safetensors", ".pt"))
    logs = [path for path in files if path.name.startswith(DATABASE)]
    path = dice.choice(logs if dice.random() < 0.4 else files)
    data = bytearray(path.read_bytes())
    how = dice.choice(["flip", "many", "cut", "zeros", "noise", "remove", "empty", "swap", "deep"])
    at = dice.randrange(len(data) or 1)
    length = dice.choice([1, 64, PAGE])
    if how in ("flip", "many") and data:
        for _ in range(1 if how == "flip" else 30):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif how == "cut":
        data = data[:at]
    elif how == "zeros":
        data[at : at + length] = bytes(length)
    elif how == "noise":
        data[at : at + length] = dice.randbytes(length)
    elif how == "empty":
        data = bytearray()
    elif how == "swap":
        data[at : at + length], data[:length] = data[:length], data[at : at + length]
    elif how == "deep":
        data[at:at] = DEEP.encode()
    path.unlink()
    if how != "remove":
        path.write_bytes(data)
    return f"{how} at {at} of {path.relative_to(run)}"


def try_one(whole: Path, place: Path, seed: int) -> tuple[str, dict[str, int], dict[str, float]]:
    """Damage a copy of a run, and ask everything of it; what was done, exit codes, and seconds of CPU time.

    :raises Exception: something was not refused in order, or an episode is not as it was written, or missing without
        a word.
    """
    run, dice = place / "run", random.Random(seed)
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("*.safetensors", "*.pt"))
    done = "; ".join(damage(run, dice) for _ in range(dice.choice([1, 1, 1, 2, 4])))
    out = place / "out.jsonl"
    out.unlink(missing_ok=True)
    commands = {
        "export": ("export", run, "--to", "jsonl", "--out", out, "--json"),
        "report": ("report", run),
        "replay": ("replay", run, "--list"),
        "diff": ("diff", run, whole, "--split", "train"),
        "doctor": ("doctor", run),
    }
    ended: dict[str, tuple[int, str, str]] = {}
    took: dict[str, float] = {}
    for name, command in commands.items():
        begun = time.process_time()
        ended[name] = astuner(*command)
        took[name] = time.process_time() - begun
    codes = {name: code for name, (code, _, _) in ended.items()}
    begun = time.process_time()
    look(run)
    took["view"] = time.process_time() - begun
    assert out.exists() == (codes["export"] in (0, 3)), done
    if out.exists():
        rows = {row["episode_id"]: row for row in map(json.loads, out.read_text().splitlines())}
        with EpisodeLog(whole) as log:
            was = {one.row["episode_id"]: one.row for one in log.read_all()}
        for name, row in rows.items():
            assert [t["response_ids"] for t in row["turns"]] == [t["response_ids"] for t in was[name]["turns"]], (
                done,
                name,
            )
            assert (row["reward"], row["step"]) == (was[name]["reward"], was[name]["step"]), (done, name)
        missing = was.keys() - rows.keys() - {one["episode_id"] for one in json.loads(ended["export"][1])["lost"]}
        said = 3 in (codes["export"], codes["report"]) or "metrics.jsonl" in done  # else nobody knows it
        assert said or not missing, (done, missing)
        codes["episodes that nothing names"] = len(missing)
    return done, codes, took


def test_whatever_is_damaged_nothing_ends_in_a_traceback(whole: Path, tmp_path: Path) -> None:
    seen = [try_one(whole, tmp_path, seed)[1] for seed in range(30)]
    assert {0, 3} <= {codes["export"] for codes in seen} <= {0, 1, 3}
    assert {code for codes in seen for name, code in codes.items() if "episodes" not in name} <= {0, 1, 2, 3}


if __name__ == "__main__":
    from collections import Counter
    from tempfile import TemporaryDirectory

    failed, counted, slowest = 0, Counter[str](), dict[str, float]()
    with TemporaryDirectory() as folder:
        first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
        for seed in range(first, first + int(sys.argv[2])):
            try:
                what, ended, took = try_one(Path(sys.argv[1]), Path(folder), seed)
                counted.update(f"{name} {code}" for name, code in ended.items())
                slowest = {name: max(slowest.get(name, 0.0), seconds) for name, seconds in took.items()}
            except Exception:
                failed += 1
                print(f"seed {seed}")
                traceback.print_exc(limit=12)
    print(f"{sys.argv[2]} damaged folders, {failed} with a traceback or a wrong episode; exit codes: {dict(counted)}")
    print("the slowest took, in seconds of CPU time:", {name: round(seconds, 2) for name, seconds in slowest.items()})
    sys.exit(bool(failed))


# --------------------------------------------------------- files beside the log that do not belong to it


@pytest.fixture(scope="module")
def another(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of another run, as `kill -9` leaves it: everything is in its write-ahead log."""
    folder = tmp_path_factory.mktemp("another") / "episodes"
    writer, dice = EpisodeLogWriter(folder), random.Random(7)
    for number in range(60):
        writer.episode(1, episode(f"other{number}-0", dice))
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    writer.close()
    return copy


def _beside(run: Path, end: str) -> Path:
    return Path(f"{run / 'episodes' / DATABASE}{end}")


def wal_of_another_log(run: Path, another: Path) -> None:
    shutil.copy(_beside_of(another, "-wal"), _beside(run, "-wal"))


def _beside_of(folder: Path, end: str) -> Path:
    return Path(f"{folder / DATABASE}{end}")


def wal_and_shm_of_another_log(run: Path, another: Path) -> None:
    wal_of_another_log(run, another)
    shutil.copy(_beside_of(another, "-shm"), _beside(run, "-shm"))


def wal_of_an_earlier_state(run: Path, another: Path) -> None:
    older = run.with_name("older")
    shutil.copytree(run, older)
    writer, dice = EpisodeLogWriter(older / "episodes"), random.Random(8)
    writer.episode(STEPS + 1, episode("later-0", dice))
    shutil.copy(_beside(older, "-wal"), older / "wal")
    writer.close()
    writer = EpisodeLogWriter(run / "episodes")
    for number in range(40):
        writer.episode(STEPS, episode(f"newer{number}-0", dice))
    writer.close()
    NEWER.extend(f"newer{number}-0" for number in range(40))
    shutil.copy(older / "wal", _beside(run, "-wal"))


def wal_of_another_program(run: Path, another: Path) -> None:
    path = run.with_name("program.sqlite")
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript("CREATE TABLE a (b); INSERT INTO a VALUES (1)")
        shutil.copy(f"{path}-wal", _beside(run, "-wal"))


def wal_of_other_pages(run: Path, another: Path) -> None:
    path = run.with_name("program.sqlite")
    with closing(sqlite3.connect(path)) as db:
        db.executescript("PRAGMA page_size = 512; PRAGMA journal_mode = WAL; CREATE TABLE a (b)")
        shutil.copy(f"{path}-wal", _beside(run, "-wal"))


def wal_of_text(run: Path, another: Path) -> None:
    _beside(run, "-wal").write_text("a note\n" * 1000)


def wal_with_a_damaged_header(run: Path, another: Path) -> None:
    data = bytearray(_beside_of(another, "-wal").read_bytes())
    data[17] ^= 1
    _beside(run, "-wal").write_bytes(data)


def wal_that_is_a_folder(run: Path, another: Path) -> None:
    _beside(run, "-wal").unlink(missing_ok=True)
    _beside(run, "-wal").mkdir()


def wal_that_is_a_link(run: Path, another: Path) -> None:
    _beside(run, "-wal").unlink(missing_ok=True)
    _beside(run, "-wal").symlink_to(_beside_of(another, "-wal"))


def shm_that_is_a_link(run: Path, another: Path) -> None:
    _beside(run, "-shm").unlink(missing_ok=True)
    _beside(run, "-shm").symlink_to(another / "nowhere")


def journal_of_another_database(run: Path, another: Path) -> None:
    path = run.with_name("program.sqlite")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.executescript("CREATE TABLE a (b); INSERT INTO a VALUES (zeroblob(30000));")
        db.executescript("PRAGMA cache_size = 1; BEGIN; UPDATE a SET b = randomblob(30000)")
        db.execute("PRAGMA cache_spill = ON")
        shutil.copy(f"{path}-journal", _beside(run, "-journal"))


def journal_of_zeros(run: Path, another: Path) -> None:
    _beside(run, "-journal").write_bytes(bytes(5000))


def journal_that_is_a_folder(run: Path, another: Path) -> None:
    _beside(run, "-journal").mkdir()


NEWER: list[str] = []
FOREIGN = [
    wal_of_another_log, wal_and_shm_of_another_log, wal_of_an_earlier_state, wal_of_another_program, wal_of_other_pages,
    wal_of_text, wal_with_a_damaged_header, wal_that_is_a_folder, wal_that_is_a_link, shm_that_is_a_link,
    journal_of_another_database, journal_of_zeros, journal_that_is_a_folder,
]  # fmt: skip


@table("place", FOREIGN, ids=lambda place: place.__name__)
def test_a_foreign_file_beside_the_log_is_not_read(
    place: Callable[[Path, Path], None], whole: Path, another: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    settle(run)
    NEWER.clear()
    place(run, another)
    names, before = [*NAMES, *NEWER], _beside(run, "").read_bytes()
    with EpisodeLog(run) as log:
        assert [one.episode_id for one in log.list()] == names
        assert any("does not belong to the episode log" in text for text in log.problems)
        assert log.read("g5-0").episode.reward is not None
    with EpisodeLog(run, check=False) as log:
        assert log.count() == len(names)
    assert _beside(run, "").read_bytes() == before, "who reads changes nothing"

    done = mend(run)  # as a run that is resumed
    assert any("does not belong to the episode log" in text for text in done)
    assert list((run / "episodes").glob(f"{DATABASE}-*.foreign-1"))
    rewind(run / "episodes", STEPS)
    writer = EpisodeLogWriter(run / "episodes")
    writer.episode(STEPS + 1, episode("after-0", random.Random(2)))
    writer.close()
    with EpisodeLog(run) as log:
        assert [one.episode_id for one in log.list()] == [*names, "after-0"]


@table("place", FOREIGN, ids=lambda place: place.__name__)
def test_a_writer_leaves_a_foreign_file_alone(
    place: Callable[[Path, Path], None], whole: Path, another: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    settle(run)
    NEWER.clear()
    place(run, another)
    writer = EpisodeLogWriter(run / "episodes")
    writer.episode(STEPS + 1, episode("after-0", random.Random(2)))
    writer.close()
    with EpisodeLog(run) as log:
        assert [one.episode_id for one in log.list()] == [*NAMES, *NEWER, "after-0"]
        assert any("does not belong to the episode log" in text for text in log.problems)


def as_it_was_left(run: Path) -> None:
    pass


def without_shm(run: Path) -> None:
    _beside(run, "-shm").unlink(missing_ok=True)


def shm_of_noise(run: Path) -> None:
    _beside(run, "-shm").write_bytes(random.Random(1).randbytes(32768))


def empty_journal(run: Path) -> None:
    _beside(run, "-journal").touch()


def rows_forgotten(run: Path) -> None:
    """Rewound, gone on and killed, before anything is sorted in."""
    with closing(sqlite3.connect(_beside(run, ""))) as reader:
        reader.execute("SELECT count(*) FROM data").fetchone()  # so that closing sorts nothing in
        rewind(run / "episodes", 4)
        writer = EpisodeLogWriter(run / "episodes")
        for name in NAMES[32:]:
            writer.episode(5, episode(name, random.Random(3)))
        shutil.copytree(run, run.with_name("killed"))
        writer.close()
    shutil.rmtree(run)
    run.with_name("killed").rename(run)


@table("left", [as_it_was_left, without_shm, shm_of_noise, empty_journal, rows_forgotten], ids=lambda f: f.__name__)
def test_what_a_killed_run_left_is_read(left: Callable[[Path], None], whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    left(run)
    assert _beside(run, "-wal").stat().st_size > PAGE
    with EpisodeLog(run) as log:
        assert sorted(one.episode_id for one in log.list()) == sorted(NAMES)
        assert log.problems == ()
    assert mend(run) == []
    rewind(run / "episodes", STEPS)
    with EpisodeLog(run) as log:
        assert sorted(one.episode_id for one in log.list()) == sorted(NAMES)
