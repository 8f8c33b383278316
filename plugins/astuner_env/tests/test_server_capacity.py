"""How many instances fit, and what happens to who comes too many."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner_env.manager.capacity import available_mb, capacity
from astuner_env.manager.manager import LONGEST_QUEUE, Slots
from astuner_env.manager.refusal import Refusal

from ._service import Live, eventually, in_background, is_alive


def test_a_full_service_says_so_and_when_to_come_again(counter, tmp_path):
    with Live([counter], max_instances=2, patience=0.1, parent=tmp_path) as live:
        live.create("a")
        live.create("b")
        answer = live.create("c")
        assert (answer.status, answer.code) == (503, "busy")
        assert int(answer.headers["Retry-After"]) > 0
        assert "--max-instances" in answer.detail["message"]
        assert live.get("/v1/instances/c").status == 404
        assert live.metric("astuner_env_refused_total", code="busy") == 1
        assert live.create("b").data["state"], "a create that replaces needs no further slot"
        live.release("a")
        assert live.create("c").data["state"]
        assert live.taken == 2


def test_who_waits_gets_the_next_slot_in_turn(counter, tmp_path):
    with Live([counter], max_instances=1, patience=30, parent=tmp_path) as live:
        live.create("a")
        waiting = []
        for n, name in enumerate("bc", 1):
            waiting.append(in_background(lambda name=name: live.create(name)))
            eventually(lambda n=n: live.metric("astuner_env_queue_depth") == n)
        live.release("a")
        assert waiting[0]().data["info"]["instance_id"] == "b"
        assert live.get("/v1/instances/c").json["is_busy"]
        live.release("b")
        assert waiting[1]().data["state"]


def test_one_that_is_released_while_it_waits_waits_no_more(counter, tmp_path):
    with Live([counter], max_instances=1, patience=30, parent=tmp_path) as live:
        live.create("a")
        waiting = in_background(lambda: live.create("b"))
        eventually(lambda: live.metric("astuner_env_queue_depth") == 1)
        assert live.release("b").data is None
        assert waiting().code == "unknown_instance"
        assert live.metric("astuner_env_queue_depth") == 0
        assert live.taken == 1


def test_a_client_that_is_gone_gets_no_slot(counter, tmp_path):
    with Live([counter], max_instances=1, patience=30, parent=tmp_path) as live:
        live.create("a")
        with pytest.raises(TimeoutError):
            live.send("POST", "/create", b'{"task_id": "train-0", "instance_id": "b"}', timeout=0.1)
        live.release("a")
        eventually(lambda: live.taken == 0)
        assert live.metric("astuner_env_operation_seconds_count", operation="reset") == 1


def test_a_slot_is_free_when_its_process_is_dead_and_not_before(counter, tmp_path):
    with Live([counter], max_instances=1, patience=30, parent=tmp_path) as live:
        live.create("a", close="wait 0.3")
        pid = live.pid("a")
        release = in_background(lambda: live.release("a"))
        eventually(lambda: live.get("/v1/instances/a").status == 404)
        assert live.create("b").data["state"]
        assert not is_alive(pid)
        release()


def test_the_default_is_what_cores_and_memory_allow():
    assert capacity([100], cores=2, free_mb=1024 + 1000)[0] == 10
    assert capacity([100, 500], cores=2, free_mb=1024 + 1000)[0] == 2
    assert capacity([1], cores=2, free_mb=100_000)[0] == 32
    assert capacity([256], cores=2, free_mb=100)[0] == 1
    instances, why = capacity([300])
    assert instances >= 1
    assert "300 MB each" in why


def test_the_memory_of_a_container_counts(tmp_path: Path, monkeypatch):
    group = tmp_path / "group"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 << 30))
    assert available_mb(group) == 8192
    group.mkdir()
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1\n")
    assert available_mb(group) == 8192
    (group / "memory.max").write_text(str(3 << 30))
    (group / "memory.current").write_text(str(1 << 30))
    assert available_mb(group) == 2048
    (group / "memory.max").unlink()
    (group / "memory").mkdir()
    (group / "memory/memory.limit_in_bytes").write_text(str(2 << 30))
    (group / "memory/memory.usage_in_bytes").write_text("0")
    assert available_mb(group) == 2048


@given(st.lists(st.sampled_from(["take", "first", "give", "cancel"]), max_size=40), st.integers(1, 3))
def test_never_more_slots_than_there_are_and_none_is_lost(deeds, size):
    async def play():
        slots, holders, waiters = Slots(size), 0, []
        for deed in deeds:
            if deed in ("take", "first"):
                waiters.append(asyncio.ensure_future(slots.take(60, first=deed == "first")))
            elif deed == "give" and holders:
                slots.give_back()
                holders -= 1
            elif deed == "cancel" and waiters:
                waiters.pop().cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            holders += sum(w.done() and not w.cancelled() for w in waiters)
            waiters = [w for w in waiters if not w.done()]
            assert slots.taken == holders <= size
            assert not waiters or holders == size
        for _ in range(holders):
            slots.give_back()
        while waiters:
            done, left = await asyncio.wait(waiters, timeout=10, return_when=asyncio.FIRST_COMPLETED)
            assert done, "a slot is free, and nobody gets it"
            for waiter in done:
                waiter.result()
                slots.give_back()
            waiters = list(left)
        assert (slots.taken, slots.waiting) == (0, 0)

    asyncio.run(play())


def test_a_slot_given_to_one_who_is_just_leaving_goes_to_the_next():
    async def play():
        slots = Slots(1)
        await slots.take(1)
        leaving, next_one = asyncio.ensure_future(slots.take(60)), asyncio.ensure_future(slots.take(60))
        await asyncio.sleep(0)
        slots.give_back()
        leaving.cancel()
        await asyncio.wait_for(next_one, 5)
        assert slots.taken == 1

    asyncio.run(play())


def test_the_queue_has_an_end():
    async def play():
        slots = Slots(1)
        await slots.take(1)
        waiters = [asyncio.ensure_future(slots.take(60)) for _ in range(LONGEST_QUEUE)]
        await asyncio.sleep(0)
        with pytest.raises(Refusal, match="waiting"):  # it does not queue: then it would say for how long
            await slots.take(60)
        for waiter in waiters:
            waiter.cancel()
        await asyncio.wait(waiters)
        assert slots.waiting == 0

    asyncio.run(play())
