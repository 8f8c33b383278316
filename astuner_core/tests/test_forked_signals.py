"""Handlers of a run are not those of processes that are forked in it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from astuner.contracts.interrupt import Interrupt, handled
from tests.table import table

EXITED = 7


def _child(work: Callable[[], Any]) -> int:
    """Fork, run ``work`` and return the child's status: its exit code, or minus the signal that ended it."""
    if (pid := os.fork()) == 0:
        try:
            work()
        except BaseException as e:
            os._exit(EXITED if isinstance(e, KeyboardInterrupt) else 1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _signalled(number: int) -> int:
    def work() -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.5)

    return _child(work)


ENDS = {signal.SIGINT: EXITED, signal.SIGTERM: -signal.SIGTERM, signal.SIGHUP: -signal.SIGHUP}


@table("number", [signal.SIGINT, signal.SIGTERM])
def test_a_fork_ends_as_without_a_run(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    interrupt = Interrupt()
    with interrupt.listening():
        assert _signalled(number) == ENDS[signal.Signals(number)]
    assert "stopping" not in capfd.readouterr().err
    assert not interrupt.requested


@table("number", ENDS)
def test_blocks_within_blocks_are_all_undone(number: int) -> None:
    came: list[int] = []
    outer, inner = handled(ENDS, lambda *_: came.append(1)), handled([number], lambda *_: came.append(2))
    with outer, Interrupt().listening(), inner:
        assert _signalled(number) == ENDS[signal.Signals(number)]
    assert came == []
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def test_a_fork_in_a_thread_ends_too() -> None:
    with Interrupt().listening():
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(_signalled(signal.SIGTERM)))
        thread.start()
        thread.join()
    assert found == [-signal.SIGTERM]


def test_a_handler_of_the_user_stays() -> None:
    def work() -> None:
        assert signal.getsignal(signal.SIGTERM) is own

    def own(number: int, frame: object) -> None:
        pass

    with Interrupt().listening():
        before = signal.signal(signal.SIGTERM, own)
        assert _child(work) == 0
        signal.signal(signal.SIGTERM, before)


def test_what_was_ignored_before_is_ignored_in_the_fork() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Interrupt().listening():
            assert _signalled(signal.SIGTERM) == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_fork_of_a_fork_may_have_a_run_of_its_own() -> None:
    def work() -> None:
        with Interrupt().listening():
            assert _signalled(signal.SIGTERM) == -signal.SIGTERM
            interrupt = Interrupt()
            with interrupt.listening():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
            assert interrupt.requested

    with Interrupt().listening():
        assert _child(work) == 0


def _handlers(_: int = 0) -> list[str]:
    return [repr(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]


def _in_pool(method: str) -> list[str]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        return pool.submit(_handlers).result()


def _in_workers(method: str) -> list[str]:
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(_handlers, [0])[0]


@table("started", [_in_pool, _in_workers], ids=lambda f: f.__name__)
def test_workers_of_a_pool_have_no_handler_of_a_run(started: Callable[[str], list[str]]) -> None:
    expected = _handlers()
    with Interrupt().listening(), handled([signal.SIGALRM], lambda *_: None):
        assert started("fork") == expected


def test_the_run_still_stops() -> None:
    interrupt = Interrupt()
    with interrupt.listening():
        assert _child(lambda: None) == 0
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
    assert interrupt.requested
