"""Clocks that stand still while something queues for a limit of ours, and run while it is under way."""

import asyncio
import threading

import pytest

from astuner.rollout import threads
from astuner.rollout.threads import CLOCK, Clock, OutOfTime, TimeLimits
from astuner.testing import ScriptedModel
from astuner_helpers import HelperModels, ledger
from astuner_helpers.settings import HelperModel
from astuner_helpers.workers import Waiters


class Hands:
    """A time that moves when it is told to."""

    def __init__(self):
        self.at = 0.0

    def perf_counter(self):
        return self.at


@pytest.fixture
def hands(monkeypatch):
    found = Hands()
    monkeypatch.setattr(threads, "time", found)
    return found


def test_a_clock_stands_still_while_all_that_was_asked_queues(hands):
    outer = Clock()
    clock = Clock(outer)
    hands.at = 1
    assert (clock.stands, clock.stood()) == (False, 0)
    clock.change(queued=1)
    hands.at = 3
    assert (clock.stands, clock.stood()) == (True, 2)
    clock.change(under_way=1)  # something else is being answered
    hands.at = 10
    assert (clock.stands, clock.stood()) == (False, 2)
    clock.change(under_way=-1)
    hands.at = 11
    clock.change(queued=-1, under_way=1)
    hands.at = 20
    assert clock.stood() == outer.stood() == 3
    clock.change(queued=1, under_way=-1)
    hands.at = 24
    assert (clock.stood(), clock.ran()) == (7, 17), "and still stands"


def test_a_second_for_which_it_queues_and_another_one_holds_the_loop_is_one_second(hands):
    hands.at = 1
    clock = Clock()
    hands.at = 3
    clock.other_held(0, 3)
    assert clock.stood() == 2, "not what was before it"
    clock.change(queued=1)
    hands.at = 6
    clock.other_held(2, 5)
    assert clock.stood() == 5
    clock.change(queued=-1)
    clock.other_held(5, 6)
    hands.at = 8
    clock.other_held(7, 8)
    assert (clock.stood(), clock.ran()) == (6, 1)


def test_everybody_who_waits_is_told_from_when_they_came_until_they_went(hands):
    waiters, clocks = Waiters(), (Clock(), Clock())
    blocks = []

    def enter(clock):
        token = CLOCK.set(clock)
        blocks.append(waiters.joined())
        blocks[-1].__enter__()
        CLOCK.reset(token)

    enter(clocks[0])
    hands.at = 5
    enter(clocks[1])
    hands.at = 7
    waiters.begins()
    hands.at = 8
    with waiters.queueing():
        hands.at = 9
    assert [clock.stood() for clock in clocks] == [8, 3]
    for block in blocks:
        block.__exit__(None, None, None)
    with waiters.queueing():
        hands.at = 20
    assert [clock.stood() for clock in clocks] == [8, 3], "they have gone"
    with waiters.joined():
        assert CLOCK.get() is None, "without a limit nobody is told"


@pytest.fixture
def slow_server():
    """Answers the first question when it is allowed to, the others at once."""
    asked, go = threading.Event(), threading.Event()

    def reply(body):
        if body["messages"][0]["content"] == "first":
            asked.set()
            assert go.wait(60)
        return "fine"

    with ScriptedModel(reply) as server:
        server.asked, server.go = asked, go
        yield server
        go.set()


def helper(server, tmp_path, **limits):
    section = HelperModel(base_url=server.base_url, model="small", **limits)
    return HelperModels({"judge": section}, scope=tmp_path).get("judge", where="x")


def ask(model, text):
    return model.ask([{"role": "user", "content": text}], purpose="test")


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))


def test_waiting_behind_others_for_our_own_limit_is_not_counted(hands, slow_server, tmp_path):
    model = helper(slow_server, tmp_path, concurrency=1)
    limits, clocks = TimeLimits(), made()

    async def both():
        first = asyncio.ensure_future(limits.run(ask(model, "first"), 1e9))
        while not slow_server.asked.is_set():
            await asyncio.sleep(0.01)
        second = asyncio.ensure_future(limits.run(ask(model, "second"), 60.0))
        while len(clocks) < 2 or not clocks[-1].stands:
            await asyncio.sleep(0.01)
        hands.at += 1000
        slow_server.go.set()
        return await asyncio.gather(first, second)

    assert [answer.text for answer in asyncio.run(both())] == ["fine", "fine"]


def test_what_the_server_takes_is_counted(hands, slow_server, tmp_path):
    model = helper(slow_server, tmp_path, concurrency=1)

    async def one():
        asked = asyncio.ensure_future(TimeLimits().run(ask(model, "first"), 60.0))
        while not slow_server.asked.is_set():
            await asyncio.sleep(0.01)
        hands.at += 1000
        slow_server.go.set()
        await asked

    with pytest.raises(OutOfTime):
        asyncio.run(one())


@pytest.mark.parametrize(
    ("before", "while_it_blocks", "kept"),
    [(0, 1000, True), (0, 1000, False), (30, 1000, False), (0, 10, False)],
    ids=["in time", "too slow after it", "too slow around it", "answered while the loop is blocked"],
)
def test_while_others_block_the_loop_a_queueing_question_takes_no_second_twice(hands, before, while_it_blocks, kept):
    limits, waiters, queues, go = TimeLimits(), Waiters(), asyncio.Event(), asyncio.Event()

    async def judge():
        with waiters.joined():
            queues.set()
            await go.wait()
        return "done"

    async def blocker():
        hands.at += while_it_blocks
        waiters.begins()  # from a thread, at a moment of its own
        hands.at += 1000 - while_it_blocks

    async def both():
        judging = asyncio.ensure_future(limits.run(judge(), 60.0))
        await queues.wait()
        hands.at += before  # nobody's fault, and it queues
        await limits.run(blocker(), 1e9)
        hands.at += 50 if kept else 70  # its own time
        go.set()
        return await judging

    if kept:
        assert asyncio.run(both()) == "done"
    else:
        with pytest.raises(OutOfTime):
            asyncio.run(both())


def test_waiting_for_requests_a_minute_is_not_counted_in_a_thread_of_the_judge_either(hands, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "WINDOW", 1e9)
    slept = []

    def no_more_limit(seconds, waiters):
        if seconds > 1:
            assert clocks[-1].stands
            hands.at += seconds
            slept.append(seconds)
            monkeypatch.setattr(ledger, "WINDOW", 0.0)

    monkeypatch.setattr("astuner_helpers.helper._sleep", no_more_limit)
    limits = TimeLimits()
    clocks = made()
    with ScriptedModel(lambda body: "fine") as server:
        model = helper(server, tmp_path, rpm=1)
        asyncio.run(ask(model, "first"))

        def in_a_thread():
            return asyncio.run(ask(model, "second"))

        work = threads.in_daemon_thread(in_a_thread)
        assert asyncio.run(limits.run(work, 60.0)).text == "fine"
    assert slept[0] > 60


def made():
    """The clocks that time limits make from here on."""
    found = []

    class Noted(Clock):
        def __init__(self, *args):
            super().__init__(*args)
            found.append(self)

    threads.Clock = Noted
    return found


@pytest.fixture(autouse=True)
def _clock_again(monkeypatch):
    monkeypatch.setattr(threads, "Clock", Clock)
