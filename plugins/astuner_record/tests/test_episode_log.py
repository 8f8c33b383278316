"""The episode log: what is written is what happened, whatever becomes of the process, and others can read it."""

from __future__ import annotations

import enum
import errno
import fcntl
import itertools
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
import zlib
from collections import UserList
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

msgspec = pytest.importorskip("msgspec")
pa = pytest.importorskip("pyarrow")

from astuner.contracts.environment import Evaluation  # noqa: E402
from astuner.contracts.errors import ConfigError, DataError  # noqa: E402
from astuner.contracts.types import (  # noqa: E402
    Episode,
    ExternalTurn,
    FinishReason,
    Generation,
    JudgeOutput,
    Sample,
    Split,
    StopReason,
    Task,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)
from astuner.rollout.samples import build_samples  # noqa: E402
from astuner_record.episode_log import EpisodeLog, EpisodeLogWriter, journal, rewind, writer  # noqa: E402
from astuner_record.episode_log.columns import Columns  # noqa: E402
from astuner_record.episode_log.index import INDEX, Index  # noqa: E402
from astuner_record.episode_log.journal import SUFFIX, recover  # noqa: E402
from astuner_record.episode_log.rows import credit_rows, episode_row, json_text, read_episode  # noqa: E402
from astuner_record.episode_log.schema import CREDIT, TOKENS, files, schema  # noqa: E402
from astuner_record.episode_log.stream import StreamFile  # noqa: E402


def turn(index: int, prompt: Sequence[int], said: Sequence[int], continues: int | None = None, **more: Any) -> Turn:
    return Turn(
        index=index,
        agent=more.pop("agent", "solver"),
        generation=Generation(
            prompt_ids=tuple(prompt),
            response_ids=tuple(said),
            logprobs=tuple(-0.25 * i for i in range(len(said))),
            finish_reason=FinishReason.STOP,
            policy_version=3,
        ),
        continues=continues,
        **{
            "request": ({"role": "user", "content": f"question {index}"},),
            "message": {"role": "assistant", "content": f"answer {index}"},
            **more,
        },
    )


def episode(name: str = "g-0", reward: float | None = 1.0, **more: Any) -> Episode:
    """Two turns of a solver, the second continuing the first, a branch of a critic, and somebody from outside."""
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": '{"q": "pears"}'}}
    turns = (
        turn(0, [1, 2, 3], [4, 5], tools=({"type": "function", "function": {"name": "search"}},)),
        turn(
            1, [1, 2, 3, 4, 5, 6, 7], [8], 0, started=1.7e9, seconds=0.5,
            message={"role": "assistant", "content": "", "tool_calls": [call]},
        ),
        turn(3, [9, 9], [7, 7, 7], None, agent="critic", role="judge", trained=False, branch_reason="no such turn"),
    )
    outside = ExternalTurn(
        index=2, agent="oracle", role="default", model="big", request=({"role": "user", "content": "help"},),
        message={"role": "assistant", "content": "bananas"}, prompt_tokens=11, completion_tokens=2,
        started=1.7e9, seconds=0.25,
    )  # fmt: skip
    settings: dict[str, Any] = {
        "workflow_task": WorkflowTask(
            task=Task(
                task_id="t",
                main_query="What is an apple pie?",
                init_messages=[],
                metadata={"answer": 4},
                env_type="kitchen",
            ),
            episode_id=name,
            group_id=name.rpartition("-")[0],
            split=Split.TRAIN,
            attempt=int(name.rpartition("-")[2]),
        ),
        "turns": turns,
        "output": WorkflowOutput(
            reward=reward, metadata={"final": [1, {"a": None}]}, evaluation=Evaluation(score=0.5, details={"x": 1})
        ),
        "verdict": None
        if reward is None
        else JudgeOutput(reward=reward, is_success=reward == 1, metrics={"length": 2.0}),
        "reward_source": "judge" if reward is not None else "",
        "stop_reason": StopReason.COMPLETED if reward is not None else StopReason.MODEL_FAILED,
        "seconds": 1.5,
        "external": (outside,),
        "started": 1.7e9,
    }
    return Episode(**settings | more)


def write(folder: Path, *logged: tuple[int, Episode], **options: Any) -> None:
    said: list[str] = []
    log = EpisodeLogWriter(folder / "episodes", said.append, **options)
    for step, one in logged:
        log.episode(step, one)
        log.flush()  # a batch each
    log.close()
    assert said == []


def names(log: EpisodeLog, *where: str, **options: Any) -> list[str]:
    return [found.episode_id for found in log.list(where, **options)]


def test_an_episode_is_read_as_it_was_written_with_whole_prompts(tmp_path: Path) -> None:
    original = episode()
    write(tmp_path, (4, original))
    with EpisodeLog(tmp_path) as log:
        logged = log.read("g-0")
    assert logged.episode == original
    assert logged.step == 4
    written = [t["prompt_ids"] for t in logged.row["turns"]]
    assert written == [[1, 2, 3], [6, 7], [9, 9]]  # of a continuation only what is new


@given(
    text=st.text(st.characters(), max_size=8),
    value=st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(st.characters(), max_size=5) | st.binary(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner),
        max_leaves=6,
    ),
)
def test_whatever_an_agent_says_can_be_written_and_read(text: str, value: Any) -> None:
    said = {"role": "assistant", "content": text}
    original = episode(
        turns=(turn(0, [1], [2], message=said, agent=text),),
        output=WorkflowOutput(reward=1.0, response=value, metadata={"v": value}),
        error=text,
    )
    (row,) = Columns(schema(TOKENS)).batch([episode_row(1, original, 0.0)]).to_pylist()
    read = read_episode(row)
    assert read.turns[0].message == said
    assert read.error == text.encode("utf-8", "backslashreplace").decode()


class Name(str, enum.Enum):
    SOLVER = "solver"


def test_what_json_cannot_hold_is_spelled_out() -> None:
    circle: list[Any] = [1.0]
    circle.append(circle)
    assert json.loads(json_text({("a", 1): float("nan"), "b": object}))["('a', 1)"] is None
    assert json.loads(json_text(circle))[0] == 1.0
    numpy = pytest.importorskip("numpy")
    nearly = {"a": numpy.float64(1.5), "b": (numpy.int64(2), Name.SOLVER, 1 << 70), "c": numpy.arange(2)}
    for half in ("", "\ud800"):
        assert json.loads(json_text({**nearly, "half": half})) == {
            "a": 1.5, "b": [2, "solver", 1 << 70], "c": [0, 1], "half": half
        }  # fmt: skip
    assert json.loads(json_text([numpy.finfo("f4"), numpy.longdouble(1.5)]))[1] == "1.5"


@dataclass
class Client:
    key: str = field(repr=False)


class Shrinks:
    """Its text is asked for while the list that it is in is written."""

    def __init__(self) -> None:
        self.inside = [self, *range(1000)]

    def __str__(self) -> str:
        self.inside.clear()
        return "gone"


def test_objects_are_written_as_they_show_themselves() -> None:
    assert "sk-secret" not in json_text({"client": Client("sk-secret")})
    assert json.loads(json_text(Shrinks().inside))[0] == "gone"
    assert json_text([{1}, b"b"]) == """["{1}", "b'b'"]"""
    assert json.loads(json_text({"m": MappingProxyType({"a": UserList(["b"])})})) == {"m": {"a": "['b']"}}


def killed_after(tmp_path: Path, lines: str) -> None:
    """A process that logs to ``tmp_path``, does what ``lines`` say with ``log``, and is killed."""
    script = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_episode_log import episode\nfrom astuner_record.episode_log import EpisodeLogWriter, writer\n"
        f"log = EpisodeLogWriter(Path({str(tmp_path)!r}) / 'episodes', print)\n"
        f"{lines}\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flushed", ["log.flush()", "pass"])
def test_a_killed_process_loses_no_episode_that_was_logged(tmp_path: Path, flushed: str) -> None:
    killed_after(
        tmp_path,
        f"for i in range(20):\n    log.episode(1, episode(f'g-{{i}}'))\n{flushed}\n"
        "for i in range(20, 400):\n    log.episode(2, episode(f'g-{i}'))",
    )
    with EpisodeLog(tmp_path) as log:
        assert sorted(names(log)) == sorted(f"g-{i}" for i in range(400))
        assert all(one.episode.turns == episode().turns for one in log.read_all())
        assert log.count(["step=1"]) == 20
    assert not list((tmp_path / "episodes").glob(f"*{SUFFIX}"))
    rows = [name for path in files(tmp_path / "episodes") for name in whole_rows(path)]
    assert len(rows) == 400, "and whoever reads the files alone finds each of them once"


def whole_rows(path: Path) -> list[str]:
    file = StreamFile(path)
    try:
        return [name for _, batch in file.batches() for name in batch.column("episode_id").to_pylist()]
    finally:
        file.close()


@pytest.mark.slow
def test_what_a_killed_process_left_is_resumed_from(tmp_path: Path) -> None:
    killed_after(tmp_path, "for step in (1, 2):\n    log.episode(step, episode(f'g-{step}'))")
    rewind(tmp_path / "episodes", 1)
    assert not list((tmp_path / "episodes").glob(f"*{SUFFIX}"))
    with EpisodeLog(tmp_path) as log:
        assert names(log) == ["g-1"]


def test_what_is_being_written_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "LINGER", 3600.0)
    log = EpisodeLogWriter(tmp_path / "episodes", print)
    log.episode(1, episode("g-0"))
    log.flush()
    log.episode(1, episode("g-1"))
    assert recover(tmp_path / "episodes") == ()
    assert whole_rows(files(tmp_path / "episodes")[0]) == ["g-0"]
    log.close()
    assert not list((tmp_path / "episodes").glob(f"*{SUFFIX}"))
    assert [name for path in files(tmp_path / "episodes") for name in whole_rows(path)] == ["g-0", "g-1"]


def left_behind(run: Path, *entries: bytes) -> Path:
    """A journal whose writer is gone."""
    path = run / "episodes" / f"1-1{SUFFIX}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(journal.MAGIC + b"".join(entries))
    return path


def entry(number: int, **changes: Any) -> bytes:
    return journal.entry(episode_row(1, episode(f"g-{number}"), float(number)) | changes)


def test_what_outlived_a_killed_process_holds_up_no_resume(tmp_path: Path) -> None:
    path = left_behind(tmp_path, entry(1))
    with path.open("rb") as of_a_child:
        fcntl.flock(of_a_child, fcntl.LOCK_EX)
        rewind(tmp_path / "episodes", 1)
    with EpisodeLog(tmp_path) as log:
        assert names(log) == ["g-1"]
    assert not path.exists()


@pytest.mark.parametrize("refused", ["to open it", "to write beside it"])
def test_a_journal_in_a_folder_that_cannot_be_written_is_said_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    write(tmp_path, (1, episode("g-0")))
    path = left_behind(tmp_path, entry(1))

    def fails(*arguments: Any, **options: Any) -> Any:
        raise PermissionError(errno.EROFS, "Read-only file system", "somewhere")

    def opened(path: Any, mode: str = "r", **options: Any) -> Any:
        return fails() if "+" in mode else open(path, mode, **options)

    if refused == "to open it":  # whoever runs this may be root
        monkeypatch.setattr(journal, "open", opened, raising=False)
    monkeypatch.setattr(journal, "_write_file", fails)
    with EpisodeLog(tmp_path) as log:
        assert names(log) == ["g-0"]
        assert log.problems == (
            f"{path.name}: what a killed run had not sorted in is left out, since {path.parent} cannot be written "
            "(Read-only file system); give it room and the right to write, and look again",
        )
    monkeypatch.undo()
    with EpisodeLog(tmp_path) as log:
        assert (names(log), log.problems) == (["g-0", "g-1"], ())


def test_a_run_that_goes_on_is_not_called_killed_where_its_folder_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: Any, mode: str = "r", **options: Any) -> Any:
        if "+" in mode:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open(path, mode, **options)

    running = EpisodeLogWriter(tmp_path / "episodes", print)
    running.episode(1, episode("g-0"))
    running.flush()
    monkeypatch.setattr(journal, "open", opened, raising=False)
    assert recover(tmp_path / "episodes") == ()
    monkeypatch.undo()
    running.close()


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("what", ["code", "no row", "a row of something else", "no time", "no ids", "another's"])
def test_a_journal_from_elsewhere_runs_nothing_and_costs_nothing(tmp_path: Path, what: str) -> None:
    write(tmp_path, (1, episode("g-0")))
    row = episode_row(1, episode("g-3"), 0.0)
    no_ids = row | {"turns": [row["turns"][0] | {"prompt_ids": None}]}
    other: Any = {"no row": 7, "a row of something else": {"turns": [3]}, "no time": row | {"time": float("nan")}}
    other["no ids"] = no_ids
    body = pickle.dumps(Hostile(tmp_path / "harm")) if what == "code" else msgspec.msgpack.encode(other.get(what))
    bad = journal._HEAD.pack(len(body), zlib.crc32(body)) + body
    path = left_behind(tmp_path, entry(1), bad, entry(2))
    if what == "another's":
        path.write_bytes(b"{}")
    with EpisodeLog(tmp_path) as log:
        assert names(log) == ["g-0"] if what == "another's" else ["g-0", "g-1", "g-2"]
        (problem,) = log.problems
    assert ("not written by ASTuner" if what == "another's" else "1 of 3 episodes cannot be read") in problem
    assert not (tmp_path / "harm").exists()
    kept = path if what == "another's" else path.with_suffix(".damaged")
    assert kept.exists()


@pytest.mark.parametrize("odd", ["reward", "task id", "agent", "logprobs"])
def test_what_is_nearly_a_plain_value_survives_its_process(tmp_path: Path, odd: str) -> None:
    numpy = pytest.importorskip("numpy")
    plain = episode("g-0")
    of, turn = plain.workflow_task, plain.turns[0]
    said = turn.generation
    verdict = JudgeOutput(reward=numpy.float64(0.5), is_success=numpy.bool_(True))
    as_numpy = replace(said, logprobs=tuple(map(numpy.float32, said.logprobs)))
    one = {
        "reward": replace(plain, verdict=verdict),
        "task id": replace(plain, workflow_task=replace(of, task=replace(of.task, task_id=numpy.str_("7")))),
        "agent": replace(plain, turns=(replace(turn, agent=Name.SOLVER), *plain.turns[1:])),
        "logprobs": replace(plain, turns=(replace(turn, generation=as_numpy), *plain.turns[1:])),
    }[odd]
    left_behind(tmp_path, journal.entry(episode_row(1, one, 0.0)), entry(1))
    with EpisodeLog(tmp_path) as log:
        assert names(log) == ["g-0", "g-1"]
        read = log.read("g-0").episode
    assert (read.verdict, read.turns, read.workflow_task.task) == (one.verdict, one.turns, one.workflow_task.task)


def test_half_a_character_survives_its_process_as_in_a_batch(tmp_path: Path) -> None:
    left_behind(tmp_path, journal.entry(episode_row(1, episode("g-0", error="half \ud800"), 0.0)))
    with EpisodeLog(tmp_path) as log:
        assert log.read("g-0").episode.error == "half \\ud800"


def test_what_the_log_does_not_take_is_left_to_its_batch_to_say(tmp_path: Path) -> None:
    assert journal.entry(episode_row(1, episode("g-0"), 0.0) | {"attempt": 1 << 70}) == b""
    assert journal.entry(episode_row(1, episode("g-0"), 0.0) | {"query": object()}) == b""


@pytest.mark.parametrize("end", [1, 7, 9, 500])
def test_a_torn_entry_costs_no_other(tmp_path: Path, end: int) -> None:
    write(tmp_path, (1, episode("g-0")))
    left_behind(tmp_path, entry(1), entry(2)[:end])
    with EpisodeLog(tmp_path) as log:
        assert (names(log), log.problems) == (["g-0", "g-1"], ())


def test_a_damaged_entry_costs_no_other_and_is_kept(tmp_path: Path) -> None:
    bad = bytearray(entry(1))
    bad[100] ^= 1
    path = left_behind(tmp_path, bytes(bad), entry(2))
    problems = rewind(tmp_path / "episodes", 1)
    assert "1 of 2 episodes cannot be read (ValueError: the bytes are not those that were written)" in problems[0]
    assert path.with_suffix(".damaged").exists()
    with EpisodeLog(tmp_path) as log:
        assert (names(log), log.problems) == (["g-2"], ())


def test_a_journal_does_not_grow_while_something_always_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_SPARE", 100)
    monkeypatch.setattr(journal, "_ROOM", 200)
    kept = journal.Journal(tmp_path)
    entries = [entry(i) for i in range(50)]
    kept.add(entries[0])
    for one, other in itertools.pairwise(entries):
        kept.add(other)
        kept.keep([other])
        (path,) = tmp_path.iterdir()
        assert path.stat().st_size <= 12 * len(one)
        assert other in path.read_bytes()
    kept.close(remove=False)
    recover(tmp_path)
    assert whole_rows(files(tmp_path)[0])[-1] == "g-49"


def test_what_was_forgotten_does_not_come_back(tmp_path: Path) -> None:
    kept = journal.Journal(tmp_path)
    for i in range(3):
        kept.add(entry(i))
    kept.keep([])
    kept.add(entry(3))
    kept.close(remove=False)
    recover(tmp_path)
    assert [name for path in files(tmp_path) for name in whole_rows(path)] == ["g-3"]


def test_an_episode_is_written_when_it_ends_unless_one_just_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astuner_record.episode_log.writer.LINGER", 3600.0)
    writer = EpisodeLogWriter(tmp_path / "episodes", print)

    def there() -> list[str]:
        with EpisodeLog(tmp_path) as log:
            return names(log)

    writer.episode(1, episode("g-0"))
    while not any((tmp_path / "episodes").glob("tokens-*")) or there() != ["g-0"]:
        time.sleep(0.01)
    writer.episode(1, episode("g-1"))
    time.sleep(0.1)
    assert there() == ["g-0"]  # waits for others to share its batch
    writer.flush()
    assert there() == ["g-0", "g-1"]
    writer.close()


def test_what_ends_a_step_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner_record.episode_log.writer.LINGER", 3600.0)
    writer = EpisodeLogWriter(tmp_path / "episodes", print)
    for i in range(2):
        writer.episode(1, episode(f"g-{i}"))
    writer.credit(1, build_samples(episode("g-0")).samples)
    while not (found := list((tmp_path / "episodes").glob("credit-*"))) or not found[0].stat().st_size:
        time.sleep(0.01)
    assert whole_rows(found[0]) == ["g-0"]
    writer.close()


@pytest.mark.parametrize("cut", [1, 8, 9, 200, 2000])
def test_a_torn_end_is_skipped_said_and_gone_after_a_resume(tmp_path: Path, cut: int) -> None:
    write(tmp_path, (1, episode("g-0")), (1, episode("g-1")))
    (path,) = (tmp_path / "episodes").glob("tokens-*")
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    left = ["g-0", "g-1"] if cut <= 8 else ["g-0"]
    with EpisodeLog(tmp_path) as log:
        assert names(log) == left
        assert bool(log.problems) == (cut != 8)
    rewind(tmp_path / "episodes", 1)
    with pa.ipc.open_stream(path.read_bytes()) as stream:  # anybody's reader reads it now
        assert stream.read_all().column("episode_id").to_pylist() == left
    with EpisodeLog(tmp_path) as log:
        assert (names(log), log.problems) == (left, ())


def test_every_prefix_of_a_file_can_be_read(tmp_path: Path) -> None:
    write(tmp_path, *((1, episode(f"g-{i}")) for i in range(3)))
    (path,) = (tmp_path / "episodes").glob("tokens-*")
    whole, counts = path.read_bytes(), []
    for end in range(0, len(whole), 1499):
        path.write_bytes(whole[:end])
        index = Index(tmp_path / "episodes")
        index.refresh()
        counts.append(index.db.execute("SELECT count(*) FROM episodes").fetchone()[0])
        index.close()
    assert counts == sorted(counts)
    assert {0, 1, 2} <= set(counts)


def test_a_process_begins_a_new_file_and_a_full_one_is_followed_by_another(tmp_path: Path) -> None:
    write(tmp_path, (1, episode("g-0")), (1, episode("g-1")), file_bytes=1)
    write(tmp_path, (2, episode("g-2")))
    assert sorted(p.name for p in (tmp_path / "episodes").glob("*.arrows")) == [
        f"tokens-00000{i}.arrows" for i in (1, 2, 3)
    ]
    with EpisodeLog(tmp_path) as log:
        assert names(log) == ["g-0", "g-1", "g-2"]


def test_rewinding_forgets_later_steps_in_every_file_and_can_be_repeated(tmp_path: Path) -> None:
    folder = tmp_path / "episodes"
    write(tmp_path, (1, episode("a-0")), (2, episode("b-0")), (1, episode("a-1")))
    write(tmp_path, (3, episode("c-0")))
    log = EpisodeLogWriter(folder, print)
    for step, name in ((1, "a-0"), (2, "b-0")):
        log.credit(step, build_samples(episode(name)).samples)
    log.close()
    with EpisodeLog(tmp_path) as log_before:
        assert (log_before.count(), len(log_before.credit("b-0"))) == (4, 1)
    (folder / ".tokens-000001.arrows.tmp").write_bytes(b"of a process that was killed")
    for _ in range(2):
        rewind(folder, 1)
        with EpisodeLog(tmp_path) as read:
            assert names(read) == ["a-0", "a-1"]  # a row of an earlier step stays, also behind a later one
            assert (len(read.credit("a-0")), read.credit("b-0")) == (1, ())
    assert not list(folder.glob(".*"))
    write(tmp_path, (2, episode("b-0", 0.0)))
    with EpisodeLog(tmp_path) as read:
        assert read.read("b-0").episode.reward == 0.0


def test_a_run_that_is_looked_at_is_followed_and_may_be_rewound(tmp_path: Path) -> None:
    writer = EpisodeLogWriter(tmp_path / "episodes", print)
    writer.episode(1, episode("a-0"))
    writer.flush()
    with EpisodeLog(tmp_path) as log:
        assert names(log) == ["a-0"]
        writer.episode(2, episode("b-0"))
        writer.close()
        log.refresh()
        assert names(log) == ["a-0", "b-0"]
        kept, forgotten = log.list()
        rewind(tmp_path / "episodes", 1)
        with pytest.raises(DataError, match="replaced by a run that was resumed"):
            log.read(forgotten)
        assert log.read(kept).step == 1, "what stays is where it was"
        log.refresh()
        assert log.list() == [kept], "and in the index"
        assert log.read("a-0").episode.reward == 1.0


def test_the_newer_of_two_with_one_name_counts_in_whatever_order_they_are_indexed(tmp_path: Path) -> None:
    write(tmp_path, (1, episode("g-0", 0.0)))
    write(tmp_path, (1, episode("g-0", 1.0)))
    for _ in range(2):
        with EpisodeLog(tmp_path) as log:
            assert [found.reward for found in log.list()] == [1.0]
        first = tmp_path / "episodes" / "tokens-000001.arrows"
        index = Index(tmp_path / "episodes")
        index._forget(first.name)
        index.close()


def test_what_was_drawn_again_counts_once_more_when_the_newer_one_is_forgotten(tmp_path: Path) -> None:
    write(tmp_path, (1, episode("g-0", 0.0)), (1, episode("g-1", 0.25)))
    write(tmp_path, (1, episode("h-0", 0.5)), (2, episode("g-0", 1.0)))
    with EpisodeLog(tmp_path) as log:
        assert sorted((e.episode_id, e.reward) for e in log.list()) == [("g-0", 1.0), ("g-1", 0.25), ("h-0", 0.5)]
    rewind(tmp_path / "episodes", 1)
    with EpisodeLog(tmp_path) as log:
        assert sorted((e.episode_id, e.reward) for e in log.list()) == [("g-0", 0.0), ("g-1", 0.25), ("h-0", 0.5)]


@pytest.mark.parametrize("harm", ["delete", "garbage", "other version"])
def test_the_index_is_made_again(tmp_path: Path, harm: str) -> None:
    write(tmp_path, (1, episode("g-0")), (1, episode("g-1")))
    path = tmp_path / "episodes" / INDEX
    EpisodeLog(tmp_path).close()
    if harm == "delete":
        path.unlink()
    elif harm == "garbage":
        path.write_bytes(b"no database at all" * 1000)
    else:
        index = Index(path.parent)
        index.db.execute("DELETE FROM episodes")
        index.db.execute("PRAGMA user_version = 99")
        index.close()
    with EpisodeLog(tmp_path) as log:
        assert names(log) == ["g-0", "g-1"]


def test_a_folder_that_cannot_be_written_can_be_read(tmp_path: Path) -> None:
    write(tmp_path, (1, episode("g-0")))
    (tmp_path / "episodes").chmod(0o500)
    try:
        with EpisodeLog(tmp_path) as log:
            assert names(log, "text~apple") == ["g-0"]
    finally:
        (tmp_path / "episodes").chmod(0o700)


def test_conditions_find_what_they_say(tmp_path: Path) -> None:
    chinese = turn(0, [1], [2, 3], message={"role": "assistant", "content": "苹果派很好吃"}, agent="wolf|x")
    write(
        tmp_path,
        (1, episode("g-0", 0.25)),
        (1, episode("g-1", 1.0)),
        (2, episode("h-0", None, error="the engine is gone")),
        (3, episode("i-0", 0.5, turns=(chinese,), external=())),
    )
    with EpisodeLog(tmp_path) as log:
        for condition, found in {
            "reward>=0.5": ["g-1", "i-0"],
            "reward=none": ["h-0"],
            "reward!=1": ["g-0", "h-0", "i-0"],
            "success=true": ["g-1"],
            "success=none": ["h-0"],
            "step<=1": ["g-0", "g-1"],
            "group=g": ["g-0", "g-1"],
            "episode=h-0": ["h-0"],
            "stop_reason!=completed": ["h-0"],
            "error~ENGINE": ["h-0"],
            "agent=wolf|x": ["i-0"],
            "agent=wolf": [],
            "agent!=critic": ["i-0"],
            "tool=search": ["g-0", "g-1", "h-0"],
            "tokens<6": ["i-0"],
            "text~bananas": ["g-0", "g-1", "h-0"],
            "text~pears": ["g-0", "g-1", "h-0"],
            "text~PIE appl": ["g-0", "g-1", "h-0", "i-0"],
            "text~果派": ["i-0"],
            'text~"OR*': [],
        }.items():
            assert names(log, condition) == found, condition
        assert names(log, "reward>0", order="reward", descending=True) == ["g-1", "i-0", "g-0"]
        assert names(log, limit=2, offset=1) == ["g-1", "h-0"]
        assert log.count(["split=train", "step>=2"]) == 2
        first = log.list()[0]
        assert (first.turns, first.tokens, first.prompt_tokens, first.branches) == (4, 6, 7, 2)
        assert (first.agents, first.tools) == (("solver", "critic", "oracle"), ("search",))
        with pytest.raises(ConfigError) as e:
            log.list(["mood=good", "reward~1", "step>x"])
        assert len(e.value.problems) == 3
        assert "there is no 'mood'; there are step" in str(e.value)


def test_credit_says_which_token_was_trained_and_how(tmp_path: Path) -> None:
    one = episode()
    samples = [*build_samples(one).samples]
    log = EpisodeLogWriter(tmp_path / "episodes", print)
    log.episode(1, one)
    log.credit(1, [_credited(s, 0.5) for s in samples])
    log.close()
    with EpisodeLog(tmp_path) as read:
        (again,) = read.read("g-0").samples()
    assert again == _credited(samples[0], 0.5)
    assert again.loss_mask == [0, 0, 0, 1, 1, 0, 0, 1]


def _credited(sample: Sample, advantage: float) -> Sample:
    return replace(sample, advantage=advantage, token_weight=0.125)


def test_the_caller_waits_when_too_much_is_queued_and_nothing_is_lost(tmp_path: Path) -> None:
    said: list[str] = []
    log = EpisodeLogWriter(tmp_path / "episodes", said.append, queue_bytes=1)
    for i in range(20):
        log.episode(1, episode(f"g-{i}"))
    log.close()
    with EpisodeLog(tmp_path) as read:
        assert read.count() == 20
    assert len(said) == 1
    assert "save_tokens=false" in said[0]


def test_a_disk_that_fails_is_told_to_the_caller_once(tmp_path: Path) -> None:
    full = "episodes"
    (tmp_path / full).write_text("not a folder")
    log = EpisodeLogWriter(tmp_path / full, print)
    with pytest.raises(OSError) as e:  # noqa: PT011  # its number is looked at below
        log.episode(1, episode())
    assert e.value.errno in (errno.EEXIST, errno.ENOTDIR)
    log.close()


def log_many(log: EpisodeLogWriter, count: int) -> None:
    for i in range(count):
        log.episode(1, episode(f"g-{i}"))
    log.close()


def test_a_full_disk_keeps_its_number(tmp_path: Path) -> None:
    (tmp_path / "episodes").mkdir()
    log = EpisodeLogWriter(tmp_path / "episodes", print)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old[1]))
    try:
        with pytest.raises(OSError) as e:  # noqa: PT011  # its number is looked at below
            log_many(log, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert e.value.errno == errno.EFBIG


@pytest.mark.parametrize("bound", ["UNINDEXED", "UNINDEXED_BYTES"])
def test_the_run_leaves_no_more_than_so_much_to_whoever_opens_the_log(
    tmp_path: Path, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *((1, episode(f"g-{i}")) for i in range(3)))
    assert not (tmp_path / "episodes" / INDEX).exists()
    monkeypatch.setattr(writer, bound, 3 if bound == "UNINDEXED" else 4000)
    write(tmp_path, *((2, episode(f"h-{i}")) for i in range(5)))
    index = Index(tmp_path / "episodes")
    indexed = index.db.execute("SELECT count(*) FROM episodes").fetchone()[0]
    index.close()
    assert 6 <= indexed <= 8, "those of an earlier process too"
    with EpisodeLog(tmp_path) as log:
        assert log.count() == 8


def test_an_index_that_cannot_be_written_costs_the_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "UNINDEXED", 1)
    (tmp_path / "episodes" / INDEX).mkdir(parents=True)
    said: list[str] = []
    log = EpisodeLogWriter(tmp_path / "episodes", said.append)
    for i in range(3):
        log.episode(1, episode(f"g-{i}"))
        log.flush()
    log.close()
    (note,) = said
    assert "cannot be written" in note
    (tmp_path / "episodes" / INDEX).rmdir()
    with EpisodeLog(tmp_path) as read:
        assert read.count() == 3


def test_a_newer_format_and_a_strangers_file_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "episodes"
    write(tmp_path, (1, episode()))
    (path,) = folder.glob("tokens-*")
    schema = pa.schema(
        [("a", pa.int32())], {b"astuner.format": b"9", b"astuner.kind": b"tokens", b"astuner.file": b"x"}
    )
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, schema):
        pass
    with pytest.raises(DataError, match="format 9 of the episode log"):
        EpisodeLog(tmp_path)
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, pa.schema([("a", pa.int32())])):
        pass
    with pytest.raises(DataError, match="was not written by ASTuner"):
        EpisodeLog(tmp_path)


def test_a_file_that_knows_no_times_is_read_without_them(tmp_path: Path) -> None:
    write(tmp_path, (1, episode()))
    (path,) = (tmp_path / "episodes").glob("tokens-*")
    with pa.memory_map(str(path)) as file:
        stream = pa.ipc.open_stream(file)
        columns, rows = stream.schema, stream.read_all().to_pylist()

    def earlier(name: str) -> bool:
        return name not in ("started", "seconds")

    def without_times(field: Any) -> Any:
        inner = [f for f in field.type.value_type if earlier(f.name)]
        return field.with_type(pa.list_(pa.struct(inner)))

    kept = [without_times(f) if f.name in ("turns", "external") else f for f in columns if f.name != "started"]
    older = pa.schema(kept, columns.metadata)
    for row in rows:
        del row["started"]
        for turn in (*row["turns"], *row["external"]):
            del turn["started"], turn["seconds"]
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, older) as written:
        written.write_table(pa.Table.from_pylist(rows, schema=older))
    with EpisodeLog(tmp_path) as log:
        read = log.read("g-0").episode
    assert (read.started, read.seconds) == (None, 1.5)
    assert {(t.started, t.seconds) for t in (*read.turns, *read.external)} == {(None, None)}


def test_a_run_without_a_log_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="save_tokens=false"):
        EpisodeLog(tmp_path)


@pytest.mark.slow
def test_pyarrow_is_not_imported_before_it_is_used() -> None:
    code = "import sys, astuner.runs.run, astuner_record.episode_log; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0


def test_batches_are_those_that_pyarrow_makes_without_what_it_imports() -> None:
    numpy = pytest.importorskip("numpy")
    tokens = [episode_row(n, episode(f"g-{n}", n % 2 or None), 1.5) for n in range(11)]
    tokens[3]["turns"] = []
    one = build_samples(episode()).samples[0]
    credit = credit_rows(1, [one] * 3, {1: numpy.arange(one.trained_tokens, dtype="float32")})
    for kind, rows in ((TOKENS, tokens), (CREDIT, credit)):
        columns = schema(kind)
        for some in (rows, rows[:1], []):
            made = Columns(columns).batch(some)
            made.validate(full=True)
            assert made.equals(pa.RecordBatch.from_pylist(some, schema=columns))
    wrong = credit_rows(1, [one], {0: numpy.zeros(one.trained_tokens)})
    with pytest.raises(ValueError, match=r"trainer_logprobs: an array of 'd' where 'f'"):
        Columns(schema(CREDIT)).batch(wrong)
    with pytest.raises(ValueError, match="turns: policy_version: "):
        Columns(schema(TOKENS)).batch([{**tokens[0], "turns": [{**tokens[0]["turns"][0], "policy_version": "x"}]}])


@pytest.mark.slow
def test_a_run_that_logs_imports_no_pandas(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    code = (
        "import sys; from pathlib import Path; from astuner_record.episode_log import EpisodeLogWriter;"
        "sys.path.insert(0, sys.argv[2]); from test_episode_log import episode\n"
        "before = 'pandas' in sys.modules\n"
        "log = EpisodeLogWriter(Path(sys.argv[1]), print); log.episode(1, episode()); log.close()\n"
        "assert before == ('pandas' in sys.modules), 'pandas was imported'"
    )
    command = [sys.executable, "-c", code, str(tmp_path), here]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
