"""The episode log: what is written is what happened, whatever becomes of the process, and others can read it."""

from __future__ import annotations

import enum
import errno
import fcntl
import itertools
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import UserDict, UserList
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
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
from astuner.contracts.errors import ConfigError, DataError, RunError  # noqa: E402
from astuner.contracts.interrupt import Interrupt  # noqa: E402
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
from astuner.rollout.turns import build_samples  # noqa: E402
from astuner_record.episode_log import EpisodeLog, EpisodeLogWriter, rewind, side_files, store  # noqa: E402
from astuner_record.episode_log.rows import (  # noqa: E402
    EPISODE,
    LARGEST,
    LOGPROBS,
    credit_rows,
    episode_row,
    json_text,
    numbers,
    packed,
    read_episode,
    unpacked,
)
from astuner_record.episode_log.store import DATABASE  # noqa: E402

OLDER = Path(__file__).parent / "data" / "format1" / "episodes"
"""A log as an earlier ASTuner left it: two episodes of step 2 after one of step 1, of which one is drawn again; and in
the journal of a process that was killed three of step 3."""


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
            1,
            [1, 2, 3, 4, 5, 6, 7],
            [8],
            0,
            started=1.7e9,
            seconds=0.5,
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


def write(folder: Path, *logged: tuple[int, Episode]) -> None:
    log = EpisodeLogWriter(folder / "episodes")
    for step, one in logged:
        log.episode(step, one)
    log.close()


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
    row = msgspec.msgpack.decode(packed(episode_row(1, original, 0.0))[0])
    read = read_episode(unpacked(row, EPISODE))
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


class Bad:
    """Each of its methods is somebody's own code, and raises what is no `Exception`."""

    def __getattr__(self, name: str) -> Any:
        raise SystemExit(name)

    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


class Endless(UserDict[str, int]):
    def items(self) -> Any:
        return ((str(n), n) for n in itertools.count())


def test_whatever_a_workflow_returned_is_written_and_read() -> None:
    laughs: list[Any] = ["ha"]
    for _ in range(60):
        laughs = [laughs, laughs]
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    circle: dict[str, Any] = {}
    circle["again"] = circle
    metadata = {
        "huge": 10**5000, "large": -(10**600), "bad": Bad(), "of bad": {Bad(): 1}, "deep": deep, "circle": circle,
        "endless": Endless(), "answer": "4",
    }  # fmt: skip
    details = {"bad": Bad(), "deep": deep}
    output = WorkflowOutput(response="ok", metadata=metadata, evaluation=Evaluation(score=1.0, details=details))
    task = replace(episode("g-1").workflow_task.task, metadata={"a": 10**5000})
    whole = replace(episode("g-1"), output=output)
    whole = replace(whole, workflow_task=replace(whole.workflow_task, task=task))
    with Interrupt().listening():
        data, _ = packed(episode_row(1, whole, 0.0))
    assert len(data) < 2 * LARGEST
    read = read_episode(unpacked(msgspec.msgpack.decode(data), EPISODE))
    assert read.turns == whole.turns
    assert read.workflow_task.task.metadata == {"a": "<an integer of 16,610 bits>"}
    assert read.output is not None
    assert read.output.metadata["large"] == -(10**600)
    assert read.output.metadata["huge"] == "<an integer of 16,610 bits>"
    assert read.output.metadata["bad"] == "<Bad>"
    assert list(read.output.metadata["of bad"]) == ["<Bad, whose text cannot be made: KeyboardInterrupt>"]
    assert read.output.metadata["circle"]
    for huge in ("x" * (LARGEST + 1), laughs, [0] * LARGEST):
        long = replace(whole, output=WorkflowOutput(response=huge, metadata={"answer": "4"}))
        data, _ = packed(episode_row(1, long, 0.0))
        assert len(data) < 2 * LARGEST
        shown = read_episode(unpacked(msgspec.msgpack.decode(data), EPISODE)).output
        assert shown is not None
        assert shown.metadata == {"answer": "4"}
        assert huge is laughs or isinstance(huge, list) or shown.response.endswith("too many for the log>")


def killed_after(tmp_path: Path, lines: str) -> None:
    """A process that logs to ``tmp_path``, does what ``lines`` say with ``log``, and is killed."""
    script = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_episode_log import episode\nfrom astuner_record.episode_log import EpisodeLogWriter\n"
        f"log = EpisodeLogWriter(Path({str(tmp_path)!r}) / 'episodes')\n"
        f"{lines}\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


@pytest.mark.slow
def test_a_killed_process_loses_no_episode_that_was_logged(tmp_path: Path) -> None:
    killed_after(
        tmp_path,
        "for i in range(20):\n    log.episode(1, episode(f'g-{i}'))\n"
        "for i in range(20, 400):\n    log.episode(2, episode(f'g-{i}'))",
    )
    with EpisodeLog(tmp_path) as log:
        assert names(log) == [f"g-{i}" for i in range(400)]
        assert all(one.episode.turns == episode().turns for one in log.read_all())
        assert log.count(["step=1"]) == 20


@pytest.mark.slow
def test_what_a_killed_process_left_is_resumed_from(tmp_path: Path) -> None:
    killed_after(tmp_path, "for step in (1, 2):\n    log.episode(step, episode(f'g-{step}'))")
    rewind(tmp_path / "episodes", 1)
    with EpisodeLog(tmp_path) as log:
        assert names(log) == ["g-1"]


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("odd", ["reward", "task id", "agent", "logprobs"])
def test_what_is_nearly_a_plain_value_is_read_as_one(tmp_path: Path, odd: str) -> None:
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
    write(tmp_path, (1, one))
    with EpisodeLog(tmp_path) as log:
        read = log.read("g-0").episode
    assert (read.verdict, read.turns, read.workflow_task.task) == (one.verdict, one.turns, one.workflow_task.task)


def test_half_a_character_is_spelled_out(tmp_path: Path) -> None:
    one = episode("\ud800-0", error="half \ud800")
    writer = EpisodeLogWriter(tmp_path / "episodes")
    writer.episode(1, one)
    writer.credit(1, build_samples(one).samples)
    writer.close()
    with EpisodeLog(tmp_path) as log:
        logged = log.read("\\ud800-0")
    assert logged.episode.error == "half \\ud800"
    assert len(logged.credit) == 1


def test_what_the_log_does_not_take_is_said_with_its_column(tmp_path: Path) -> None:
    log = EpisodeLogWriter(tmp_path / "episodes")
    generation = replace(episode().turns[0].generation, policy_version="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="turns: policy_version: "):
        log.episode(1, episode(turns=(replace(episode().turns[0], generation=generation),)))
    log.episode(1, episode("g-1"))
    log.close()
    with EpisodeLog(tmp_path) as read:
        assert names(read) == ["g-1"], "nothing of the other is left"


def test_a_database_that_does_something_is_not_opened(tmp_path: Path) -> None:
    write(tmp_path, (1, episode("g-0")))
    with closing(sqlite3.connect(tmp_path / "episodes" / DATABASE)) as db:
        db.execute("CREATE TRIGGER mine AFTER INSERT ON episodes BEGIN DELETE FROM data; END")
    with pytest.raises(DataError, match="triggers or views"):
        EpisodeLog(tmp_path)


def test_a_row_that_would_fill_the_memory_is_not_unfolded(tmp_path: Path) -> None:
    write(tmp_path, (1, episode("g-0")), (1, episode("g-1")))
    frame = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little")  # a head of Zstandard, which says its size
    with closing(sqlite3.connect(tmp_path / "episodes" / DATABASE)) as db, db:
        db.execute("UPDATE data SET row = ? WHERE episode_id = 'g-1'", (frame,))
    with EpisodeLog(tmp_path) as log:
        assert (names(log), [one.episode_id for one in log.lost]) == (["g-0"], ["g-1"])
    with EpisodeLog(tmp_path, check=False) as log, pytest.raises(DataError, match="1,099,511,627,776 bytes"):
        log.read("g-1")


def test_rewinding_forgets_later_steps_and_can_be_repeated(tmp_path: Path) -> None:
    folder = tmp_path / "episodes"
    write(tmp_path, (1, episode("a-0")), (2, episode("b-0")), (1, episode("a-1")))
    write(tmp_path, (3, episode("c-0")))
    log = EpisodeLogWriter(folder)
    for step, name in ((1, "a-0"), (2, "b-0")):
        log.credit(step, build_samples(episode(name)).samples)
    log.close()
    with EpisodeLog(tmp_path) as log_before:
        assert (log_before.count(), len(log_before.credit("b-0"))) == (4, 1)
    for _ in range(2):
        rewind(folder, 1)
        with EpisodeLog(tmp_path) as read:
            assert names(read) == ["a-0", "a-1"]  # a row of an earlier step stays, also behind a later one
            assert (len(read.credit("a-0")), read.credit("b-0")) == (1, ())
    write(tmp_path, (2, episode("b-0", 0.0)))
    with EpisodeLog(tmp_path) as read:
        assert read.read("b-0").episode.reward == 0.0


def test_a_run_that_is_looked_at_is_followed_and_may_be_rewound(tmp_path: Path) -> None:
    writer = EpisodeLogWriter(tmp_path / "episodes")
    writer.episode(1, episode("a-0"))
    with EpisodeLog(tmp_path) as log:
        assert names(log) == ["a-0"]
        writer.episode(2, episode("b-0"))
        writer.close()
        assert names(log) == ["a-0", "b-0"]
        kept, forgotten = log.list()
        rewind(tmp_path / "episodes", 1)
        with pytest.raises(DataError, match="replaced by a resumed run"):
            log.read(forgotten)
        assert log.read(kept).step == 1, "what stays is where it was"
        assert log.list() == [kept]
        assert log.read("a-0").episode.reward == 1.0


def test_what_was_drawn_again_counts_once_more_when_the_newer_one_is_forgotten(tmp_path: Path) -> None:
    write(tmp_path, (1, episode("g-0", 0.0)), (1, episode("g-1", 0.25)))
    write(tmp_path, (1, episode("h-0", 0.5)), (2, episode("g-0", 1.0)))
    with EpisodeLog(tmp_path) as log:
        assert sorted((e.episode_id, e.reward) for e in log.list()) == [("g-0", 1.0), ("g-1", 0.25), ("h-0", 0.5)]
    rewind(tmp_path / "episodes", 1)
    with EpisodeLog(tmp_path) as log:
        assert sorted((e.episode_id, e.reward) for e in log.list()) == [("g-0", 0.0), ("g-1", 0.25), ("h-0", 0.5)]


def test_a_folder_that_cannot_be_written_can_be_read(tmp_path: Path) -> None:
    write(tmp_path, (1, episode("g-0")))
    (tmp_path / "episodes").chmod(0o500)
    try:
        with EpisodeLog(tmp_path) as log:
            assert names(log, "text~apple") == ["g-0"]
    finally:
        (tmp_path / "episodes").chmod(0o700)


@pytest.mark.parametrize("limit", [0, 4096], ids=["nothing", "a page"])
def test_a_log_on_a_full_disk_can_be_read_and_followed(tmp_path: Path, limit: int) -> None:
    write(tmp_path, (1, episode("g-0")))
    with disk_of(limit), EpisodeLog(tmp_path) as log:
        assert names(log, "text~apple") == ["g-0"]
        assert log.read("g-0").episode.turns == episode().turns
    writer = EpisodeLogWriter(tmp_path / "episodes")
    writer.episode(1, episode("g-1"))
    with EpisodeLog(tmp_path) as log:
        with disk_of(limit):
            assert names(log) == ["g-0", "g-1"], "its lists are in memory"
        writer.episode(1, episode("g-2"))
        assert names(log, "text~apple") == ["g-0", "g-1", "g-2"]
    writer.close()
    assert listed(tmp_path) == [], "a reader writes nothing"


def test_a_run_leaves_no_more_to_readers_than_they_list_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_UNLISTED", 4096)
    monkeypatch.setattr(store, "_AT_ONCE", 1)
    writer = EpisodeLogWriter(tmp_path / "episodes")
    for i in range(40):
        writer.episode(1, episode(f"g-{i}"))
    already = listed(tmp_path)
    assert 0 < len(already) < 40
    with EpisodeLog(tmp_path) as log:
        assert names(log) == [f"g-{i}" for i in range(40)]
        assert listed(tmp_path) == already
        writer.close()
        assert names(log, "text~apple") == [f"g-{i}" for i in range(40)]
    assert listed(tmp_path) == already


def test_a_reader_that_stands_still_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = EpisodeLogWriter(tmp_path / "episodes")
    writer.episode(1, episode("g-0"))
    writer._db.execute("PRAGMA busy_timeout = 0")  # type: ignore[union-attr]
    was, stopped = store._list, []

    def listing(db: store.Database, *arguments: Any) -> None:
        was(db, *arguments)
        if not stopped:  # as one that is stopped with SIGSTOP in the middle
            stopped.append(db)
            writer.episode(1, episode("g-1"))
            writer.credit(1, [])

    monkeypatch.setattr(store, "_list", listing)
    with EpisodeLog(tmp_path) as log:
        assert names(log) == ["g-0", "g-1"]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            log._db.execute("DELETE FROM main.data")
    assert stopped
    writer.close()


def listed(run: Path) -> list[str]:
    """The episodes that are in the lists of the database itself."""
    with closing(sqlite3.connect(run / "episodes" / DATABASE)) as db:
        return [name for (name,) in db.execute("SELECT episode_id FROM episodes ORDER BY id")]


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Files can have no more bytes than ``size``."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


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
        assert "'mood' is not a known field; available: step" in str(e.value)


def test_conditions_name_metadata_of_tasks(tmp_path: Path) -> None:
    def of_task(name: str, **metadata: Any) -> Episode:
        made = episode(name)
        task = replace(made.workflow_task.task, metadata=metadata)
        return replace(made, workflow_task=replace(made.workflow_task, task=task))

    one = {"layout": "one column", "size": {"pages": 3}, "split": "odd", "tags": ["a"]}
    write(tmp_path, (1, of_task("g-0", **one)), (1, of_task("g-1", **one)), (1, of_task("h-0", layout="two", size=2)))
    with EpisodeLog(tmp_path) as log:
        for condition, found in {
            "layout=one column": ["g-0", "g-1"],
            "layout=one_column": ["g-0", "g-1"],  # as in names of metrics
            "layout!=two": ["g-0", "g-1"],
            "layout~TW": ["h-0"],
            "size.pages>=3": ["g-0", "g-1"],
            "size.pages!=3": ["h-0"],
            "metadata.split=odd": ["g-0", "g-1"],
            "split=odd": [],
        }.items():
            assert names(log, condition) == found, condition
        assert log.fields() == [("layout", (("one column", 2), ("two", 1)))]
        with pytest.raises(ConfigError, match=r"in the tasks' metadata: layout, size, size\.pages, split"):
            log.list(["mood=good", "layout=two"])
        assert log.facets()["split"] == (("train", 3),)
        write(tmp_path, (2, of_task("i-0", layout="three")), (2, of_task("h-0", layout="two")))
        assert names(log, "layout=three") == ["i-0"]
        assert log.fields() == [("layout", (("one column", 2), ("three", 1), ("two", 1)))]  # counted again
        assert log.facets()["split"] == (("train", 4),)


def test_credit_says_which_token_was_trained_and_how(tmp_path: Path) -> None:
    one = episode()
    samples = [*build_samples(one).samples]
    log = EpisodeLogWriter(tmp_path / "episodes")
    log.episode(1, one)
    log.credit(1, [_credited(s, 0.5) for s in samples])
    log.close()
    with EpisodeLog(tmp_path) as read:
        (again,) = read.read("g-0").samples()
    assert again == _credited(samples[0], 0.5)
    assert again.loss_mask == [0, 0, 0, 1, 1, 0, 0, 1]


def _credited(sample: Sample, advantage: float) -> Sample:
    return replace(sample, advantage=advantage, token_weight=0.125)


def test_a_disk_that_fails_is_told_to_the_caller_once(tmp_path: Path) -> None:
    full = "episodes"
    (tmp_path / full).write_text("not a folder")
    log = EpisodeLogWriter(tmp_path / full)
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
    log = EpisodeLogWriter(tmp_path / "episodes")
    with disk_of(4096), pytest.raises(OSError) as e:  # noqa: PT011  # its number is looked at below
        log_many(log, 20)
    assert e.value.errno in (errno.ENOSPC, errno.EIO)


def test_a_lock_of_another_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BUSY_SECONDS", 0.1)
    (tmp_path / "episodes").mkdir()
    log = EpisodeLogWriter(tmp_path / "episodes")
    log.episode(1, episode())
    with closing(sqlite3.connect(tmp_path / "episodes" / store.DATABASE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(RunError, match=r"locked .*episodes\.sqlite.*--resume"):
            log_many(log, 20)


REWOUND = """
import os, sqlite3, sys
from pathlib import Path
from astuner_record.episode_log import EpisodeLog, rewind
folder = Path(sys.argv[1])
reader = sqlite3.connect(folder / "episodes.sqlite")  # so that closing the writer moves nothing into the database
reader.execute("SELECT count(*) FROM data").fetchone()
rewind(folder, 1)
os._exit(9)
"""


def test_a_log_that_was_rewound_before_the_run_was_killed_is_read(tmp_path: Path) -> None:
    """Its write-ahead log takes the newest rows away, and belongs to it all the same."""
    folder = tmp_path / "episodes"
    log = EpisodeLogWriter(folder)
    for step in (1, 2, 3):
        log.episode(step, episode(f"g{step}-0"))
    log.close()
    assert subprocess.run([sys.executable, "-c", REWOUND, str(folder)], check=False).returncode == 9
    assert Path(f"{folder / store.DATABASE}-wal").stat().st_size > 0
    with EpisodeLog(tmp_path) as read:
        assert [e.step for e in read.list()] == [1]
        assert read.problems == ()
    EpisodeLogWriter(folder).close()
    assert not list(folder.glob("*.foreign-*"))


@pytest.mark.parametrize("holder", ["reader here", "writer here", "reader elsewhere"])
def test_nothing_is_looked_at_while_a_process_has_the_log_open(holder: str, tmp_path: Path) -> None:
    """A file that Python opens and closes takes the locks of this process away; what is open is in use."""
    folder = tmp_path / holder / "episodes"
    log = EpisodeLogWriter(folder)
    log.episode(1, episode("g1-0"))
    path = folder / store.DATABASE
    code = f"import sqlite3, time; c = sqlite3.connect({str(path)!r}); c.execute('BEGIN'); "
    code += "c.execute('SELECT count(*) FROM data').fetchone(); print('open', flush=True); time.sleep(60)"
    with ExitStack() as stack:
        if holder == "reader elsewhere":
            log.close()
            child = stack.enter_context(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
            stack.callback(child.kill)
            assert child.stdout is not None
            assert child.stdout.readline() == b"open\n"
        elif holder == "reader here":
            stack.enter_context(EpisodeLog(folder.parent))
            log.close()
        else:
            stack.callback(log.close)
        wal = Path(f"{path}-wal")
        wal.write_bytes(b"not a log" * 100) if holder != "writer here" else None
        assert side_files.foreign_files(path) == {}
        if holder != "writer here":
            wal.unlink()


def older(folder: Path) -> Path:
    """A copy of a run that an earlier ASTuner has written."""
    shutil.copytree(OLDER, folder / "run" / "episodes")
    return folder / "run"


@pytest.mark.parametrize("how", ["it can be written", "it cannot", "an older ASTuner writes it"])
def test_what_an_earlier_astuner_wrote_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    run = older(tmp_path)
    before = sorted(path.name for path in OLDER.iterdir())
    if how == "it cannot":

        def refused(path: Path, **options: Any) -> None:
            raise PermissionError(path)

        monkeypatch.setattr(Path, "touch", refused)
    (journal,) = (run / "episodes").glob("*.journal")
    with journal.open("rb") if how.startswith("an older") else nullcontext() as held:
        if held:
            fcntl.flock(held, fcntl.LOCK_EX)
        with EpisodeLog(run) as log:
            assert log.problems == ()
            assert names(log) == ["h-0", "g-0", "k-0", "k-1", "k-2"]
            assert log.list(["step=2", "text~apple pie", "reward=none"])[0].error == "the engine is gone"
            again = log.read("g-0")
            assert (again.episode.turns, again.episode.reward) == (episode().turns, 0.5)
            assert again.credit[0].trainer_logprobs == (-0.5, -0.5, -0.5)
    there = sorted(path.name for path in (run / "episodes").iterdir() if DATABASE not in path.name)
    assert there == before, "the old files stay as they are"
    assert (run / "episodes" / DATABASE).exists() == (how == "it can be written")


def test_a_run_of_an_earlier_astuner_goes_on(tmp_path: Path) -> None:
    run = older(tmp_path)
    assert rewind(run / "episodes", 1) == ()
    write(run, (2, episode("n-0")))
    with EpisodeLog(run) as log:
        assert [(one.episode_id, one.reward) for one in log.list()] == [("g-0", 1.0), ("n-0", 1.0)]


def test_what_is_torn_or_damaged_in_an_older_log_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    run = older(tmp_path)
    last = run / "episodes" / "tokens-000003.arrows"
    last.write_bytes(last.read_bytes()[:-100])
    (journal,) = (run / "episodes").glob("*.journal")
    data = bytearray(journal.read_bytes())
    data[-200] ^= 1  # in the last entry
    journal.write_bytes(data)
    (run / "episodes" / "1-2.journal").write_bytes(b"another's")
    (run / "episodes" / "tokens-000004.arrows").write_bytes(b"")
    with EpisodeLog(run) as log:
        assert names(log) == ["g-0", "h-0", "k-0", "k-1"]
        said = log.problems
    assert "not a complete batch" in said[0]
    assert "was not written by ASTuner" in said[1]
    assert "checksum mismatch" in said[2]


def test_a_log_of_format_2_is_read_and_gone_on_with(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    write(tmp_path, (1, episode("g-0")), (2, episode("h-0", 0.5)))
    with closing(store.connect(tmp_path / "episodes")) as db:
        for number, (id_, frame) in enumerate(db.execute("SELECT id, row FROM data ORDER BY id").fetchall(), start=1):
            alone = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(db.decoded(frame)[0]))
            db.execute("UPDATE data SET id = ?, row = ? WHERE id = ?", (number, alone, id_))
        db.execute("DELETE FROM episodes")
        db.execute("DROP TABLE dictionary")
        db.execute("PRAGMA user_version = 2")
    with EpisodeLog(tmp_path) as log:
        assert names(log, "text~apple") == ["g-0", "h-0"]
        rewind(tmp_path / "episodes", 1)
        write(tmp_path, (2, episode("i-0", 0.25)), (2, episode("h-0")))
        assert names(log) == ["g-0", "i-0", "h-0"], "whoever has opened it before goes on reading"
        assert [one.episode.turns for one in log.read_all()] == [episode().turns] * 3


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("PRAGMA user_version = 9", "format 9 of the episode log"),
        ("PRAGMA application_id = 7", "not written by ASTuner"),
    ],
)
def test_a_newer_format_and_a_strangers_database_are_refused(tmp_path: Path, harm: str, says: str) -> None:
    write(tmp_path, (1, episode()))
    with closing(sqlite3.connect(tmp_path / "episodes" / DATABASE)) as db:
        db.execute(harm)
    with pytest.raises(DataError, match=says):
        EpisodeLog(tmp_path)


def test_what_is_no_database_is_said(tmp_path: Path) -> None:
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes" / DATABASE).write_bytes(b"no database at all" * 1000)
    with pytest.raises(DataError, match="Move it out of the run folder"):
        EpisodeLog(tmp_path)


def test_log_probabilities_are_stored_as_float32_whatever_brings_them(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    one = build_samples(episode()).samples[0]
    for values in ([-1, -2, -3], numpy.array([-1, -2, -3]), numpy.array([-1, -2, -3], dtype="float32")):
        (row,) = credit_rows(1, [one], {0: values})
        assert numbers(row[-1], LOGPROBS) == [-1.0, -2.0, -3.0]


def test_a_run_without_a_log_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="save_tokens=false"):
        EpisodeLog(tmp_path)


@pytest.mark.slow
def test_pyarrow_is_not_imported_before_it_is_used() -> None:
    code = "import sys, astuner.runs.run, astuner_record.episode_log; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0


@pytest.mark.slow
def test_a_run_that_logs_imports_no_pandas(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    code = (
        "import sys; from pathlib import Path; from astuner_record.episode_log import EpisodeLogWriter;"
        "sys.path.insert(0, sys.argv[2]); from test_episode_log import episode\n"
        "before = 'pandas' in sys.modules\n"
        "log = EpisodeLogWriter(Path(sys.argv[1])); log.episode(1, episode()); log.close()\n"
        "assert before == ('pandas' in sys.modules), 'pandas was imported'"
    )
    command = [sys.executable, "-c", code, str(tmp_path), here]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
