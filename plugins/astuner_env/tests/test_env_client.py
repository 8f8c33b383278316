"""The client of the environment service: what it says, when it asks again, and that it never makes anything up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.contracts.environment import Evaluation, StepResult
from astuner.contracts.errors import ConfigError, EnvironmentFailed
from astuner.contracts.types import Task
from astuner_env import older_environment as wire
from astuner_env.env_service import EnvClient, RemoteEnvironment
from tests.table import table

from ._env_standin import StandIn, drop, ok, refuse, say, stand_in, started, stepped, text

TOKEN = "a-token-that-nobody-guesses"
ACTION = {"role": "assistant", "content": "left"}
TASK = Task(task_id="t1")
OVER_HERE = {"state": [{"role": "user", "content": "x"}], "reward": 0.0, "is_terminated": False, "info": {}}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner_env.env_service.client.FIRST_PAUSE", 0.001)


@pytest.fixture
def server() -> Iterator[StandIn]:
    with stand_in() as server:
        yield server


def client(server: StandIn, **options: Any) -> EnvClient:
    return EnvClient(server.url, **{"timeout": 5.0, "busy_timeout": 5.0, "token": TOKEN, **options})


def world(server: StandIn, **params: Any) -> RemoteEnvironment:
    return RemoteEnvironment(params, client=client(server), env_type="lake")


def failure(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(EnvironmentFailed) as e:
        call(*arguments, **options)
    assert TOKEN not in str(e.value)
    return str(e.value)


# ------------------------------------------------------------------------------------------------- what is said


def test_an_episode(server: StandIn) -> None:
    server.replies |= {
        "/create": [started("Cross the lake.")],
        "/step": [stepped("ice", 0.0), stepped("goal", 1.0, True, terminated=True, truncated=False)],
        "/evaluate": [ok({"score": 1.0, "success": True, "details": {"steps": 2}})],
        "/get_info": [ok({"rules": "do not drown"})],
    }
    lake = world(server, size=4)
    assert lake.reset(Task(task_id="t1", main_query="q", metadata={"a": 1})).observation == "Cross the lake."
    assert lake.step(ACTION) == StepResult(observation="ice", messages=({"role": "user", "content": "ice"},))
    last = lake.step({"role": "assistant", "content": "down", "tool_calls": []})
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)
    assert lake.evaluate() == Evaluation(score=1.0, success=True, details={"steps": 2})
    assert lake.describe() == {"rules": "do not drown"}
    lake.close()
    lake.close()
    (created,) = server.asked("/create")
    instance = created["instance_id"]
    assert len(instance) == 32
    assert created["env_type"] == "lake"
    assert created["params"] == {"size": 4, "task": {"main_query": "q", "metadata": {"a": 1}}}
    steps = server.asked("/step")
    assert [s["messages"]["content"] for s in steps] == ["left", "down"]
    assert [s["params"]["request_id"] for s in steps] == ["1", "2"]
    assert [r["instance_id"] for r in server.asked("/release")] == [instance]  # once
    assert {headers["Authorization"] for _, _, headers in server.seen} == {f"Bearer {TOKEN}"}


def test_the_tasks_of_a_split(server: StandIn) -> None:
    server.replies["/get_env_profile"] = [ok(["a", 2])]
    assert client(server).task_ids("lake", "dev", {"size": 4}) == ["a", "2"]
    assert server.asked("/get_env_profile")[0]["params"] == {"size": 4, "split": "dev"}


def test_without_a_token_none_is_sent(server: StandIn) -> None:
    server.replies["/get_env_profile"] = [ok([])]
    client(server, token="").task_ids("lake", "dev", {})
    assert "Authorization" not in server.seen[0][2]


@table("url", ["nowhere", "ftp://x", "http://user:secret@127.0.0.1"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        EnvClient(url)


# --------------------------------------------------------------------------------- the reference service's answers


def test_the_reference_service_needs_neither_a_token_nor_our_additions(server: StandIn) -> None:
    first = [{"role": "system", "content": "rules"}, {"role": "user", "content": "task", "tool_calls": []}]
    said = {"role": "user", "content": "Output:\n```\n1```\n\n", "tool_calls": []}
    server.replies |= {
        "/create": [ok({"state": first, "info": {"instance_id": "i", "task_id": "t"}})],
        "/step": [ok({"state": [said], "reward": 0.5, "is_terminated": True, "info": {}})],
        "/evaluate": [ok(0.5)],
        "/get_info": [ok("a help text")],
        "/release": [say({"success": False, "data": None})],
    }
    lake = RemoteEnvironment({}, client=client(server, token=""), env_type="appworld")
    begun = lake.reset(TASK)
    assert (begun.observation, begun.is_over) == ("task", False)
    assert begun.messages == ({"role": "system", "content": "rules"}, {"role": "user", "content": "task"})
    step = lake.step(ACTION)
    assert (step.observation, step.reward, step.terminated, step.truncated) == (said["content"], 0.5, True, False)
    assert lake.evaluate() == Evaluation(score=0.5)
    assert lake.describe() == {"info": "a help text"}
    lake.close()


def test_a_report_without_a_score_is_asked_whether_it_succeeded(server: StandIn) -> None:
    server.replies["/evaluate"] = [ok({"valid": False, "accuracy": 0.3}), ok(0.0)]
    assert client(server).evaluate("i") == Evaluation(score=0.0, details={"valid": False, "accuracy": 0.3})
    assert [b["params"] for b in server.asked("/evaluate")] == [{"details": True}, {"sparse": True}]


# -------------------------------------------------------------------------------------------- asking once more


def test_a_step_whose_answer_was_lost_is_sent_again_with_the_same_id(server: StandIn) -> None:
    server.replies |= {"/create": [started()], "/step": [drop, text("{not JS"), stepped("done")]}
    lake = world(server)
    lake.reset(TASK)
    assert lake.step(ACTION).observation == "done"
    assert [s["params"]["request_id"] for s in server.asked("/step")] == ["1", "1", "1"]


def test_a_step_is_not_sent_again_to_a_service_that_would_act_twice(server: StandIn) -> None:
    server.replies |= {"/create": [started(at_most_once=False)], "/step": [drop, stepped()]}
    lake = world(server)
    lake.reset(TASK)
    assert "cannot reach" in failure(lake.step, ACTION)
    assert "is lost" in failure(lake.step, ACTION)  # nobody knows what state it is in
    assert "is lost" in failure(lake.evaluate)
    assert len(server.asked("/step")) == 1
    lake.close()
    assert len(server.asked("/release")) == 1


def test_what_came_of_a_lost_creation_is_released_before_the_next(server: StandIn) -> None:
    server.replies["/create"] = [drop, started("second")]
    assert world(server).reset(TASK).observation == "second"
    assert [path for path, _, _ in server.seen] == ["/create", "/release", "/create"]
    assert len({body["instance_id"] for _, body, _ in server.seen}) == 1


def test_a_full_service_is_waited_for(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(EnvClient, "_wait", lambda self, seconds: waits.append(seconds))
    full = refuse(503, "busy", Retry_After="3")
    server.replies["/create"] = [full] * 9 + [started()]
    world(server).reset(TASK)
    assert len(waits) == 9  # more often than TRIES: being full is no failure
    assert all(3.0 <= seconds <= 4.5 for seconds in waits)
    assert len(set(waits)) > 1  # not all clients at once


def test_a_service_that_stays_full_is_given_up(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    server.replies["/create"] = [refuse(503, "busy", Retry_After="1")]
    slow = RemoteEnvironment({}, client=client(server, busy_timeout=0.0), env_type="lake")
    assert "503 busy: this is busy" in failure(slow.reset, TASK)


def test_nobody_listens() -> None:
    with stand_in() as server:
        gone = client(server)
    assert "--with NAME" in failure(gone.task_ids, "lake", "train", {})
    assert not gone.is_up()


def test_tries_are_bounded(server: StandIn) -> None:
    server.replies["/get_env_profile"] = [drop]
    failure(client(server).task_ids, "lake", "train", {})
    assert len(server.seen) == 5


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (refuse(410, "instance_lost", "killed by SIGKILL"), r"410 instance_lost: this is instance_lost \(killed by"),
        (refuse(504, "timeout"), "504 timeout"),
        (refuse(409, "over"), "409 over"),
        (refuse(400, "unknown_instance"), "400 unknown_instance"),
        (refuse(500, "env_error", f"with {TOKEN}"), "500 env_error"),
        (say({"detail": "Instance i not found!"}, 400), "Instance i not found!"),
        (text("Traceback (most recent call last): \x1b[31m", 500), "answered 500"),
        (refuse(401, "unauthorized"), "401 unauthorized"),
        (text("", 401), "token_env"),
        (text("moved", 302, Location="http://127.0.0.1:1/"), "answered 302"),
    ],
)
def test_a_refusal_is_final_and_says_why(server: StandIn, reply: Any, says: str) -> None:
    server.replies |= {"/create": [started()], "/step": [reply, stepped()]}
    lake = world(server)
    lake.reset(TASK)
    with pytest.raises(EnvironmentFailed, match=says) as e:
        lake.step(ACTION)
    assert TOKEN not in str(e.value)
    assert len(server.asked("/step")) == 1


# ------------------------------------------------------------------------------------------ nothing is made up


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {**OVER_HERE, "state": []},
        {**OVER_HERE, "state": None},
        {**OVER_HERE, "state": [{"content": "x"}]},
        {**OVER_HERE, "state": [{"role": "user"}]},
        {**OVER_HERE, "state": [{"role": "user", "content": 5}]},
        {**OVER_HERE, "state": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {**OVER_HERE, "reward": None},
        {**OVER_HERE, "reward": "1"},
        {**OVER_HERE, "reward": float("nan")},
        {**OVER_HERE, "reward": float("inf")},
        {**OVER_HERE, "reward": 10**400},
        {**OVER_HERE, "is_terminated": "false"},
        {**OVER_HERE, "is_terminated": None},
        {**OVER_HERE, "info": ["x"]},
        {name: value for name, value in OVER_HERE.items() if name != "reward"},
        {name: value for name, value in OVER_HERE.items() if name != "is_terminated"},
    ],
    ids=str,
)
def test_a_step_that_makes_no_sense(server: StandIn, data: Any) -> None:
    server.replies["/step"] = [ok(data)]
    failure(client(server).step, "i", ACTION, request_id="1", at_most_once=True)
    assert len(server.seen) == 1  # it would say the same again


@table("data", [None, "1", float("nan"), {"score": None}, {"score": 1, "success": "yes"}, [1.0]])
def test_a_score_that_makes_no_sense(server: StandIn, data: Any) -> None:
    server.replies["/evaluate"] = [ok(data)]
    failure(client(server).evaluate, "i")


@table("data", [None, "train", [None], [{"id": 1}], [True], {"a": 1}])
def test_tasks_that_make_no_sense(server: StandIn, data: Any) -> None:
    server.replies["/get_env_profile"] = [ok(data)]
    failure(client(server).task_ids, "lake", "train", {})


@table("answer", [{"success": False, "data": 1.0}, {"data": 1.0}, [1.0], 1.0, {"success": "yes"}])
def test_an_answer_that_is_no_success(server: StandIn, answer: Any) -> None:
    server.replies["/evaluate"] = [say(answer)]
    failure(client(server).evaluate, "i")


def test_an_endless_answer(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner_env.env_service.client.MAX_REPLY", 1000)
    server.replies["/step"] = [stepped("x" * 2000)]
    assert "longer than 1000 bytes" in failure(client(server).step, "i", ACTION, request_id="1", at_most_once=True)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["state", "reward", "is_terminated", "info", "role", "content", "score"]), inner
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_answer_is_understood_or_refused(data: Any) -> None:
    for read in (wire.data_of, wire.started, wire.stepped, wire.evaluated, wire.task_ids):
        try:
            result = read(data)
        except wire.NotUnderstood:
            continue
        if isinstance(result, StepResult):
            assert result.reward == data.get("reward", 0.0)
            assert result.is_over == data.get("is_terminated", False)
            assert result.messages


# --------------------------------------------------------------------------------------------- giving it back


def test_a_release_that_fails_is_logged(server: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    server.replies |= {"/create": [started()], "/release": [text("down", 500)]}
    lake = world(server)
    lake.reset(TASK)
    lake.close()
    assert "could not release" in caplog.text


def test_an_interrupt_ends_the_wait_for_room(server: StandIn) -> None:
    server.replies["/create"] = [refuse(503, "busy", Retry_After="60")]
    lake = RemoteEnvironment({}, client=client(server, busy_timeout=600.0), env_type="lake")
    said: list[str] = []
    waiting = threading.Thread(target=lambda: said.append(failure(lake.reset, TASK)))
    waiting.start()
    deadline = time.monotonic() + 10
    while not server.asked("/create") and time.monotonic() < deadline:
        time.sleep(0.01)
    lake.interrupt()
    waiting.join(10)
    assert "is not called again" in said[0]


def test_an_interrupt_while_the_instance_is_made_gives_it_back(server: StandIn) -> None:
    go = threading.Event()

    def late(handler: Any, body: Any) -> None:
        go.wait(10)
        started()(handler, body)

    server.replies["/create"] = [late]
    lake = world(server)
    making = threading.Thread(target=lambda: failure(lake.reset, TASK))
    making.start()
    deadline = time.monotonic() + 10
    while not server.asked("/create") and time.monotonic() < deadline:
        time.sleep(0.01)
    lake.interrupt()
    go.set()
    making.join(10)
    assert [b["instance_id"] for b in server.asked("/release")][-1] == server.asked("/create")[0]["instance_id"]
    assert len(server.asked("/release")) == 2  # before there was anything, and after
