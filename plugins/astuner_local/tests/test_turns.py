"""Engines that share a CPU take turns, and nobody is left out."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from astuner.contracts.types import SamplingParams
from astuner_local.engine import LocalEngine
from astuner_local.engine.engine import Turns

from ._tiny_models import tiny_model


def test_turns_are_given_in_the_order_in_which_they_were_asked_for() -> None:
    turns, order = Turns(), list[int]()

    def take(number: int) -> None:
        with turns.one():
            order.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(20)]
    with turns.one():
        for number, thread in enumerate(threads):
            thread.start()
            while turns._asked < number + 2:  # it stands in line
                time.sleep(0.001)
        assert order == []
    for thread in threads:
        thread.join(30)
    assert order == list(range(20))


def test_a_turn_ends_also_when_it_fails() -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError), turns.one():
        _ = 1 / 0
    with turns.one():
        assert turns._asked == turns._ended + 1
    assert turns._asked == turns._ended


def test_two_engines_never_compute_at_the_same_time_and_both_get_on() -> None:
    turns = Turns()
    engines = [LocalEngine(tiny_model(seed=i), tokenizer_eos_ids=(), turns=turns) for i in range(2)]
    inside, together, order = set[int](), 0, list[int]()
    for number, engine in enumerate(engines):

        def step(*, admit: bool = True, number: int = number, original=engine._scheduler.step):  # type: ignore[no-untyped-def]
            nonlocal together
            inside.add(number)
            together = max(together, len(inside))
            order.append(number)
            try:
                return original(admit=admit)
            finally:
                inside.discard(number)

        engine._scheduler.step = step  # type: ignore[method-assign]

    async def both() -> None:
        asked = [e.generate([1, 2, 3], SamplingParams(max_tokens=100)) for e in engines for _ in range(4)]
        answers = await asyncio.gather(*asked)
        assert all(len(a.response_ids) == 100 for a in answers)

    try:
        asyncio.run(both())
    finally:
        for engine in engines:
            engine.close()
    assert together == 1
    assert {order.count(0), order.count(1)} <= set(range(100, 110))


def test_an_engine_that_fails_lets_the_others_go_on() -> None:
    turns = Turns()
    broken, well = (LocalEngine(tiny_model(), tokenizer_eos_ids=(), turns=turns) for _ in range(2))

    def fail(*, admit: bool = True) -> list[object]:
        raise RuntimeError("out of memory")

    broken._scheduler.step = fail  # type: ignore[method-assign,assignment]

    async def both() -> None:
        failed, fine = await asyncio.gather(
            broken.generate([1], SamplingParams(max_tokens=5)),
            well.generate([1], SamplingParams(max_tokens=5)),
            return_exceptions=True,
        )
        assert "out of memory" in str(failed)
        assert len(fine.response_ids) == 5  # type: ignore[union-attr]

    try:
        asyncio.run(both())
    finally:
        broken.close()
        well.close()
