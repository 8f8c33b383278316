"""At most once: an action that is sent again is not carried out again."""

from __future__ import annotations

import json
import uuid

import pytest

from ._service import Live, eventually, in_background


@pytest.fixture
def id(service):
    instance_id = uuid.uuid4().hex
    service.create(instance_id, goal=100)
    yield instance_id
    service.release(instance_id)


def test_the_same_request_id_gives_the_same_answer(service, id):
    replayed = service.metric("astuner_env_replayed_total", environment="counter")
    first = service.step(id, "a", request_id="1")
    assert first.data["info"]["count"] == 1
    assert service.step(id, "a", request_id="1").raw == first.raw
    typed = service.post(
        f"/v1/instances/{id}/step", action={"role": "assistant", "content": "a"}, request_id="1"
    ).json  # the same request, asked for on the other routes
    assert typed["info"]["count"] == 1
    assert service.step(id, "a", request_id="2").data["info"]["count"] == 2
    assert service.step(id, "a").data["info"]["count"] == 3
    assert service.metric("astuner_env_replayed_total", environment="counter") == replayed + 2


def test_requests_that_overlap_are_carried_out_once(service, id):
    sent = [in_background(lambda: service.step(id, "wait 0.3", request_id="x")) for _ in range(5)]
    answers = {wait().raw for wait in sent}
    assert len(answers) == 1
    assert service.step(id).data["info"]["count"] == 2


def test_the_answer_of_the_last_step_can_be_had_after_the_end(service, id):
    service.create(id, goal=1)
    last = service.step(id, "a", request_id="1")
    assert last.data["is_terminated"] is True
    assert service.step(id, "a", request_id="1").raw == last.raw
    assert service.step(id, "a", request_id="2").code == "over"


def test_an_error_is_repeated_too(service, id):
    answers = [service.step(id, "raise", request_id="1") for _ in range(2)]
    assert [a.code for a in answers] == ["env_error", "env_error"]
    assert service.step(id, "a", request_id="1").code == "bad_request"


def test_an_id_for_two_actions_is_a_mistake(service, id):
    service.step(id, "a", request_id="1")
    answer = service.step(id, "b", request_id="1")
    assert (answer.status, answer.code) == (400, "bad_request")
    assert "another action" in answer.detail["message"]


def test_actions_that_are_equal_in_python_only_are_two(service, id):
    for id_, (one, other) in enumerate([(1, True), (1, 1.0), (0, False)]):
        send = {"instance_id": id, "params": {"request_id": str(id_)}}
        assert service.post("/step", messages={"content": "a", "n": one}, **send).status == 200
        assert service.post("/step", messages={"content": "a", "n": other}, **send).code == "bad_request"


def test_an_id_from_long_ago_is_never_carried_out_again(service, id):
    for n in range(1, 12):
        assert service.step(id, "a", request_id=str(n)).data["info"]["count"] == n
    answers = {n: service.step(id, "a", request_id=str(n)) for n in range(1, 12)}
    assert answers[11].data["info"]["count"] == 11
    assert answers[1].code == "bad_request"
    assert "no longer stored" in answers[1].detail["message"]
    for n, answer in answers.items():
        assert answer.status == 400 or answer.data["info"]["count"] == n
    assert service.step(id).data["info"]["count"] == 12


def test_ids_belong_to_an_instance_and_begin_anew_with_it(service, id):
    service.step(id, "a", request_id="1")
    service.create(id, goal=100)
    assert service.step(id, "b", request_id="1").data["info"]["count"] == 1


def test_a_client_that_goes_away_gets_its_answer_when_it_asks_again(service, id):
    body = {"instance_id": id, "messages": {"content": "wait 0.6"}, "params": {"request_id": "1"}}
    with pytest.raises(TimeoutError):
        service.send("POST", "/step", json.dumps(body).encode(), timeout=0.2)
    answer = service.post("/step", body)
    assert answer.data["info"]["count"] == 1
    assert service.step(id).data["info"]["count"] == 2


def test_a_create_that_is_sent_again_replaces_and_leaks_nothing(service, id):
    taken, pid = service.taken, service.pid(id)
    service.step(id, "a")
    assert service.create(id).data["state"]
    assert service.pid(id) != pid
    assert service.step(id).data["info"]["count"] == 1
    eventually(lambda: service.taken == taken)
    assert service.metric("astuner_env_active", environment="counter") == taken


def test_a_create_that_overlaps_with_its_own_retry_leaves_one_instance(service, id):
    service.release(id)
    taken = service.taken
    first = in_background(lambda: service.create(id, reset="wait 5"))
    eventually(lambda: service.get(f"/v1/instances/{id}").status == 200)
    assert service.create(id).data["state"]
    answer = first()
    assert (answer.status, answer.detail["reason"]) == (400, "replaced")
    eventually(lambda: service.taken == taken + 1)
    assert service.step(id).data["info"]["count"] == 1


def test_what_nobody_waits_for_any_more_is_given_back(counter, tmp_path):
    body = b'{"task_id": "train-0", "instance_id": "a", "params": {"reset": "wait 0.5"}}'
    with Live([counter], parent=tmp_path) as live:
        with pytest.raises(TimeoutError):
            live.send("POST", "/create", body, timeout=0.1)
        eventually(lambda: live.get("/v1/instances/a").status == 404)
        assert live.get("/v1/instances/a").detail["reason"] == "abandoned"
        eventually(lambda: live.taken == 0)
        assert live.metric("astuner_env_created_total", environment="counter") == 0
