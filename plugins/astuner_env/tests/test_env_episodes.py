"""Episodes in an environment: opened before the workflow, judged by its score, never rewarded for its failures."""

from __future__ import annotations

import asyncio
import contextvars
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astuner.chat.codec import ChatCodec
from astuner.contracts.errors import ConfigError, DataError
from astuner.contracts.types import Episode, SamplingParams, Split, StopReason, Task, WorkflowTask
from astuner.rollout.models import one_model
from astuner.rollout.parts import build_task_reader
from astuner.rollout.runner import EpisodeRunner
from astuner.rollout.threads import Misbehaved, in_own_loop
from astuner.rollout.world import World
from astuner.runs.tasks import read_tasks
from astuner.testing import FakeEngine, fake_config, make_tokenizer
from tests.table import table

from ._env_standin import StandIn, drop, ok, refuse, stand_in, started, stepped

TOKENIZER = make_tokenizer()
CODE = """
import asyncio, contextvars, sys, threading, time
from pathlib import Path
from astuner import Environment, Evaluation, StepResult, Task, Workflow, WorkflowOutput
LOG = Path(__file__).with_name("log")
def note(text):
    with LOG.open("a") as file:
        file.write(text + "\\n")
class Count(Environment):
    @classmethod
    def tasks(cls, split, params):
        if split not in ("train", "dev"):
            raise ValueError(f"no split is called {split!r}; there are train, dev")
        yield from (Task(task_id=f"{split}-{n}", env_type="whatever") for n in range(params.get("tasks", 2)))
    def reset(self, task):
        note(f"reset {task.task_id}")
        self.left = self.params.get("steps", 2)
        return StepResult(observation="Count.", messages=[
            {"role": "system", "content": "rules"}, {"role": "user", "content": "Count."}])
    def step(self, action):
        self.left -= 1
        return StepResult(observation=f"{self.left} left", terminated=self.left == 0)
    def evaluate(self):
        note("evaluate")
        return Evaluation(score=0.25 if self.left else 1.0, success=not self.left, details={"left": self.left})
    def close(self):
        note("close")
class Mine(Workflow):
    async def execute(self, workflow_task, model_tuner):
        task = workflow_task.task
"""
TALK = "reply = await model_tuner.chat(task.init_messages)\n"
SERVED = "  task_reader:\n    type: env_service\n    env_service:\n      env_type: lake\n"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner_env.env_service.client.FIRST_PAUSE", 0.001)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with stand_in() as server:
        monkeypatch.setenv("ASTUNER_ENV_URL", server.url)
        yield server


def config_of(folder: Path, body: str, settings: str = "", judge: str = "env_service", rollout: str = "") -> Any:
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    (folder / "mine.py").write_text(CODE + lines)
    text = f"  rollout:\n    workflow: mine.py->Mine\n{rollout}  task_judge:\n    judge: {judge}\n{settings}"
    return fake_config(folder, text)


def play(folder: Path, body: str, *, env_type: str = "mine.py->Count", task: Any = None, **options: Any) -> Episode:
    config = config_of(folder, body, **options)
    attempt = WorkflowTask(task=task or Task(task_id="t1", env_type=env_type), episode_id="e", group_id="g")
    models = one_model(FakeEngine(lambda prompt: "left", TOKENIZER), ChatCodec(TOKENIZER))
    return asyncio.run(EpisodeRunner(config).run(attempt, models, SamplingParams(max_tokens=50)))


def log(folder: Path) -> list[str]:
    file = folder / "log"
    return file.read_text().splitlines() if file.exists() else []


# ------------------------------------------------------------------------------------------- before the workflow


def test_the_workflow_sees_what_the_environment_says_first(tmp_path: Path) -> None:
    body = TALK + "return WorkflowOutput(reward=0.0, metadata={'q': task.main_query, 'm': list(task.init_messages)})"
    episode = play(tmp_path, body)
    assert episode.output is not None
    assert episode.output.metadata["q"] == "Count."
    assert [m["role"] for m in episode.output.metadata["m"]] == ["system", "user"]
    assert episode.workflow_task.task.main_query == "Count."  # and so does whoever reads the episode
    assert log(tmp_path) == ["reset t1", "close"]  # a reward of the workflow's own: nobody asked for a score


def test_a_plain_function_sees_it_too(tmp_path: Path) -> None:
    config_of(tmp_path, "pass")
    function = (
        "async def mine(task, model):\n"
        "    reply = await model.chat(task['init_messages'])\n"
        "    model.gym_step(reply.message)\n"
        "    return float(task['main_query'] == 'Count.' and task['extra'] == 1)\n"
    )
    (tmp_path / "plain.py").write_text(function)
    config = fake_config(tmp_path, "  rollout:\n    workflow: plain.py->mine\n")
    task = Task(task_id="t1", env_type="mine.py->Count", metadata={"extra": 1})
    models = one_model(FakeEngine(lambda prompt: "left", TOKENIZER), ChatCodec(TOKENIZER))
    attempt = WorkflowTask(task=task, episode_id="e", group_id="g")
    episode = asyncio.run(EpisodeRunner(config).run(attempt, models, SamplingParams(max_tokens=50)))
    assert (episode.reward, episode.error) == (1.0, "")


def test_what_the_data_set_says_stays(tmp_path: Path) -> None:
    said = ({"role": "user", "content": "mine"},)
    body = "return WorkflowOutput(reward=0.0, metadata={'q': task.main_query, 'm': list(task.init_messages)})"
    task = Task(task_id="t1", env_type="mine.py->Count", main_query="q", init_messages=said)
    episode = play(tmp_path, body, task=task)
    assert episode.output is not None
    assert episode.output.metadata == {"q": "q", "m": [*said]}


def test_no_env_is_no_environment(tmp_path: Path) -> None:
    body = "return WorkflowOutput(reward=1.0)"
    assert play(tmp_path, body, env_type="no_env").stop_reason is StopReason.COMPLETED


def test_an_environment_that_cannot_be_started_is_no_reward(tmp_path: Path) -> None:
    episode = play(tmp_path, "return WorkflowOutput(reward=1.0)", env_type="nowhere", rollout="    max_retries: 1\n")
    assert (episode.stop_reason, episode.reward, episode.retries) == (StopReason.ENVIRONMENT_FAILED, None, 1)
    assert "unknown environment 'nowhere'" in episode.error


@pytest.mark.parametrize("where", ["__init__", "reset", "evaluate"])
@pytest.mark.parametrize("raised", ["SystemExit(3)", "ValueError('no')"])
def test_one_in_this_process_that_raises_is_no_reward(tmp_path: Path, where: str, raised: str) -> None:
    broken = f"class Broken(Count):\n    def {where}(self, *given):\n        raise {raised}\n"
    (tmp_path / "broken.py").write_text(CODE.partition("class Mine")[0] + broken)
    episode = play(tmp_path, TALK + "return WorkflowOutput()", env_type="broken.py->Broken")
    assert (episode.stop_reason, episode.reward) == (StopReason.ENVIRONMENT_FAILED, None)
    line = (tmp_path / "broken.py").read_text().splitlines().index(f"        raise {raised}") + 1
    assert episode.error.endswith(f" ({tmp_path / 'broken.py'}:{line} in {where})")
    assert raised.partition("(")[0] in episode.error


SLEEPY = """
class Sleepy(Count):
    def reset(self, task):
        time.sleep(0.5)
        return super().reset(task)
"""


def test_one_in_this_process_must_start_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner.rollout.runner.GRACE_SECONDS", 0.05)
    (tmp_path / "sleepy.py").write_text(CODE.partition("class Mine")[0] + SLEEPY)
    options = {"settings": "  env_service:\n    timeout: 0.1\n", "rollout": "    max_retries: 0\n"}
    episode = play(tmp_path, "return WorkflowOutput(reward=1.0)", env_type="sleepy.py->Sleepy", **options)
    assert (episode.stop_reason, episode.reward) == (StopReason.ENVIRONMENT_FAILED, None)
    assert "did not start within env_service.timeout = 0.1 s" in episode.error
    deadline = time.monotonic() + 10
    while "close" not in log(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert log(tmp_path)[-1] == "close"  # in the end it is given back all the same


def test_params_reach_it(tmp_path: Path) -> None:
    body = TALK + "assert model_tuner.gym_step({'content': 'x'})[2]\nreturn WorkflowOutput()"
    episode = play(tmp_path, body, settings="  env_service:\n    params: {steps: 1}\n")
    assert (episode.reward, episode.error) == (1.0, "")


# --------------------------------------------------------------------------------------------------- the verdict


def test_the_environments_score_is_the_reward(tmp_path: Path) -> None:
    body = TALK + "model_tuner.gym_step({'content': reply.text})\nreturn WorkflowOutput()"
    episode = play(tmp_path, body)
    assert (episode.stop_reason, episode.reward, episode.is_success) == (StopReason.COMPLETED, 0.25, False)
    assert episode.reward_source == "judge"
    assert episode.output is not None
    assert episode.output.evaluation is not None
    assert episode.output.evaluation.details == {"left": 1}
    assert log(tmp_path) == ["reset t1", "evaluate", "close"]


def test_an_episode_that_a_limit_ended_is_judged_too(tmp_path: Path) -> None:
    body = "while True:\n    reply = await model_tuner.chat(task.init_messages)\n"
    episode = play(tmp_path, body, rollout="    multi_turn:\n      max_steps: 1\n")
    assert (episode.stop_reason, episode.reward) == (StopReason.TRUNCATED, 0.25)


def test_a_task_without_an_environment_has_no_verdict(tmp_path: Path) -> None:
    episode = play(
        tmp_path, "await model_tuner.chat([{'role': 'user', 'content': 'x'}])\nreturn WorkflowOutput()", env_type=""
    )
    assert (episode.stop_reason, episode.reward) == (StopReason.JUDGE_FAILED, None)
    assert "needs an environment" in episode.error


def test_a_step_after_the_end_is_the_workflows_mistake(tmp_path: Path) -> None:
    body = TALK + "for _ in range(3):\n    model_tuner.gym_step({'content': 'x'})\nreturn WorkflowOutput()"
    episode = play(tmp_path, body)
    assert (episode.stop_reason, episode.reward) == (StopReason.WORKFLOW_FAILED, None)
    assert "the environment is over" in episode.error


# ------------------------------------------------------------------------------------------------- in the service

STEP = TALK + "obs = model_tuner.gym_step({'content': reply.text})[0]\nreturn WorkflowOutput(metadata={'obs': obs})"


def test_an_episode_in_the_service(tmp_path: Path, server: StandIn) -> None:
    server.replies |= {
        "/create": [started("Cross.")],
        "/step": [stepped("ice", 0.0)],
        "/evaluate": [ok({"score": 0.5, "success": False, "details": {}})],
    }
    episode = play(tmp_path, STEP, env_type="lake")
    assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.COMPLETED, 0.5, "")
    assert [path for path, _, _ in server.seen] == ["/create", "/step", "/evaluate", "/release"]


@pytest.mark.parametrize(
    "replies",
    [
        {"/create": [refuse(500, "env_error")]},
        {"/create": [started()], "/step": [refuse(410, "instance_lost", "killed")]},
        {"/create": [started(at_most_once=False)], "/step": [drop]},
        {"/create": [started()], "/step": [stepped(reward=float("nan"))]},
        {"/create": [started()], "/step": [stepped()], "/evaluate": [refuse(504, "timeout")]},
        {"/create": [started()], "/step": [stepped()], "/evaluate": [ok(None)]},
    ],
    ids=["create", "lost", "dropped", "nan", "evaluate", "no score"],
)
def test_a_lost_instance_is_run_again_and_never_scored(tmp_path: Path, server: StandIn, replies: Any) -> None:
    server.replies |= {"/evaluate": [ok(1.0)], **replies}
    episode = play(tmp_path, STEP, env_type="lake", rollout="    max_retries: 2\n")
    assert (episode.stop_reason, episode.reward, episode.retries) == (StopReason.ENVIRONMENT_FAILED, None, 2)
    made = [b["instance_id"] for b in server.asked("/create")]
    assert len(made) == 3
    assert [b["instance_id"] for b in server.asked("/release")] == made


def test_the_second_attempt_counts(tmp_path: Path, server: StandIn) -> None:
    server.replies |= {
        "/create": [started()],
        "/step": [refuse(410, "instance_lost", "killed"), stepped("ice")],
        "/evaluate": [ok(1.0)],
    }
    episode = play(tmp_path, STEP, env_type="lake")
    assert (episode.stop_reason, episode.reward, episode.retries) == (StopReason.COMPLETED, 1.0, 1)
    assert len(episode.turns) == 1  # of the second attempt alone


def test_a_failed_release_costs_nothing(tmp_path: Path, server: StandIn) -> None:
    server.replies |= {"/create": [started()], "/step": [stepped()], "/evaluate": [ok(1.0)], "/release": [drop]}
    assert play(tmp_path, STEP, env_type="lake").reward == 1.0


def test_a_step_that_hangs_is_cut_short_when_the_episode_ends(tmp_path: Path, server: StandIn) -> None:
    released = threading.Event()
    cut_short: list[bool] = []

    def hang(handler: Any, body: Any) -> None:
        cut_short.append(released.wait(20))  # False: the step was waited for
        refuse(410, "instance_lost", "released")(handler, body)

    def release(handler: Any, body: Any) -> None:
        released.set()
        ok(None)(handler, body)

    server.replies |= {"/create": [started()], "/step": [hang], "/release": [release]}
    episode = play(tmp_path, STEP, env_type="lake", rollout="    episode_timeout: 0.3\n    max_retries: 0\n")
    assert (episode.stop_reason, episode.reward) == (StopReason.TIMED_OUT, None)
    assert cut_short == [True]


@table(
    ("env_type", "settings", "remote"),
    [
        ("lake", "", True),
        ("mine.py->Count", "", False),
        ("lake", "  task_reader:\n    type: environment\n    environment:\n      env_type: lake\n", False),
        ("no_env", "", False),
        ("", "", False),
    ],
)
def test_where_an_environment_runs(tmp_path: Path, server: StandIn, env_type: str, settings: str, remote: bool) -> None:
    config = fake_config(tmp_path, settings)
    assert World(config, Task(task_id="t", env_type=env_type)).is_remote is remote


def test_without_a_service_it_runs_here_unless_the_reader_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASTUNER_ENV_URL", raising=False)
    assert not World(fake_config(tmp_path), Task(task_id="t", env_type="lake")).is_remote
    with pytest.raises(ConfigError, match="--with NAME"):
        read_tasks(fake_config(tmp_path, SERVED))
    with pytest.raises(ConfigError, match="--with NAME"):  # ends the run: no other episode would fare better
        play(tmp_path, STEP, env_type="lake", settings=SERVED)


# --------------------------------------------------------------------------------------------------- the readers


def test_the_tasks_of_the_service(tmp_path: Path, server: StandIn) -> None:
    server.replies["/get_env_profile"] = [ok(["a", "b"]), ok([7])]
    tasks = read_tasks(fake_config(tmp_path, SERVED + "  env_service:\n    params: {size: 4}\n"))
    assert [(t.task_id, t.env_type, t.main_query) for t in tasks.train] == [("a", "lake", ""), ("b", "lake", "")]
    assert [t.task_id for t in tasks.validation] == ["7"]
    assert [b["params"]["split"] for b in server.asked("/get_env_profile")] == ["train", "dev"]
    assert server.asked("/get_env_profile")[0]["params"]["size"] == 4


def test_the_config_says_where_the_service_is(tmp_path: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTUNER_ENV_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("MY_TOKEN", "secret-of-mine")
    server.replies["/get_env_profile"] = [ok(["a"])]
    read_tasks(fake_config(tmp_path, f"{SERVED}  env_service:\n    url: {server.url}\n    token_env: MY_TOKEN\n"))
    assert server.seen[0][2]["Authorization"] == "Bearer secret-of-mine"


@table(
    ("reply", "says"),
    [
        (ok([]), "the split is empty"),
        (refuse(400, "unknown_split"), "the environment service .* 400 unknown_split"),
    ],
)
def test_a_split_that_is_not_there(tmp_path: Path, server: StandIn, reply: Any, says: str) -> None:
    server.replies["/get_env_profile"] = [reply]
    keys = r"'lake' \(astuner\.task_reader\.env_service\.env_type, \S+:\d+:\d+\), "
    keys += r"split 'train' \(astuner\.task_reader\.env_service\.training_split\)"
    with pytest.raises(DataError, match=f"^the tasks of {keys}: {says}"):
        read_tasks(fake_config(tmp_path, SERVED))


def test_without_a_validation_split_the_one_that_is_there_is_taken(tmp_path: Path, server: StandIn) -> None:
    no_dev = refuse(400, "unknown_split")
    server.replies["/get_env_profile"] = [ok(["a"]), no_dev, ok(["b"])]
    assert [t.task_id for t in read_tasks(fake_config(tmp_path, SERVED)).validation] == ["b"]
    assert [b["params"]["split"] for b in server.asked("/get_env_profile")] == ["train", "dev", "validation"]
    server.replies["/get_env_profile"] = [ok(["a"]), no_dev, no_dev]
    with pytest.raises(DataError, match=r"split 'dev' or 'validation' \(\S+\.validation_split\): .*unknown_split"):
        read_tasks(fake_config(tmp_path, SERVED))


def test_a_split_that_cannot_be_asked_for_is_not_replaced_by_another(tmp_path: Path, server: StandIn) -> None:
    server.replies["/get_env_profile"] = [ok(["a"]), refuse(500, "env_error"), ok(["b"])]
    with pytest.raises(DataError, match=r"split 'dev' or 'validation' .*env_error"):
        read_tasks(fake_config(tmp_path, SERVED))


@table("written", ["holdout", "[dev, holdout]"])
def test_a_validation_split_that_is_written_is_the_one(tmp_path: Path, server: StandIn, written: str) -> None:
    server.replies["/get_env_profile"] = [ok(["a"]), refuse(400, "unknown_split")]
    with pytest.raises(DataError, match=r"'holdout' \(astuner\.\S+\.validation_split, \S+:\d+:\d+\)"):
        read_tasks(fake_config(tmp_path, f"{SERVED}      validation_split: {written}\n"))


def test_the_tasks_of_an_environment_in_this_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE + "        pass\n")
    text = "  task_reader:\n    type: environment\n    environment:\n      env_type: mine.py->Count\n"
    reader = build_task_reader(fake_config(tmp_path, text + "  env_service:\n    params: {tasks: 3}\n"))
    assert [t.task_id for t in reader.read(Split.TRAIN)] == ["train-0", "train-1", "train-2"]
    assert {t.env_type for t in reader.read(Split.VALIDATION)} == {"mine.py->Count"}
    wrong = fake_config(tmp_path, text + "      training_split: tranin\n      validation_split: null\n")
    with pytest.raises(DataError, match="there are train, dev"):
        list(build_task_reader(wrong).read(Split.TRAIN))
    assert list(build_task_reader(wrong).read(Split.VALIDATION)) == []


# ------------------------------------------------------------------------------------- an event loop of its own


def test_a_workflow_that_blocks_in_its_world_holds_nobody_up(tmp_path: Path) -> None:
    """All of them are inside of their blocking call at once, which one event loop could never do."""
    body = (
        TALK + "global together\n"
        "together = globals().get('together') or threading.Barrier(4, timeout=20)\n"
        "together.wait()\n"
        "model_tuner.gym_step({'content': reply.text})\n"
        "return WorkflowOutput()"
    )
    config = config_of(tmp_path, body)
    models = one_model(FakeEngine(lambda prompt: "left", TOKENIZER), ChatCodec(TOKENIZER))
    task = Task(task_id="t", env_type="mine.py->Count")

    async def all_of_them() -> list[Episode]:
        runner = EpisodeRunner(config)
        attempts = [WorkflowTask(task=task, episode_id=f"e{n}", group_id="g") for n in range(4)]
        return await asyncio.gather(*(runner.run(a, models, SamplingParams(max_tokens=50)) for a in attempts))

    assert [e.reward for e in asyncio.run(all_of_them())] == [0.25] * 4


@table(
    ("body", "reason", "says"),
    [
        ("sys.exit(3)", StopReason.WORKFLOW_FAILED, r"the workflow called sys.exit\(3\) \(.*mine.py:\d+ in execute\)"),
        ("raise KeyboardInterrupt", StopReason.WORKFLOW_FAILED, "raised KeyboardInterrupt"),
        ("raise KeyError('x')", StopReason.WORKFLOW_FAILED, r"raised KeyError: 'x' \(.*mine.py:\d+ in execute\)"),
        ("raise asyncio.CancelledError", StopReason.WORKFLOW_FAILED, "cancelled itself"),
        ("await asyncio.sleep(60)", StopReason.TIMED_OUT, "did not return within rollout.episode_timeout = 0.5 s"),
        (
            "try:\n    await asyncio.sleep(60)\nexcept asyncio.CancelledError:\n    return WorkflowOutput(reward=1.0)",
            StopReason.TIMED_OUT,
            "did not return",
        ),
        ("return [1, 2]", StopReason.WORKFLOW_FAILED, "must return a WorkflowOutput"),
    ],
)
def test_how_it_ends_is_told_as_ever(tmp_path: Path, body: str, reason: StopReason, says: str) -> None:
    episode = play(tmp_path, body, rollout="    episode_timeout: 0.5\n")
    assert (episode.stop_reason, episode.reward) == (reason, None)
    assert re.search(says, episode.error), episode.error
    assert log(tmp_path) == ["reset t1", "close"]


def test_what_it_leaves_running_ends_with_it(tmp_path: Path) -> None:
    body = (
        "async def forever():\n"
        "    try:\n"
        "        await asyncio.sleep(60)\n"
        "    finally:\n"
        "        note('ended')\n"
        "left = asyncio.ensure_future(forever())\n"
        "await asyncio.sleep(0)\n"
        "return WorkflowOutput(reward=1.0)"
    )
    assert play(tmp_path, body).reward == 1.0
    assert log(tmp_path) == ["reset t1", "ended", "close"]


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable")


def test_an_own_loop_sees_the_callers_context_and_is_another() -> None:
    async def there() -> tuple[str, asyncio.AbstractEventLoop]:
        return VARIABLE.get(), asyncio.get_running_loop()

    async def here() -> None:
        VARIABLE.set("of the caller")
        value, loop = await in_own_loop(there)
        assert value == "of the caller"
        assert loop is not asyncio.get_running_loop()
        assert loop.is_closed()

    asyncio.run(here())


def test_a_cancellation_reaches_it_and_comes_back() -> None:
    seen: list[str] = []
    begun = threading.Event()

    async def there() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("cancelled there")

    async def here() -> None:
        task = asyncio.ensure_future(in_own_loop(there))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["cancelled there"]

    asyncio.run(here())


def test_one_that_does_not_heed_a_cancellation_is_left_behind_at_the_second() -> None:
    stop, begun = threading.Event(), threading.Event()

    async def there() -> None:
        begun.set()
        stop.wait(20)

    async def here() -> None:
        task = asyncio.ensure_future(in_own_loop(there))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(here())
    stop.set()


def test_it_cannot_end_the_program() -> None:
    async def there() -> None:
        raise SystemExit(1)

    with pytest.raises(Misbehaved, match=r"called sys.exit\(1\)"):
        asyncio.run(in_own_loop(there))
