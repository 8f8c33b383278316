"""The older routes, as their existing clients speak them: shapes, defaults and failures."""

from __future__ import annotations

import uuid

import pytest

from tests.table import table

from ._service import Live, Program, served


@pytest.fixture
def made(service: Live):
    """Ids of instances that are released afterwards."""
    ids = [uuid.uuid4().hex for _ in range(3)]
    yield ids
    for instance_id in ids:
        service.release(instance_id)


def body(**fields):
    """What the older clients send: every key, every time."""
    return {"env_type": "default", "task_id": None, "instance_id": None, "messages": {}, "params": {}, **fields}


def test_health_is_a_word(service):
    answer = service.get("/healthz")
    assert (answer.status, answer.raw) == (200, b"OK")


def test_an_episode_as_an_older_client_plays_it(service, made):
    ids = service.post("/get_env_profile", body(env_type="counter", params={"split": "dev"})).data
    assert ids == ["dev-0", "dev-1", "dev-2"]
    started = service.post("/create", body(env_type="counter", task_id=ids[0], instance_id=made[0])).data
    assert [m["role"] for m in started["state"]] == ["system", "user"]
    assert started["info"]["instance_id"] == made[0]
    assert started["info"]["task_id"] == "dev-0"
    assert (started["reward"], started["is_terminated"]) == (0.0, False)
    for n in range(1, 6):
        action = {"role": "assistant", "content": "on"}
        result = service.post("/step", body(instance_id=made[0], messages=action)).data
        assert result["state"][0] == {"role": "user", "content": str(n), "tool_calls": []}
        assert len(result["state"]) == 1
        assert result["reward"] == float(n == 5)
        assert result["is_terminated"] is (n == 5)
        assert result["info"]["count"] == n
    assert service.post("/evaluate", body(instance_id=made[0], params={"sparse": False})).data == 0.5
    assert service.post("/evaluate", body(instance_id=made[0], params={"sparse": True})).data == 1.0
    details = service.post("/evaluate", body(instance_id=made[0], params={"details": True})).data
    assert details == {"score": 0.5, "success": True, "details": {"count": 5}}
    assert service.post("/get_info", body(instance_id=made[0])).data == {"goal": 5}
    assert service.post("/release", body(instance_id=made[0])).json == {"success": True, "data": None}


def test_the_split_is_train_unless_said_and_other_params_arrive(service):
    assert service.post("/get_env_profile", env_type="counter").data == ["train-0", "train-1", "train-2"]
    assert service.post("/get_env_profile", env_type="counter", params={"size": 1}).data == ["train-0"]


def test_what_an_environment_does_not_know_is_named(service):
    answer = service.post("/get_env_profile", env_type="counter", params={"split": "moon"})
    assert (answer.status, answer.code) == (400, "unknown_split")
    assert "there are train and dev" in answer.detail["message"]
    answer = service.post("/create", env_type="counter", task_id="moon-1")
    assert (answer.status, answer.code) == (400, "unknown_task")
    assert "no task 'moon-1'" in answer.detail["message"]
    answer = service.post("/create", env_type="moon", task_id="train-1")
    assert (answer.status, answer.code) == (400, "unknown_env")
    assert "counter, hasty" in answer.detail["message"]


def test_params_that_it_does_not_take_are_no_unknown_task_nor_split(toys, tmp_path):
    with Live([served("strict", f"{toys}:Strict")], parent=tmp_path) as live:
        for answer in (
            live.post("/create", task_id="train-0", params={"colour": 1}),
            live.post("/get_env_profile", params={"colour": 1}),
        ):
            assert (answer.status, answer.code) == (400, "bad_params")
            assert "there is goal" in answer.detail["message"]
        assert live.post("/create", task_id="moon", params={"goal": 1}).code == "unknown_task"
        assert live.post("/get_env_profile", params={"split": "moon", "goal": 1}).code == "unknown_split"


def test_an_id_is_made_where_none_is_given(service):
    for given in ({}, {"instance_id": None}, {"instance_id": ""}):
        instance_id = service.post("/create", env_type="counter", task_id="train-0", **given).data["info"][
            "instance_id"
        ]
        assert len(instance_id) == 32
        assert service.release(instance_id).data is None


def test_keys_nobody_knows_are_ignored_and_a_number_may_be_a_task(service, made, toys):
    answer = service.post("/create", env_type="counter", task_id=7, instance_id=made[0], colour="blue")
    assert answer.code == "unknown_task"
    assert "'7'" in answer.detail["message"]
    assert service.post("/create", env_type="counter", task_id="train-7", instance_id=made[0], colour="blue").data


def test_the_action_arrives_as_it_was_sent(service, made):
    service.create(made[0])
    call = {"id": "c1", "type": "function", "function": {"name": "go", "arguments": "{}"}}
    action = {"role": "assistant", "content": None, "tool_calls": [call], "extra": 1.5}
    assert service.post("/step", instance_id=made[0], messages=action).data["info"]["action"] == action
    empty = {"role": "assistant", "content": ""}
    assert service.post("/step", instance_id=made[0]).data["info"]["action"] == empty
    half = {"role": "assistant", "content": "half a pair: \ud83d"}
    assert service.post("/step", instance_id=made[0], messages=half).data["info"]["action"] == half


def test_a_tasks_text_and_params_come_along(service, made):
    task = {"main_query": "count to nine", "metadata": {"n": 9}}
    data = service.create(made[0], task=task, goal=9).data
    assert data["state"][1]["content"] == "count to nine"
    assert data["info"]["metadata"] == {"n": 9}
    assert data["info"]["params"] == {"goal": 9}


def test_truncated_is_terminated_for_older_clients(service, made):
    service.create(made[0])
    data = service.step(made[0], "truncate").data
    assert data["is_terminated"] is True
    assert (data["info"]["terminated"], data["info"]["truncated"]) == (False, True)


def test_steps_after_the_end_change_nothing(service, made):
    service.create(made[0], goal=1)
    assert service.step(made[0]).data["is_terminated"] is True
    for _ in range(2):
        answer = service.step(made[0])
        assert (answer.status, answer.code) == (409, "over")
    assert service.evaluate(made[0]).data == 0.1


def test_failures_have_a_code_and_a_sentence(service):
    for path in ("/step", "/evaluate", "/get_info"):
        answer = service.post(path, body(instance_id="nobody"))
        assert (answer.status, answer.code) == (400, "unknown_instance")
        assert answer.detail["message"].startswith("Instance nobody not found!")
        answer = service.post(path, body())
        assert (answer.status, answer.code) == (400, "bad_request")
        assert "instance_id" in answer.detail["message"]
    assert service.post("/release", body(instance_id="nobody")).json == {"success": False, "data": None}
    assert service.post("/release", body()).status == 400
    assert service.post("/create", body(env_type="counter")).status == 400


@table(
    "wrong",
    [
        {"messages": [["role", "user"]]},
        {"messages": "go"},
        {"params": []},
        {"params": {"request_id": 1}},
        {"instance_id": 5},
        {"instance_id": ["a"]},
    ],
)
def test_a_field_of_the_wrong_type_is_named(service, wrong):
    answer = service.post("/step", {"instance_id": "a", **wrong})
    assert (answer.status, answer.code) == (400, "bad_request")
    assert any(key in answer.detail["message"] for key in ("messages", "params", "request_id", "instance_id"))


@table("raw", [b"", b"{", b"[]", b"nan", b'{"a": NaN}', b"\xff", b"1e999", b"[" * 5000])
def test_what_is_no_json_object_is_422(service, raw):
    answer = service.send("POST", "/create", raw)
    assert (answer.status, answer.code) == (422, "not_json")


@table("bad", ["../x", "/etc/passwd", ".", "..", "a/b", "a b", "é", "x" * 129, "a\x00b", "a\n"])
def test_an_id_is_a_name_and_never_a_path(service, bad):
    for path in ("/create", "/step", "/release"):
        answer = service.post(path, env_type="counter", task_id="train-0", instance_id=bad)
        assert (answer.status, answer.code) == (400, "bad_request")


def test_no_route_and_no_method_are_answered_in_json(service):
    answer = service.get("/nothing")
    assert (answer.status, answer.code) == (404, "not_found")
    answer = service.get("/create")
    assert (answer.status, answer.code) == (405, "method_not_allowed")


def test_with_one_environment_its_name_may_be_left_out(counter, tmp_path):
    with Live([counter], parent=tmp_path) as live:
        for given in ({}, {"env_type": None}, {"env_type": ""}, {"env_type": "default"}):
            assert live.post("/get_env_profile", given).data == ["train-0", "train-1", "train-2"]
        assert live.post("/create", env_type="default", task_id="train-0").data["state"]


OLDER = """
from env_service.base import BaseEnv
from env_service.registry import Registry

@Registry.register("maze")
class MazeEnv(BaseEnv):
    def __init__(self, task_id=None, instance_id=None, params=None):
        self.task_id, self.at = task_id, 0
    def get_init_state(self, params=None):
        state = [{"role": "user", "content": f"maze {self.task_id}"}]
        return {"state": state, "info": {"simple": params.get("simple")}}
    def step(self, action, params=None):
        self.at += len(action["content"])
        return {"state": [{"role": "user", "content": str(self.at)}], "reward": self.at / 10,
                "is_terminated": self.at > 9, "info": {}}
    def evaluate(self, messages=None, params=None):
        return self.at / 10
    def get_info(self, messages=None, params=None):
        return {"help": "walk"}
    def close(self):
        pass
    @staticmethod
    def get_query_list(split="train"):
        return [1, 2]
"""


def test_a_class_for_the_older_service_is_served_as_it_is(tmp_path):
    (tmp_path / "maze.py").write_text(OLDER)
    it = served("maze", f"{tmp_path / 'maze.py'}:MazeEnv")
    with Live([it], parent=tmp_path) as live:
        assert live.post("/get_env_profile", env_type="maze").data == ["1", "2"]
        data = live.create("a", env_type="maze", task_id="1", simple=True).data
        assert data["state"] == [{"role": "user", "content": "maze 1"}]
        assert data["info"]["simple"] is True
        data = live.step("a", "four").data
        assert (data["state"][0]["content"], data["reward"], data["is_terminated"]) == ("4", 0.4, False)
        assert live.evaluate("a").data == 0.4
        assert live.post("/get_info", instance_id="a").data == {"help": "walk"}
        assert live.step("a", "sixsix").data["is_terminated"] is True


@pytest.mark.slow
def test_the_program_says_where_it_listens_once_it_does(toys, tmp_path):
    with Program(f"{toys}->Counter", "--port", "0", folder=tmp_path) as program:
        assert program.line == f"Starting server on 127.0.0.1:{program.port}\n"
        assert program.get("/healthz").raw == b"OK"
        assert program.create("a").data["state"]
