"""Code that keeps the event loop to itself costs its own episode, and no other one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from astuner.chat.codec import ChatCodec
from astuner.contracts.types import Episode, SamplingParams, Split, StopReason, Task, WorkflowTask
from astuner.rollout import threads
from astuner.rollout.models import one_model
from astuner.rollout.pool import RolloutPool
from astuner.rollout.runner import EpisodeRunner
from astuner.rollout.threads import USER_CODE, LoopBlocked, Misbehaved, OutOfTime, TimeLimits, watching
from astuner_testing.fakes import FakeEngine, fake_config, make_tokenizer, workflow_task
from tests.table import table

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="interrupts by SIGALRM")

TOKENIZER = make_tokenizer()
CODEC = ChatCodec(TOKENIZER)
SAMPLING = SamplingParams(max_tokens=50)
LIMIT = 1.0
SHORT = 0.2

USER_CODE_FILE = """
import asyncio, time
from astuner import Judge, JudgeOutput, Workflow, WorkflowOutput

class Polite(Workflow):
    async def execute(self, workflow_task, model_tuner):
        await model_tuner.chat([{{"role": "user", "content": "hi"}}])
        await asyncio.sleep(0.01)
        if workflow_task.task.task_id == "bad":
            return await self.block()
        return WorkflowOutput()

    async def block(self):
{block}

class J(Judge):
    async def judge(self, workflow_task, output):
        if workflow_task.task.task_id == "bad judge":
            time.sleep(LONG)
        return JudgeOutput(reward=1.0)

LONG = {long}
"""


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    threads._told.clear()
    yield
    threads._told.clear()


def runner(tmp_path: Path, block: str, *, long: float = 3600, settings: str = "") -> EpisodeRunner:
    code = "\n".join(f"        {line}" for line in block.strip("\n").split("\n"))
    folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"  # a file is imported once
    folder.mkdir()
    (folder / "mine.py").write_text(USER_CODE_FILE.format(block=code, long=long))
    overrides = ["astuner.rollout.workflow=mine.py->Polite", "astuner.task_judge.judge=mine.py->J"]
    made = EpisodeRunner(
        fake_config(folder, f"  rollout: {{episode_timeout: {LIMIT}, max_retries: 0}}\n{settings}", overrides)
    )
    made.prepare()
    return made


def play(
    made: EpisodeRunner, *task_ids: str, watch: bool = True, tell: Callable[[str], None] = lambda text: None
) -> list[Episode]:
    """One episode of each task at once, after one that warms everything up."""
    engine = FakeEngine(lambda prompt: "answer", TOKENIZER)

    async def run(task: WorkflowTask) -> Episode:
        return await made.run(task, one_model(engine, CODEC), SAMPLING)

    async def all_of_them() -> list[Episode]:
        await run(workflow_task())
        pool = RolloutPool(run, max_parallel=8)
        draws = [(str(i), Task(task_id=name)) for i, name in enumerate(task_ids)]
        groups = await pool.run_groups(draws, repeat=1, split=Split.TRAIN)
        return [e for g in groups for e in g.episodes]

    return drive(all_of_them, tell=tell, watch=watch, limit=LIMIT)


def drive(
    work: Callable[[], Any],
    *,
    tell: Callable[[str], None] = lambda text: None,
    watch: bool = True,
    limit: float = SHORT,
) -> Any:
    loop = asyncio.new_event_loop()
    before = signal.getsignal(signal.SIGALRM)
    try:
        if not watch:
            return loop.run_until_complete(work())
        with watching(loop, limit, tell):
            return loop.run_until_complete(work())
    finally:
        loop.close()
        assert signal.getsignal(signal.SIGALRM) is before


STUBBORN = """
while True:
    try:
        time.sleep(LONG)
    except Exception:
        pass
"""


@pytest.mark.parametrize(
    "block",
    [
        "time.sleep(LONG)",
        "while True:\n    pass",
        STUBBORN,
        "try:\n    time.sleep(LONG)\nexcept Exception:\n    return WorkflowOutput(reward=1.0)",
    ],
    ids=["sleeps", "endless", "stubborn", "swallows"],
)
def test_a_workflow_that_blocks_the_loop_times_out_and_the_others_complete(tmp_path: Path, block: str) -> None:
    told: list[str] = []
    bad, *rest = play(runner(tmp_path, block), "bad", "good", "good", "good", tell=told.append)
    assert (bad.stop_reason, bad.reward) == (StopReason.TIMED_OUT, None), bad.error
    assert [e.stop_reason for e in rest] == [StopReason.COMPLETED] * 3, [e.error for e in rest]
    assert len(told) == 1
    assert "mine.py:" in told[0]
    assert "plain `def`" in told[0]
    if block == "time.sleep(LONG)":
        assert "mine.py:14 in block" in told[0]
        assert "mine.py:14 in block" in bad.error


def test_a_task_that_a_workflow_has_started_is_interrupted_too(tmp_path: Path) -> None:
    block = "async def more():\n    time.sleep(LONG)\nawait asyncio.gather(more(), asyncio.sleep(0))"
    (bad,) = play(runner(tmp_path, block), "bad")
    assert (bad.stop_reason, bad.reward) == (StopReason.TIMED_OUT, None), bad.error


def test_an_episode_that_is_done_but_took_too_long_timed_out_and_the_others_did_not(tmp_path: Path) -> None:
    made = runner(tmp_path, "time.sleep(LONG)\nreturn WorkflowOutput(reward=1.0)", long=2 * LIMIT)
    bad, *rest = play(made, "bad", "good", "good", watch=False)
    assert (bad.stop_reason, bad.reward) == (StopReason.TIMED_OUT, None)
    assert "blocked the event loop for" in bad.error
    assert [e.stop_reason for e in rest] == [StopReason.COMPLETED] * 2


def test_a_judge_that_blocks_the_loop_fails_and_the_others_judge_on(tmp_path: Path) -> None:
    bad, good = play(runner(tmp_path, "pass"), "bad judge", "good")
    assert (bad.stop_reason, bad.reward, good.reward) == (StopReason.JUDGE_FAILED, None, 1.0)
    assert "in judge" in bad.error
    done = runner(tmp_path, "pass", long=1.6, settings="  task_judge: {judge_timeout: 0.8}\n")
    bad, good = play(done, "bad judge", "good", watch=False)
    assert (bad.stop_reason, good.reward) == (StopReason.JUDGE_FAILED, 1.0)
    assert "judge_timeout" in bad.error


def test_a_blocked_line_is_told_once_however_often_it_blocks(tmp_path: Path) -> None:
    told: list[str] = []
    made = runner(tmp_path, "time.sleep(LONG)")
    play(made, "bad", "bad", tell=told.append)
    play(made, "bad", tell=told.append)
    assert len(told) == 1


def test_code_that_is_no_workflows_is_told_and_never_interrupted() -> None:
    told: list[str] = []

    async def work() -> str:
        time.sleep(3 * SHORT)
        return "done"

    assert drive(work, tell=told.append) == "done"
    assert "in work blocks the event loop" in told[0]


WAITS_FOR_A_LOCK = """
import contextlib, sqlite3

async def write(path, seconds):
    with contextlib.suppress(sqlite3.OperationalError):
        sqlite3.connect(path, timeout=seconds).execute("INSERT INTO log VALUES (1)")
"""


@table("is_users", [False, True])
def test_a_lock_is_blamed_on_user_code_only_if_that_waits_for_it(is_users: bool, tmp_path: Path) -> None:
    """Another program may hold a file of the run folder, e.g. one that copies the episode log."""
    database = tmp_path / f"{is_users}.sqlite"
    holder = sqlite3.connect(database, isolation_level=None)
    holder.execute("CREATE TABLE log (row)")
    holder.execute("BEGIN IMMEDIATE")
    file = tmp_path / "agent.py" if is_users else Path(threads.__file__).with_name("store.py")
    scope: dict[str, Any] = {}
    exec(compile(WAITS_FOR_A_LOCK, str(file), "exec"), scope)
    told: list[str] = []
    drive(lambda: scope["write"](database, 3 * SHORT), tell=told.append)
    (message,) = told
    assert f"{file}:6 in write" in message
    assert ("blocks the event loop" in message) == is_users
    assert ("ASTuner is blocked in" in message) == (not is_users)


def test_a_full_disk_that_takes_no_note_does_not_end_the_watch(tmp_path: Path) -> None:
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        raise OSError(errno.EFBIG, "File too large")

    (bad,) = play(runner(tmp_path, "time.sleep(LONG)"), "bad", tell=tell)
    assert told
    assert bad.stop_reason is StopReason.TIMED_OUT


SWALLOWS = """
import asyncio, contextlib
from astuner.rollout import threads

async def swallows():
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(3600)

async def give_it_up():
    with contextlib.suppress(threads.OutOfTime):
        await threads.TimeLimits().run(swallows(), 0.01)

threads.GRACE_SECONDS = 0.01
loop = asyncio.new_event_loop()
loop.run_until_complete(give_it_up())
loop.close()
print("over")
"""


def test_what_swallows_its_end_does_not_keep_python_from_ending() -> None:
    done = subprocess.run([sys.executable, "-c", SWALLOWS], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


def test_in_a_thread_beside_the_main_one_the_person_is_told_and_nothing_more() -> None:
    told: list[str] = []
    ended: list[str] = []

    async def work() -> None:
        USER_CODE.set(True)
        time.sleep(3 * SHORT)
        ended.append("in its own time")

    thread = threading.Thread(target=lambda: drive(work, tell=told.append))
    thread.start()
    thread.join()
    assert len(told) == 1
    assert ended == ["in its own time"]


def test_a_person_at_a_breakpoint_is_left_alone() -> None:
    told: list[str] = []
    debugger: dict[str, Any] = {"__name__": "pdb", "time": time}
    exec("def interaction():\n    time.sleep(%f)" % (3 * SHORT), debugger)

    async def work() -> str:
        USER_CODE.set(True)
        debugger["interaction"]()
        return "continued"

    assert drive(work, tell=told.append) == "continued"
    assert told == []


def test_many_short_steps_are_nobodys_fault() -> None:
    told: list[str] = []

    async def step() -> None:
        USER_CODE.set(True)
        time.sleep(SHORT / 5)

    async def work() -> None:
        await asyncio.gather(*(step() for _ in range(15)))

    drive(work, tell=told.append)
    assert told == []


def test_somebody_elses_alarm_reaches_its_handler() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    try:

        async def work() -> None:
            signal.raise_signal(signal.SIGALRM)

        drive(work)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert heard == [signal.SIGALRM]


def test_the_interruption_is_an_error_of_the_line_that_blocks() -> None:
    async def work() -> None:
        USER_CODE.set(True)
        with pytest.raises(LoopBlocked, match=r"test_watchdog\.py.* in work blocks the event loop"):
            time.sleep(3600)

    drive(work)


def test_a_time_limit_passes_on_results_errors_and_what_is_awaited() -> None:
    limits = TimeLimits()

    async def works() -> str:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        return await asyncio.to_thread(lambda: "done")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("mine")

    async def cancels_itself() -> None:
        raise asyncio.CancelledError

    async def waits() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        assert await limits.run(works(), 60) == "done"
        with pytest.raises(KeyError, match="mine"):
            await limits.run(fails(), 60)
        with pytest.raises(Misbehaved, match="cancelled itself"):
            await limits.run(cancels_itself(), 60)
        late: list[str] = []
        with pytest.raises(OutOfTime):
            await limits.run(waits(), 0.01, late=lambda: late.append("late"))
        assert late == ["late"]
        task = asyncio.ensure_future(limits.run(waits(), 60))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
