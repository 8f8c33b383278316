"""`LocalEngine` as its callers see it: asyncio, cancelling, updates of the weights, failures."""

from __future__ import annotations

import asyncio
import copy
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from astuner import InferenceEngine
from astuner.contracts.errors import ConfigError, ContextOverflow, ModelFailed, RunError
from astuner.contracts.types import FinishReason, Generation, SamplingParams
from astuner_local.engine import LocalEngine
from astuner_local.engine.kv_cache import default_token_budget
from tests.table import table

from ._tiny_models import SHAPES, VOCAB, reference_logprobs, tiny_model

PROMPT = [5, 17, 8, 30, 2, 44]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def engine(model: Any) -> Iterator[LocalEngine]:
    engine = LocalEngine(model, tokenizer_eos_ids=(), max_num_seqs=8)
    yield engine
    engine.close()


@pytest.fixture
def own() -> Iterator[LocalEngine]:
    """An engine that a test may pause, break and close; its model is `own.model`."""
    model = tiny_model("qwen2")
    engine = LocalEngine(model, tokenizer_eos_ids=(), max_num_seqs=4, policy_version=3)
    engine.model = model  # type: ignore[attr-defined]
    yield engine
    engine.close()


def generate(engine: InferenceEngine, *prompts: Sequence[int], session: str = "", **sampling: Any) -> list[Generation]:
    params = SamplingParams(**{"max_tokens": 8, **sampling})

    async def main() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(p, params, session=session) for p in prompts))

    return asyncio.run(main())


def logprob_error(model: Any, generation: Generation, temperature: float = 1.0) -> float:
    ids = [*generation.prompt_ids, *generation.response_ids]
    reference = reference_logprobs(model, ids, temperature)[len(generation.prompt_ids) - 1 : -1]
    expected = reference.gather(-1, torch.tensor(generation.response_ids)[:, None])[:, 0]
    return float((expected - torch.tensor(generation.logprobs)).abs().max())


def test_a_stop_string_ends_a_generation_with_the_token_that_completes_it(model: Any) -> None:
    def decode(ids: Sequence[int]) -> str:
        return "".join(f"{token} " for token in ids)

    engine = LocalEngine(model, tokenizer_eos_ids=(), max_num_seqs=8, decode=decode)
    try:
        prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
        whole = generate(engine, *prompts, max_tokens=24, seed=5)
        wanted = decode(whole[0].response_ids[4:6])[:-2]  # two tokens, without the last one's end
        stopped = generate(engine, *prompts, max_tokens=24, seed=5, stop=("never", wanted))
        for free, cut in zip(whole, stopped, strict=True):
            length = next((n for n in range(1, 25) if wanted in decode(free.response_ids[:n])), 24)
            assert cut.response_ids == free.response_ids[:length]
            assert cut.logprobs == pytest.approx(free.logprobs[:length], abs=1e-5)
            assert cut.finish_reason is (FinishReason.STOP if length < 24 else FinishReason.LENGTH)
        assert len(stopped[0].response_ids) <= 6
        (again,) = generate(engine, prompts[0], max_tokens=24, seed=5)
        assert again.response_ids == whole[0].response_ids  # the row is free for others
    finally:
        engine.close()


# --- exactness --------------------------------------------------------------------------------------------------


@table("shape", SHAPES)
def test_logprobs_are_those_of_transformers(shape: str) -> None:
    model = tiny_model(shape)
    engine = LocalEngine(model, tokenizer_eos_ids=(), max_num_seqs=4)
    try:
        prompts = [PROMPT, PROMPT, PROMPT[:3], PROMPT * 12, [1]]
        for temperature in (1.0, 0.6, 1.7):
            for first in generate(engine, *prompts, temperature=temperature):
                assert logprob_error(model, first, temperature) <= 1e-4
                second = generate(engine, [*first.prompt_ids, *first.response_ids, 9, 9], temperature=temperature)[0]
                assert logprob_error(model, second, temperature) <= 1e-4
    finally:
        engine.close()


def test_greedy_is_generate_of_transformers_with_logprobs_at_temperature_1(model: Any, engine: LocalEngine) -> None:
    greedy = generate(engine, PROMPT, temperature=0.0, max_tokens=20)[0]
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
    assert list(greedy.response_ids) == theirs[0, len(PROMPT) :].tolist()
    assert logprob_error(model, greedy, 1.0) <= 1e-4


@table(("top_k", "top_p"), [(3, 1.0), (-1, 0.7), (5, 0.8), (1, 1.0), (VOCAB + 5, 1.0)])
def test_cut_distributions_are_renormalised(model: Any, engine: LocalEngine, top_k: int, top_p: float) -> None:
    temperature = 1.5
    generations = generate(engine, *[PROMPT] * 6, top_k=top_k, top_p=top_p, temperature=temperature)
    for generation in generations:
        ids = [*PROMPT, *generation.response_ids]
        probabilities = reference_logprobs(model, ids, temperature)[len(PROMPT) - 1 : -1].exp()
        for row, token, logprob in zip(probabilities, generation.response_ids, generation.logprobs, strict=True):
            assert logprob == pytest.approx(_cut_logprob(row.tolist(), token, top_k, top_p), abs=1e-4)


def _cut_logprob(row: list[float], token: int, top_k: int, top_p: float) -> float:
    """The definition, one token at a time."""
    ordered = sorted(range(len(row)), key=lambda i: -row[i])[: top_k if top_k > 0 else None]
    total = sum(row[i] for i in ordered)
    kept, mass = [], 0.0
    for i in ordered:
        if mass / total >= top_p:
            break
        kept.append(i)
        mass += row[i]
    assert token in kept
    return math.log(row[token] / mass)


@pytest.mark.slow
def test_tokens_are_drawn_from_the_distribution(model: Any, engine: LocalEngine) -> None:
    draws = 4000
    generations = generate(engine, *[PROMPT] * draws, max_tokens=1, temperature=1.3, top_k=6)
    top = reference_logprobs(model, PROMPT, 1.3)[-1].exp().topk(6)
    counts = torch.bincount(torch.tensor([g.response_ids[0] for g in generations]), minlength=VOCAB)[top.indices]
    expected = top.values / top.values.sum() * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert counts.sum() == draws
    assert chi_square < 30  # 5 degrees of freedom: p = 1.5e-5; the engine's seed is fixed


def test_a_seed_repeats_a_generation_whatever_else_runs(engine: LocalEngine) -> None:
    alone = generate(engine, PROMPT, seed=11, max_tokens=24)[0]

    async def crowded() -> Generation:
        others = [engine.generate([i, i + 1], SamplingParams(max_tokens=30)) for i in range(9)]
        seeded = engine.generate(PROMPT, SamplingParams(max_tokens=24, seed=11))
        return (await asyncio.gather(*others, seeded))[-1]

    assert asyncio.run(crowded()).response_ids == alone.response_ids
    assert generate(engine, PROMPT, seed=12, max_tokens=24)[0].response_ids != alone.response_ids


def test_unseeded_draws_differ_within_a_group(engine: LocalEngine) -> None:
    responses = {tuple(g.response_ids) for g in generate(engine, *[PROMPT] * 8, max_tokens=16, temperature=1.5)}
    assert len(responses) == 8


def test_bfloat16_runs(model: Any) -> None:
    half = copy.deepcopy(model).to(torch.bfloat16)
    engine = LocalEngine(half, tokenizer_eos_ids=(), max_num_seqs=4)
    try:
        for generation in generate(engine, PROMPT, PROMPT[:2]):
            assert logprob_error(half, generation) < 0.5
    finally:
        engine.close()


# --- limits and bad requests ------------------------------------------------------------------------------------


def test_the_context_bounds_a_generation() -> None:
    model = tiny_model("llama")
    engine = LocalEngine(model, tokenizer_eos_ids=(), max_model_len=16)
    try:
        generation = generate(engine, PROMPT, max_tokens=1000)[0]
        assert len(generation.response_ids) == 16 - len(PROMPT)
        assert generation.finish_reason is FinishReason.LENGTH
        with pytest.raises(ContextOverflow, match=r"16 tokens.*max_model_len"):
            generate(engine, [1] * 16)
        assert len(generate(engine, [1] * 15)[0].response_ids) == 1
    finally:
        engine.close()


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="use 256 or less"):
        LocalEngine(tiny_model("llama"), tokenizer_eos_ids=(), max_model_len=300)


def test_end_tokens_of_tokenizer_and_request_stop(model: Any) -> None:
    first = LocalEngine(model, tokenizer_eos_ids=())
    expected = list(generate(first, PROMPT, temperature=0.0, max_tokens=12)[0].response_ids)
    first.close()
    second = LocalEngine(model, tokenizer_eos_ids=(expected[4],))
    try:
        by_tokenizer = generate(second, PROMPT, temperature=0.0, max_tokens=12)[0]
        by_request = generate(second, PROMPT, temperature=0.0, max_tokens=12, stop_token_ids=(expected[1], 7))[0]
    finally:
        second.close()
    assert by_tokenizer.response_ids == expected[: expected.index(expected[4]) + 1]
    assert by_request.response_ids == expected[: expected.index(expected[1]) + 1]
    assert by_tokenizer.finish_reason is by_request.finish_reason is FinishReason.STOP


@table(
    ("prompt", "sampling", "named"),
    [
        ([], {}, "empty"),
        ([VOCAB], {}, "do not match"),
        ([-1], {}, "do not match"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
    ],
)
def test_what_cannot_be_honoured_fails_that_call_only(
    engine: LocalEngine, prompt: list[int], sampling: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelFailed, match=named):
        generate(engine, prompt, **sampling)
    assert generate(engine, PROMPT)[0].response_ids


def test_the_token_budget_has_a_default() -> None:
    assert default_token_budget(1000, torch.device("cpu")) > 10_000


# --- cancelling, loops ------------------------------------------------------------------------------------------


def test_cancelling_frees_the_slot(own: LocalEngine) -> None:
    async def main() -> Generation:
        endless = [asyncio.ensure_future(own.generate([i], SamplingParams(max_tokens=250))) for i in range(9)]
        while own.stats().decode_steps < 3:
            await asyncio.sleep(0.001)
        for task in endless:
            task.cancel()
        results = await asyncio.gather(*endless, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        return await own.generate(PROMPT, SamplingParams(max_tokens=4))

    assert len(asyncio.run(main()).response_ids) == 4
    stats = own.stats()
    assert stats.generated_tokens == 4
    assert stats.cancelled == 9


def test_a_call_cancelled_before_it_was_sent_never_runs(own: LocalEngine) -> None:
    async def main() -> None:
        call = own.generate([1], SamplingParams(max_tokens=250))
        call.send(None)  # up to its await, in this turn of the loop
        with pytest.raises(asyncio.CancelledError):
            call.throw(asyncio.CancelledError())
        with own._changed:  # let the thread see the cancelling before the loop gets to send anything
            own._changed.wait_for(lambda: not own._cancelled and own._parked, timeout=10)
        await own.generate(PROMPT, SamplingParams(max_tokens=2))

    asyncio.run(main())
    assert own.stats().requests == 1


def test_several_event_loops_at_once(model: Any, engine: LocalEngine) -> None:
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(generate, engine, *[[i, j, 7] for j in range(5)]) for i in range(3)]
        for i, future in enumerate(futures):
            for j, generation in enumerate(future.result()):
                assert list(generation.prompt_ids) == [i, j, 7]
                assert logprob_error(model, generation) <= 1e-4


def test_a_loop_that_is_gone_harms_nobody(own: LocalEngine) -> None:
    loop = asyncio.new_event_loop()
    abandoned = loop.create_task(own.generate([1], SamplingParams(max_tokens=200)))
    while own.stats().decode_steps < 2:
        loop.run_until_complete(asyncio.sleep(0.001))
    loop.close()
    with own.paused():
        pass
    assert own.stats().generated_tokens == 200
    assert generate(own, PROMPT)[0].response_ids
    abandoned._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio would print that it never ended


# --- updates of the weights -------------------------------------------------------------------------------------


def test_parameters_are_views_so_an_optimizer_step_is_seen_without_a_copy(own: LocalEngine) -> None:
    model: Any = own.model  # type: ignore[attr-defined]
    fused = own._weights.layers[0].qkv.weight
    assert model.model.layers[0].self_attn.k_proj.weight.untyped_storage().data_ptr() == fused.data_ptr()
    generate(own, PROMPT, session="a")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for version in (4, 5):
        with own.paused():
            loss = model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            own.weights_updated(version)
        generation = generate(own, PROMPT, session="a")[0]
        assert generation.policy_version == version
        assert logprob_error(model, generation) <= 1e-4
        assert own._weights.layers[0].qkv.weight.data_ptr() == fused.data_ptr()


def test_two_engines_may_share_a_model(own: LocalEngine) -> None:
    model: Any = own.model  # type: ignore[attr-defined]
    other = LocalEngine(model, tokenizer_eos_ids=())
    try:
        with own.paused(), other.paused():
            with torch.no_grad():
                model.model.layers[0].self_attn.q_proj.weight.mul_(-1)
            own.weights_updated(4)
            other.weights_updated(4)
        assert logprob_error(model, generate(own, PROMPT)[0]) <= 1e-4
        assert logprob_error(model, generate(other, PROMPT)[0]) <= 1e-4
    finally:
        other.close()


def test_load_state_dict_is_seen(own: LocalEngine) -> None:
    model: Any = own.model  # type: ignore[attr-defined]
    for assign in (False, True):
        other = tiny_model("qwen2", seed=5 + assign).state_dict()
        with own.paused():
            model.load_state_dict(other, assign=assign)
            model.tie_weights()
            own.weights_updated(4)
        assert logprob_error(model, generate(own, PROMPT)[0]) <= 1e-4
        assert torch.equal(model.model.layers[1].mlp.up_proj.weight, other["model.layers.1.mlp.up_proj.weight"])


@table("shape", ["qwen2", "qwen3", "llama-biased"])
def test_a_fused_model_is_saved_and_copied_like_any_other(shape: str, tmp_path: Path) -> None:
    model = tiny_model(shape)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    LocalEngine(model, tokenizer_eos_ids=()).close()
    copied = copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for other in (model, copied, loaded):
        state = other.state_dict()
        assert state.keys() == before.keys()
        assert all(torch.equal(state[name], before[name]) for name in before)
    with torch.no_grad():
        copied.model.layers[0].self_attn.q_proj.weight.zero_()
    assert model.model.layers[0].self_attn.q_proj.weight.abs().max() > 0


def test_a_fused_checkpoint_is_not_larger(tmp_path: Path) -> None:
    sizes = []
    model = tiny_model("qwen3")
    for name in ("before", "after"):
        model.save_pretrained(tmp_path / name)
        sizes.append((tmp_path / name / "model.safetensors").stat().st_size)
        LocalEngine(model, tokenizer_eos_ids=()).close()
    assert sizes[0] == sizes[1]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft
@pytest.mark.parametrize("shape", ["qwen2", "llama-biased"])
@pytest.mark.parametrize("merge", [True, False], ids=["merged", "beside"])
@pytest.mark.parametrize("target", [["q_proj", "v_proj", "down_proj"], "all-linear"], ids=["some", "all"])
def test_adapters_take_part_from_every_update_on(shape: str, merge: bool, target: Any) -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model(shape)
    frozen = base.model.layers[0].mlp.up_proj.weight.detach().clone()
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=16, target_modules=target, task_type="CAUSAL_LM"))
    engine = LocalEngine(model, tokenizer_eos_ids=(), max_num_seqs=4, merge_adapters=merge)
    try:
        untouched = generate(engine, PROMPT)[0]
        assert logprob_error(model, untouched) <= 1e-4
        with engine.paused():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.2)
            engine.weights_updated(1)
        adapted = generate(engine, PROMPT)[0]
        assert logprob_error(model, adapted) <= 1e-4
        with model.disable_adapter():
            assert logprob_error(model, adapted) > 1e-2
        up = base.model.layers[0].mlp.up_proj
        assert torch.equal(frozen, getattr(up, "base_layer", up).weight)
    finally:
        engine.close()


def test_a_pause_waits_for_what_runs_and_holds_back_what_comes(own: LocalEngine) -> None:
    entered, leave = threading.Event(), threading.Event()

    def update() -> None:
        with own.paused():
            entered.set()
            assert leave.wait(30)
            assert own._scheduler.running == 0
            own.weights_updated(4)

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    async def main() -> list[Generation]:
        running = asyncio.ensure_future(own.generate(PROMPT, SamplingParams(max_tokens=200)))
        await until(lambda: own.stats().decode_steps > 1)
        updater = asyncio.ensure_future(asyncio.to_thread(update))
        await until(lambda: own._paused)
        while_it_waits = asyncio.ensure_future(own.generate(PROMPT, SamplingParams(max_tokens=3)))
        await until(entered.is_set)
        while_it_updates = asyncio.ensure_future(own.generate(PROMPT, SamplingParams(max_tokens=3)))
        await asyncio.sleep(0.02)
        assert own.stats().requests == 1
        leave.set()
        await updater
        return await asyncio.gather(running, while_it_waits, while_it_updates)

    generations = asyncio.run(main())
    assert [generation.policy_version for generation in generations] == [3, 4, 4]
    assert [len(generation.response_ids) for generation in generations] == [200, 3, 3]


def test_a_pause_that_cuts_ends_what_runs_with_what_it_has(own: LocalEngine) -> None:
    params = SamplingParams(max_tokens=500)

    async def main() -> list[Generation]:
        running = [asyncio.ensure_future(own.generate(PROMPT[:n], params)) for n in (3, 6)]
        while own.stats().decode_steps < 5:
            await asyncio.sleep(0.001)

        def pause() -> None:
            with own.paused(cut=True):
                own.weights_updated(4)

        await asyncio.to_thread(pause)
        return await asyncio.gather(*running)

    for cut in asyncio.run(main()):
        assert (cut.finish_reason, cut.policy_version) == (FinishReason.CANCELLED, 3)
        assert 4 < len(cut.response_ids) == len(cut.logprobs) < 500
        assert logprob_error(own.model, cut) <= 1e-4  # type: ignore[attr-defined]
    assert generate(own, PROMPT)[0].policy_version == 4


def test_an_update_outside_a_pause_is_refused(own: LocalEngine) -> None:
    with pytest.raises(RunError, match=r"inside engine\.paused\(\)"):
        own.weights_updated(4)


def test_a_pause_that_fails_still_ends_and_drops_the_keys(own: LocalEngine) -> None:
    model: Any = own.model  # type: ignore[attr-defined]
    generate(own, PROMPT, session="a")

    def half_an_update() -> None:
        with own.paused(), torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half_an_update()
    assert logprob_error(model, generate(own, [*PROMPT, 4], session="a")[0]) <= 1e-4


# --- failing, closing -------------------------------------------------------------------------------------------


def test_a_failure_reaches_everyone_who_waits_and_everyone_after(
    own: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory for the test")

    monkeypatch.setattr(own._scheduler._forward, "decode", fail)

    async def main() -> list[Generation | BaseException]:
        params = SamplingParams(max_tokens=5)
        return await asyncio.gather(*(own.generate([i], params) for i in range(9)), return_exceptions=True)

    results = asyncio.run(main())
    assert len(results) == 9
    assert all(isinstance(result, ModelFailed) and "no memory for the test" in str(result) for result in results)
    with pytest.raises(ModelFailed, match="max_num_seqs"):
        generate(own, PROMPT)
    with pytest.raises(RunError, match="no memory for the test"), own.paused():
        pass


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.5}])
def test_weights_that_become_nan_are_named(own: LocalEngine, sampling: dict[str, Any]) -> None:
    model: Any = own.model  # type: ignore[attr-defined]
    with own.paused(), torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
        own.weights_updated(4)
    for _ in range(2):
        with pytest.raises(ModelFailed, match="not finite"):
            generate(own, PROMPT, **sampling)


def test_closing_fails_who_waits_and_may_be_repeated(own: LocalEngine) -> None:
    async def main() -> list[Generation | BaseException]:
        waiting = asyncio.gather(
            *(own.generate([i], SamplingParams(max_tokens=250)) for i in range(6)), return_exceptions=True
        )
        while own.stats().decode_steps < 2:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(own.close)
        return await waiting

    assert all(isinstance(result, ModelFailed) for result in asyncio.run(main()))
    own.close()
    with pytest.raises(ModelFailed, match="closed"):
        generate(own, PROMPT)
    with pytest.raises(RunError, match="closed"), own.paused():
        pass


def test_stats_count_and_subtract(own: LocalEngine) -> None:
    generate(own, PROMPT, max_tokens=5, session="a")
    before = own.stats()
    generate(own, PROMPT, PROMPT, max_tokens=5)
    step = own.stats() - before
    assert (step.requests, step.prompt_tokens, step.generated_tokens) == (2, 12, 10)
    assert step.prefilled_tokens == 0
    assert step.reused_share == 1.0
    assert step.mean_batch == 2.0
    assert before.mean_batch == 1.0
