"""Admission, reuse, bounds and cancelling, driven step by step without threads."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner.contracts.types import FinishReason, SamplingParams
from astuner_local.engine.batch import DecodeBatch
from astuner_local.engine.forward import Forward
from astuner_local.engine.kv_cache import KVCache
from astuner_local.engine.scheduler import Request, Scheduler, common_prefix
from astuner_local.engine.weights import FusedWeights
from tests.table import table

from ._tiny_models import VOCAB, reference_logprobs, tiny_model

STOP = 3


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3")


def make(model: Any, *, slots: int = 4, budget: int = 10_000, prefill_tokens: int = 512) -> Scheduler:
    weights = FusedWeights(model)
    cache = KVCache(
        weights.dimensions, dtype=weights.dtype, device=weights.device, max_slots=slots, token_budget=budget
    )
    return Scheduler(Forward(weights, 1000), cache, prefill_tokens=prefill_tokens, seed=0)


def request(
    prompt: list[int], max_tokens: int = 4, *, session: str = "", temperature: float = 0.0, **sampling: Any
) -> Request:
    return Request(
        prompt=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature, **sampling),
        limit=len(prompt) + max_tokens,
        stop_ids=frozenset([STOP]),
        session=session,
    )


def tokens(n: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4, VOCAB) for _ in range(n)]


def run(scheduler: Scheduler) -> list[Request]:
    finished = []
    while scheduler.running or scheduler.waiting:
        finished += scheduler.step()
    return finished


def greedy(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=STOP,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def check_exact(model: Any, finished: Request) -> None:
    """Each token is the most probable one of the transformers forward, each log-prob its own.

    By induction that is what ``model.generate`` gives, at one forward pass instead of one per token.
    """
    expected = _predictions(model, finished)
    assert finished.response == expected.argmax(-1).tolist()
    assert STOP not in finished.response[:-1]
    check_logprobs(model, finished)


def check_logprobs(model: Any, finished: Request) -> None:
    expected = _predictions(model, finished).gather(-1, torch.tensor(finished.response)[:, None])[:, 0]
    assert (expected - torch.tensor(finished.logprobs)).abs().max() <= 1e-4


def _predictions(model: Any, finished: Request) -> torch.Tensor:
    reference = reference_logprobs(model, finished.prompt + finished.response, finished.sampling.temperature or 1.0)
    return reference[len(finished.prompt) - 1 : -1]


def test_one_request(model: Any) -> None:
    scheduler = make(model)
    scheduler.submit(request(tokens(7), 6))
    (finished,) = run(scheduler)
    check_exact(model, finished)
    assert finished.response == greedy(model, tokens(7), 6)
    assert finished.finish_reason is (FinishReason.STOP if finished.response[-1] == STOP else FinishReason.LENGTH)


def test_a_single_token_prompt_and_a_single_token_answer(model: Any) -> None:
    scheduler = make(model)
    for prompt, n in (([5], 3), ([5], 1), (tokens(9), 1)):
        scheduler.submit(request(prompt, n))
    for finished in run(scheduler):
        check_exact(model, finished)


def test_stop_tokens_end_a_generation_and_stay_in_it(model: Any) -> None:
    scheduler = make(model)
    first = greedy(model, tokens(8), 6)
    stopping = request(tokens(8), 6)
    stopping.stop_ids = frozenset([STOP, first[2]])
    scheduler.submit(stopping)
    (finished,) = run(scheduler)
    assert finished.response == first[: first.index(first[2]) + 1]
    assert finished.finish_reason is FinishReason.STOP


# --- reuse ------------------------------------------------------------------------------------------------------


def test_the_turns_of_a_conversation_are_computed_once(model: Any) -> None:
    scheduler = make(model)
    prompt = tokens(30)
    for turn in range(3):
        scheduler.submit(request(prompt, 5, session="a"))
        (finished,) = run(scheduler)
        check_exact(model, finished)
        prompt = finished.prompt + finished.response + tokens(4, seed=turn)
    # 30 of the first prompt; then the last token of each answer, which was drawn but not computed, and 4 new ones
    assert scheduler.stats.prefilled_tokens == 30 + 2 * 5
    assert scheduler.stats.prompt_tokens > 30 + 2 * 35


def test_the_prompt_of_a_group_is_computed_once(model: Any) -> None:
    scheduler = make(model)
    for attempt in range(6):  # more than there are slots
        scheduler.submit(request(tokens(20), 5, session=f"{attempt}"))
    for finished in run(scheduler):
        check_exact(model, finished)
    assert scheduler.stats.prefilled_tokens == 20
    assert scheduler.stats.requests == 6


def test_what_attempts_hear_after_the_same_words_is_computed_once(model: Any) -> None:
    scheduler = make(model)
    prompt = tokens(20)
    for heard in range(2):
        for attempt in range(3):
            scheduler.submit(request(prompt, 5, session=f"{attempt}"))
        before = replace(scheduler.stats)
        said = run(scheduler)
        assert scheduler.stats.prefilled_tokens - before.prefilled_tokens == (20, 9)[heard]
        for each in said:
            check_exact(model, each)
        prompt = [*prompt, *said[0].response, *tokens(8, seed=1)]


def test_a_common_system_prompt_is_computed_once(model: Any) -> None:
    scheduler = make(model, slots=8)
    system = tokens(100)
    for task in range(5):
        scheduler.submit(request(system + tokens(7, seed=task + 1), session=f"{task}"))
    for finished in run(scheduler):
        check_exact(model, finished)
    assert scheduler.stats.prefilled_tokens == 107 + 4 * 7


def test_a_branch_of_a_conversation_takes_only_what_it_shares(model: Any) -> None:
    scheduler = make(model)
    scheduler.submit(request(tokens(30), 5, session="a"))
    run(scheduler)
    scheduler.submit(request(tokens(30)[:18] + tokens(9, seed=7), 5, session="a"))
    (finished,) = run(scheduler)
    check_exact(model, finished)
    assert scheduler.stats.prefilled_tokens == 30 + 9


def test_an_evicted_conversation_is_computed_again(model: Any) -> None:
    scheduler = make(model, slots=2)
    prompts = {name: tokens(12, seed=seed) for seed, name in enumerate("abcd")}
    for _ in range(2):
        for name in "abcd":
            scheduler.submit(request(prompts[name], 5, session=name))
            (finished,) = run(scheduler)
            check_exact(model, finished)
            prompts[name] = finished.prompt + finished.response + [9, 8]
    assert scheduler.stats.prefilled_tokens == scheduler.stats.prompt_tokens


def test_calls_without_a_session_continue_their_slot(model: Any) -> None:
    scheduler = make(model)
    scheduler.submit(request(tokens(30), 5))
    (first,) = run(scheduler)
    scheduler.submit(request(first.prompt + first.response + [7], 5))
    (second,) = run(scheduler)
    check_exact(model, second)
    assert second.slot is first.slot
    assert scheduler.stats.prefilled_tokens == 30 + 2


def test_flush_forgets_every_key() -> None:
    model = tiny_model("llama")
    scheduler = make(model)
    scheduler.submit(request(tokens(20), 5, session="a"))
    (first,) = run(scheduler)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    scheduler.flush()
    scheduler.submit(request(tokens(20), 5, session="a"))
    (second,) = run(scheduler)
    check_exact(model, second)
    assert second.logprobs != first.logprobs
    assert scheduler.stats.prefilled_tokens == 40


def test_stale_keys_would_be_seen() -> None:
    """Guards the test above: without the flush the log-probs are wrong by far."""
    model = tiny_model("llama")
    scheduler = make(model)
    scheduler.submit(request(tokens(20), 5, session="a"))
    run(scheduler)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    scheduler.submit(request(tokens(20), 5, session="a"))
    (second,) = run(scheduler)
    with pytest.raises(AssertionError):
        check_logprobs(model, second)


def test_flush_refuses_while_something_runs(model: Any) -> None:
    scheduler = make(model)
    scheduler.submit(request(tokens(5), 50))
    scheduler.step()
    with pytest.raises(RuntimeError, match="1 requests are running"):
        scheduler.flush()


# --- bounds -----------------------------------------------------------------------------------------------------


def test_long_prompts_are_computed_in_bounded_chunks_while_others_decode(model: Any) -> None:
    scheduler = make(model, prefill_tokens=16)
    short, long = request(tokens(5), 30), request(tokens(120, seed=1), 3)
    short.stop_ids = frozenset()
    scheduler.submit(short)
    scheduler.step()
    scheduler.submit(long)
    before = replace(scheduler.stats)
    while long.slot is None or long in scheduler._prefilling:
        seen = replace(scheduler.stats)
        scheduler.step()
        assert (scheduler.stats - seen).prefilled_tokens <= 16
        assert (scheduler.stats - seen).decode_steps == 1
    assert (scheduler.stats - before).prefilled_tokens == 120
    run(scheduler)
    check_exact(model, long)


def test_a_short_prompt_overtakes_the_chunks_of_a_long_one(model: Any) -> None:
    scheduler = make(model, prefill_tokens=16)
    long, short = request(tokens(160, seed=1), 3), request(tokens(5), 3)
    scheduler.submit(long)
    scheduler.submit(short)
    order = run(scheduler)
    assert order == [short, long]
    for finished in order:
        check_exact(model, finished)


def test_padding_of_a_prefill_is_bounded_too(model: Any) -> None:
    scheduler = make(model, slots=16, prefill_tokens=64)
    for i in range(10):
        scheduler.submit(request(tokens(3, seed=i)))
    scheduler.submit(request(tokens(60, seed=99)))
    seen: list[list[int]] = []
    prefill = scheduler._forward.prefill
    scheduler._forward.prefill = lambda cache, chunks: (  # type: ignore[method-assign]
        seen.append([len(chunk.tokens) for chunk in chunks]) or prefill(cache, chunks)
    )
    for finished in run(scheduler):
        check_exact(model, finished)
    assert all(len(lengths) * max(lengths) <= 64 for lengths in seen)


def test_more_requests_than_slots_wait_in_order(model: Any) -> None:
    scheduler = make(model, slots=2)
    requests = [request(tokens(6, seed=i), 4) for i in range(7)]
    for each in requests:
        each.stop_ids = frozenset()
        scheduler.submit(each)
    scheduler.step()
    assert (scheduler.running, scheduler.waiting) == (2, 5)
    finished = run(scheduler)
    assert finished == requests
    for each in finished:
        assert len(each.response) == 4
        check_logprobs(model, each)


def test_the_token_budget_bounds_the_cache(model: Any) -> None:
    scheduler = make(model, slots=8, budget=512)
    for i in range(12):
        scheduler.submit(request(tokens(6 if i % 3 else 200, seed=i), 8))
    finished = []
    while scheduler.running or scheduler.waiting:
        finished += scheduler.step()
        assert scheduler._cache.slots * scheduler._cache.width <= 512
    assert len(finished) == 12
    for each in finished:
        check_exact(model, each)


def test_a_running_sequence_survives_the_growth_of_the_cache(model: Any) -> None:
    scheduler = make(model)
    first = request(tokens(6), 40)
    first.stop_ids = frozenset()
    scheduler.submit(first)
    for _ in range(5):
        scheduler.step()
    width = scheduler._cache.width
    scheduler.submit(request(tokens(150, seed=1), 8))
    scheduler.step()
    assert scheduler._cache.width > width
    run(scheduler)
    assert len(first.response) == 40
    check_logprobs(model, first)


def test_a_long_request_waits_for_running_ones_whose_slots_it_would_cost(model: Any) -> None:
    scheduler = make(model, slots=8, budget=512)
    short = [request(tokens(6, seed=i), 20) for i in range(8)]
    for each in short:
        each.stop_ids = frozenset()
        scheduler.submit(each)
    scheduler.step()
    for each in short[:7]:
        scheduler.cancel(each)
    long = request(tokens(200), 8)  # at its width the budget allows two slots; the one that runs is the eighth
    scheduler.submit(long)
    scheduler.step()
    assert (long.slot, scheduler.running) == (None, 1)
    assert run(scheduler) == [short[7], long]
    check_logprobs(model, short[7])
    check_exact(model, long)


def test_one_long_request_does_not_take_the_slots_of_later_versions(model: Any) -> None:
    scheduler = make(model, slots=8, budget=512)
    scheduler.submit(request(tokens(200), 8))
    run(scheduler)
    scheduler.flush()
    for i in range(8):
        scheduler.submit(request(tokens(6, seed=i), 8))
    run(scheduler)
    scheduler.flush()
    for i in range(8):
        scheduler.submit(request(tokens(6, seed=i), 8))
    scheduler.step()
    assert scheduler.running == 8


# --- cancelling -------------------------------------------------------------------------------------------------


def test_cancel_in_every_state_frees_the_slot_and_disturbs_nobody(model: Any) -> None:
    scheduler = make(model, slots=3, prefill_tokens=16)
    kept = request(tokens(6), 12)
    decoding, prefilling, waiting = request(tokens(6, 1), 50), request(tokens(100, 2), 5), request(tokens(6, 3), 5)
    for each in (kept, decoding):
        each.stop_ids = frozenset()
        scheduler.submit(each)
    scheduler.step()
    scheduler.submit(prefilling)
    scheduler.submit(waiting)
    scheduler.step()
    assert (scheduler.running, scheduler.waiting) == (3, 1)
    for each in (decoding, prefilling, waiting):
        scheduler.cancel(each)
    assert (scheduler.running, scheduler.waiting) == (1, 0)
    later = request([*decoding.prompt, 5], 4)
    scheduler.submit(later)
    scheduler.submit(request(tokens(60, 2), 4))
    for finished in run(scheduler):
        check_logprobs(model, finished)
    assert len(kept.response) == 12
    assert scheduler.stats.cancelled == 3
    scheduler.cancel(kept)
    assert scheduler.stats.cancelled == 3


def test_whoever_waits_for_a_cancelled_prefill_goes_on_alone(model: Any) -> None:
    scheduler = make(model, prefill_tokens=16)
    leader, follower = request(tokens(100), 4, session="a"), request(tokens(100), 4, session="b")
    scheduler.submit(leader)
    scheduler.submit(follower)
    scheduler.step()
    assert follower.slot is None
    scheduler.cancel(leader)
    run(scheduler)
    check_exact(model, follower)


# --- everything at once -----------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    slots=st.integers(1, 5),
    budget=st.sampled_from([256, 1000, 10_000]),
    prefill_tokens=st.sampled_from([8, 50, 512]),
)
def test_random_conversations_in_random_order_are_exact(
    model: Any, seed: int, slots: int, budget: int, prefill_tokens: int
) -> None:
    draw = random.Random(seed)
    scheduler = make(model, slots=slots, budget=budget, prefill_tokens=prefill_tokens)
    system = tokens(draw.choice([1, 45]), seed)
    groups = [system + tokens(draw.randint(0, 30), draw.randrange(10**6)) for _ in range(3)]
    history = {f"{i}": list(draw.choice(groups)) for i in range(6)}
    arrivals = [name for name in history for _ in range(draw.randint(1, 3))]
    draw.shuffle(arrivals)
    running: dict[int, str] = {}
    finished: list[Request] = []
    cancelled = 0
    while arrivals or scheduler.running or scheduler.waiting:
        if arrivals and draw.random() < 0.5:
            name = arrivals.pop()
            history[name] = (history[name] if draw.random() < 0.8 else history[name][: draw.randint(1, 40)])[:150]
            each = request(list(history[name]), draw.randint(1, 9), session=draw.choice([name, ""]))
            running[id(each)] = name
            scheduler.submit(each)
        open_ones = [*scheduler._waiting, *scheduler._prefilling, *scheduler._decoding.values()]
        if draw.random() < 0.05 and open_ones:
            scheduler.cancel(draw.choice(open_ones))
            cancelled += 1
        for each in scheduler.step():
            finished.append(each)
            history[running[id(each)]] = each.prompt + each.response + tokens(draw.randint(1, 4), len(finished))
    for each in finished:
        check_exact(model, each)
    assert scheduler.stats.cancelled == cancelled
    assert scheduler.stats.generated_tokens == sum(len(each.response) for each in finished)


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12), st.integers(0, 12))
def test_common_prefix_is_the_longest_one(a: list[int], b: list[int], limit: int) -> None:
    n = common_prefix(a, b, limit)
    assert a[:n] == b[:n]
    assert n <= limit
    assert n in (limit, len(a), len(b)) or a[n] != b[n]


def test_rows_far_apart_are_gathered_and_stay_exact(model: Any) -> None:
    """With few running rows in a wide range the batch copies what it reads instead of reading the range."""
    scheduler = make(model, slots=12)
    requests = [request(tokens(6 + i, seed=i), 20) for i in range(12)]
    for each in requests:
        each.stop_ids = frozenset()
        scheduler.submit(each)
    for _ in range(3):
        scheduler.step()
    for each in requests[1:11]:
        scheduler.cancel(each)
    batch: DecodeBatch = scheduler._batch
    scheduler.step()
    assert batch._running is not None
    assert isinstance(batch._running.slots, torch.Tensor)
    run(scheduler)
    for each in (requests[0], requests[11]):
        assert len(each.response) == 20
        check_logprobs(model, each)


@table("spread", [1, 2])
def test_very_different_lengths_are_read_in_pieces_and_stay_exact(
    model: Any, monkeypatch: pytest.MonkeyPatch, spread: int
) -> None:
    """Both read in place (a dense range of rows) and gathered (rows far apart)."""
    monkeypatch.setattr("astuner_local.engine.batch._WORTH_SPLITTING", 1)
    monkeypatch.setattr("astuner_local.engine.batch._PIECE", 2)
    scheduler = make(model, slots=16)
    requests = [request(tokens(180 if i == 15 else 4 + i, seed=i), 12) for i in range(16)]
    for each in requests:
        each.stop_ids = frozenset()
        scheduler.submit(each)
    scheduler.step()
    for each in requests[1:15] if spread == 2 else []:
        if each is not requests[7]:
            scheduler.cancel(each)
    scheduler.step()
    assert len(scheduler._batch._pieces) > 1
    for finished in run(scheduler):
        assert len(finished.response) == 12
        check_logprobs(model, finished)
