"""The typed routes."""

from __future__ import annotations

import uuid

import pytest


@pytest.fixture
def made(service):
    instance_id = uuid.uuid4().hex
    yield instance_id
    service.release(instance_id)


def test_what_is_served(service):
    info = service.get("/v1/info").json
    assert info["environments"] == ["counter", "hasty"]
    assert info["max_instances"] == 8
    assert info["capacity"] == "set by --max-instances"
    shown = service.get("/v1/environments").json["environments"]
    assert [e["name"] for e in shown] == ["counter", "hasty"]
    one = service.get("/v1/environments/counter").json
    assert one == shown[0]
    assert (one["splits"], one["summary"], one["step_timeout"]) == (["train", "dev"], "counts", 60.0)
    assert service.get("/v1/environments/moon").code == "unknown_env"


def test_tasks_come_in_pages(service):
    page = service.get("/v1/environments/counter/tasks?split=dev&offset=1&limit=1").json
    assert page["tasks"] == [{"task_id": "dev-1", "main_query": "count to 1", "metadata": {"n": 1}}]
    assert (page["total"], page["offset"], page["limit"], page["split"]) == (3, 1, 1, "dev")
    assert len(service.get("/v1/environments/counter/tasks").json["tasks"]) == 3
    assert service.get("/v1/environments/counter/tasks?split=moon").code == "unknown_split"
    for wrong in ("limit=-1", "limit=1001", "offset=a", "limit=1e3", "offset=99999999999", "limit=%C2%B2"):
        assert service.get(f"/v1/environments/counter/tasks?{wrong}").code == "bad_request"


def test_an_episode(service, made):
    task = {"main_query": "count", "metadata": {"n": 2}}
    answer = service.post(
        "/v1/instances", environment="counter", task_id="train-1", instance_id=made, params={"goal": 2}, task=task
    )
    assert answer.status == 201
    first = answer.json
    assert (first["instance_id"], first["environment"], first["task_id"]) == (made, "counter", "train-1")
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    assert (first["observation"], first["reward"], first["terminated"], first["truncated"]) == (
        "count",
        0,
        False,
        False,
    )
    assert first["info"]["params"] == {"goal": 2}
    route = f"/v1/instances/{made}"
    result = service.post(f"{route}/step", action={"content": "go"}, request_id="1").json
    assert set(result) == {"observation", "messages", "reward", "terminated", "truncated", "info"}
    assert (result["observation"], result["reward"], result["terminated"]) == ("1", 0.0, False)
    shown = service.get(route).json
    assert {k: shown[k] for k in ("steps", "is_over", "is_busy", "task_id")} == {
        "steps": 1,
        "is_over": False,
        "is_busy": False,
        "task_id": "train-1",
    }
    assert service.post(f"{route}/step", action={}).json["terminated"] is True
    assert service.post(f"{route}/step", action={}).code == "over"
    scored = service.send("POST", f"{route}/evaluate").json
    assert scored == {"score": 0.2, "success": False, "details": {"count": 2}}
    assert service.get(f"{route}/info").json == {"goal": 5}
    assert service.delete(route).json == {"released": True}


def test_who_is_not_there_is_not_found_and_who_was_released_was(service, made):
    route = f"/v1/instances/{made}"
    for answer in (service.get(route), service.post(f"{route}/step"), service.delete(route)):
        assert (answer.status, answer.code) == (404, "unknown_instance")
    service.create(made)
    service.delete(route)
    answer = service.get(route)
    assert (answer.status, answer.detail["reason"]) == (404, "released")


def test_a_bad_name_in_the_path_is_refused(service):
    for bad in ("a%20b", "%2e%2e%2fx", "%00", "x" * 200, "%F0%9F%98%80"):
        answer = service.get(f"/v1/instances/{bad}")
        assert answer.status in (400, 404)
        assert answer.code in ("bad_request", "not_found")
