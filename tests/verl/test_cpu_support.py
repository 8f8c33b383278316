"""The CPU server of astuner-verl-cpu: what it draws, what it says about it, and what happens around it. No Ray."""

import asyncio
import subprocess
import sys

import pytest
import torch
from verl.workers.config import HFModelConfig, RolloutConfig

from astuner.contracts.errors import ModelFailed
from astuner.contracts.types import SamplingParams
from astuner_cpu.engine import CpuEngine, read_sampling
from astuner_verl_cpu.replica import HFServer

STOP = 2
"""The model's ``<|im_end|>``."""
PROMPTS = [[1, 40, 41, 42], [1, 50], list(range(60, 91)), [1, 40, 41, 42], [7] * 13]
WAYS = {
    "plain": {},
    "warm": {"temperature": 1.7},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "both": {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
    "greedy": {"temperature": 0.0},
}


@pytest.fixture(scope="module")
def engine(tiny_model):
    """On the tiny model, made less sure of itself, so that every way to sample has something to choose from."""
    engine = CpuEngine(tiny_model, default_tokens=12, defaults={"ignore_eos": True})
    with torch.no_grad():
        engine.model.model.norm.weight.mul_(0.25)
    yield engine
    engine.engine.close()


def decode(engine, *asked):
    """(prompt, parameters) of each request -> the requests at their end."""

    async def all_of_them():
        return await asyncio.gather(*(engine.generate(prompt, how) for prompt, how in asked))

    return [request for (request,) in asyncio.run(all_of_them())]


def expected(model, prompt, tokens, sampling):
    """The log-probability of each token by a forward pass of its own, in float64 and token by token."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0].double()
    found = []
    for at, token in enumerate(tokens, start=len(prompt) - 1):
        weights = logits[at] if sampling.temperature <= 0 else logits[at] / sampling.temperature
        probs = dict(enumerate(weights.softmax(-1).tolist()))
        order = sorted(probs, key=lambda t: (-probs[t], t))
        if sampling.temperature <= 0:
            assert token == order[0]
            order = order[: len(order)]
        elif sampling.top_k > 0:
            order = order[: sampling.top_k]
        if sampling.temperature > 0 and sampling.top_p < 1:
            total = sum(probs[t] for t in order)
            mass, kept = 0.0, []
            for t in order:
                if kept and mass >= sampling.top_p:
                    break
                kept.append(t)
                mass += probs[t] / total
            order = kept
        assert token in order
        found.append(torch.tensor(probs[token] / sum(probs[t] for t in order)).log().item())
    return found


@pytest.mark.parametrize("way", WAYS)
def test_logprobs_are_those_of_the_distribution_that_was_drawn_from(engine, way):
    for one in decode(engine, *((prompt, {"seed": i, **WAYS[way]}) for i, prompt in enumerate(PROMPTS))):
        assert len(one.tokens) == len(one.logprobs) == 12
        exact = expected(engine.model, one.prompt, one.tokens, one.sampling)
        assert one.logprobs == pytest.approx(exact, abs=2e-5)


def test_a_request_is_the_same_alone_and_among_others(engine):
    ways = [{"max_tokens": 3 + 7 * (i % 3), "temperature": 0.5 + i / 4, "seed": i} for i in range(len(PROMPTS))]
    asked = list(zip(PROMPTS, ways, strict=True))
    for one, (alone,) in zip(decode(engine, *asked), (decode(engine, each) for each in asked), strict=True):
        assert one.tokens == alone.tokens
        assert one.logprobs == pytest.approx(alone.logprobs, abs=2e-5)


def test_seeds_repeat_a_generation_and_differ_from_one_another(engine):
    first, again, other = decode(engine, *(([1, 40, 41], {"seed": seed}) for seed in (4, 4, 5)))
    assert first.tokens == again.tokens != other.tokens
    one, several = asyncio.run(engine.generate([1, 40, 41], {"seed": 4}, n=2))
    assert one.tokens == first.tokens
    assert several.tokens == other.tokens


def test_a_stop_token_ends_it_and_stays_and_a_stop_string_ends_it_with_the_token_that_completes_it(engine):
    (free,) = decode(engine, ([1, 40, 41], {"seed": 4}))
    stop = free.tokens[5]
    until_stop = free.tokens[: free.tokens.index(stop) + 1]
    text = engine.tokenizer.decode([stop])
    for how in ({"stop_token_ids": [stop]}, {"stop": text}):
        (cut,) = decode(engine, ([1, 40, 41], {"seed": 4, **how}))
        assert cut.stopped
        assert cut.tokens == until_stop


def test_parameters_are_read_by_vllms_names():
    eos = frozenset({STOP})

    def read(given, room=100):
        return read_sampling(given, eos=eos, default_tokens=48, room=room)

    full = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "stop_token_ids": [9], "logprobs": True}
    assert read({**full, "max_tokens": 5, "repetition_penalty": 1.0}) == SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.9, top_k=7, seed=3, stop_token_ids=(STOP, 9)
    )
    assert read({"stop": "END"}).stop == ("END",)
    assert read({"stop": ["a", "b"]}).stop == ("a", "b")
    assert read({}) == SamplingParams(max_tokens=48, stop_token_ids=(STOP,))
    assert read({"max_tokens": 500}, room=4).max_tokens == 4
    assert read({"ignore_eos": True}).stop_token_ids == ()
    with pytest.raises(ValueError, match="do not support the sampling parameter 'min_p'"):
        read({"min_p": 0.1})
    with pytest.raises(ValueError, match="repetition_penalty"):
        read({"repetition_penalty": 1.2})


# ------------------------------------------------------------------------------------------------- as VERL talks to it


def server_on(folder, **rollout):
    lengths = {"prompt_length": 64, "response_length": 32, "max_model_len": 256}
    rollout = {**lengths, "load_format": "auto", "dtype": "float32", **rollout}
    return HFServer(RolloutConfig(name="hf_cpu", **rollout), HFModelConfig(path=str(folder), use_remove_padding=False))


@pytest.fixture
def server(tiny_model):
    server = server_on(tiny_model)
    yield server
    server.engine.engine.close()


def running(server):
    """How many requests are in the batch and have a token."""
    scheduler = server.engine.engine._scheduler
    return len(scheduler._decoding) if scheduler.stats.decode_steps > 3 else 0


def ask(server, prompt=(1, 40, 41), **how):
    how = {"logprobs": True, "ignore_eos": True, **how}
    return server.generate(prompt_ids=list(prompt), sampling_params=how, request_id="r")


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_it_answers_as_verls_servers_do(server):
    async def talk():
        await server.set_global_steps(7)
        return await asyncio.gather(ask(server, max_tokens=5), ask(server, max_tokens=5, logprobs=False))

    said, silent = asyncio.run(talk())
    assert (len(said.token_ids), len(said.log_probs), said.stop_reason) == (5, 5, "completed")
    assert said.extra_fields == {"global_steps": 7}
    assert silent.log_probs is None


def test_it_computes_in_the_type_it_is_told_and_takes_weights_in_float32(tiny_model, server):
    rounded = server_on(tiny_model, dtype="bfloat16")
    try:
        weights = {name: tensor.clone() for name, tensor in server.engine.model.state_dict().items()}
        asyncio.run(rounded.load_weights(weights))
        assert {tensor.dtype for tensor in rounded.engine.model.state_dict().values()} == {torch.bfloat16}
        mine, theirs = (asyncio.run(ask(of, max_tokens=1, temperature=0.0)).log_probs[0] for of in (server, rounded))
        assert 0 < abs(mine - theirs) < 0.1
    finally:
        rounded.engine.engine.close()


def test_it_stops_where_the_model_ends_and_never_leaves_the_context(server):
    prompt = [1, 40, 41]
    ended = asyncio.run(ask(server, prompt, temperature=0.0, ignore_eos=False, max_tokens=200))
    assert ended.token_ids[-1] == STOP
    assert STOP not in ended.token_ids[:-1]
    assert len(asyncio.run(ask(server, [5] * 250, max_tokens=200)).token_ids) == 6
    with pytest.raises(ValueError, match="256 tokens leaves no room in a context of 256"):
        asyncio.run(ask(server, [5] * 256))
    for wrong in ([], [5, 512]):
        with pytest.raises(ValueError, match="tokens from 0 to 511"):
            asyncio.run(ask(server, wrong))
    with pytest.raises(ValueError, match="image_data"):
        asyncio.run(server.generate([1], {}, "r", image_data=["a picture"]))


def test_a_pause_ends_requests_with_what_they_have_and_holds_those_that_come(server):
    async def talk():
        begun = [asyncio.create_task(ask(server, [7] * n, max_tokens=200)) for n in (3, 9)]
        await until(lambda: running(server) == 2)
        report = await server.abort_all_requests()
        stopped = [await task for task in begun]
        held = asyncio.create_task(ask(server, max_tokens=4))
        await asyncio.sleep(0.05)
        assert not held.done()
        rejected = ask(server, max_tokens=4)
        await server.abort_all_requests(reject_request=True)
        rejected, was_held = await rejected, await held  # a pause that rejects sends away those that wait, too
        await server.resume_generation()
        return report, stopped, rejected, was_held, await ask(server, max_tokens=4)

    report, stopped, rejected, was_held, after = asyncio.run(talk())
    assert report["aborted_count"] == 2
    for output in stopped:
        assert output.stop_reason == "aborted"
        assert 0 < len(output.token_ids) == len(output.log_probs) < 200
    for output in (rejected, was_held):
        assert (output.stop_reason, output.token_ids) == ("aborted", [])
    assert (after.stop_reason, len(after.token_ids)) == ("completed", 4)


def test_what_waits_behind_a_pause_goes_on_after_it(server):
    async def talk():
        await server.abort_all_requests()
        held = asyncio.create_task(ask(server, max_tokens=4))
        await asyncio.sleep(0.05)
        assert not held.done()
        await server.resume_generation()
        return await held

    assert asyncio.run(talk()).stop_reason == "completed"


def test_a_cancelled_request_leaves_the_others_alone(server):
    async def talk():
        alone = await ask(server, seed=3, max_tokens=40)
        goes = asyncio.create_task(ask(server, [7] * 20, max_tokens=200))
        stays = asyncio.create_task(ask(server, seed=3, max_tokens=40))
        await until(lambda: running(server) == 2)
        goes.cancel()
        with pytest.raises(asyncio.CancelledError):
            await goes
        output = await stays
        assert running(server) == 0
        return alone, output

    alone, output = asyncio.run(talk())
    assert output.token_ids == alone.token_ids


def test_weights_change_between_requests_only(server):
    async def talk():
        before = await ask(server, seed=3, max_tokens=200)
        weights = {name: tensor * 0.5 for name, tensor in server.engine.model.state_dict().items()}
        begun = asyncio.create_task(ask(server, seed=3, max_tokens=200))
        await until(lambda: running(server))
        update = asyncio.create_task(server.load_weights(weights, global_steps=5))
        await asyncio.sleep(0)
        later = asyncio.create_task(ask(server, seed=3, max_tokens=200))
        during, updates, after = await asyncio.gather(begun, update, later)
        assert during.token_ids == before.token_ids
        assert during.log_probs == pytest.approx(before.log_probs, abs=2e-5)
        assert during.extra_fields == {"global_steps": 0}
        assert updates == 1
        assert after.token_ids != before.token_ids
        assert after.extra_fields == {"global_steps": 5}
        sampling = SamplingParams(max_tokens=200)
        said = expected(server.engine.model, [1, 40, 41], list(after.token_ids), sampling)
        assert after.log_probs == pytest.approx(said, abs=2e-5)

    asyncio.run(talk())


def test_weights_that_do_not_fit_change_nothing(server):
    whole = {name: torch.zeros_like(tensor) for name, tensor in server.engine.model.state_dict().items()}
    norm = "model.norm.weight"
    cases = {
        "model.norm.weight is missing": {name: tensor for name, tensor in whole.items() if name != norm},
        "nobody.weight is not in the model": {**whole, "nobody.weight": torch.zeros(1)},
        r"model.norm.weight is \(3,\)": {**whole, norm: torch.zeros(3)},
    }
    before = {name: tensor.clone() for name, tensor in server.engine.model.state_dict().items()}
    for message, weights in cases.items():
        with pytest.raises(ValueError, match=message):
            asyncio.run(server.load_weights(weights))
    assert server.updates == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in server.engine.model.state_dict().items())
    without_the_tied_head = {name: tensor for name, tensor in whole.items() if name != "lm_head.weight"}
    assert asyncio.run(server.load_weights(without_the_tied_head)) == 1
    assert not server.engine.model.lm_head.weight.any()


def test_a_step_that_fails_is_told_to_whoever_waits_and_to_those_that_come(server, monkeypatch):
    async def talk():
        monkeypatch.setattr(server.engine.engine._scheduler, "step", lambda *_, **__: 1 / 0)
        failed = await asyncio.gather(*(ask(server) for _ in range(2)), return_exceptions=True)
        return [*failed, *await asyncio.gather(ask(server), return_exceptions=True)]

    for error in asyncio.run(talk()):
        assert isinstance(error, ModelFailed)
        assert isinstance(error.__cause__, ZeroDivisionError)


# ------------------------------------------------------------------------------------------------------ found by VERL


def test_verl_finds_the_platform_where_it_is_asked_for():
    from verl.plugin.platform import get_platform
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    platform = get_platform()
    assert (platform.device_name, platform.current_device()) == ("cpu", torch.device("cpu"))
    assert get_rollout_replica_class("hf_cpu").__name__ == "HFReplica"
    assert get_rollout_class("hf_cpu").__name__ == "HFServerAdapter"


def test_nothing_is_registered_where_it_is_not_asked_for(cpu_env):
    import os

    code = (
        "import verl\nfrom verl.plugin.platform import PlatformRegistry\n"
        "from verl.workers.rollout.replica import RolloutReplicaRegistry\n"
        "assert 'cpu' not in PlatformRegistry.registered_names()\n"
        "assert 'hf_cpu' not in RolloutReplicaRegistry._registry\n"
    )
    env = {**os.environ, **cpu_env, "VERL_PLATFORM": ""}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert shown.returncode == 0, shown.stderr


def test_every_key_of_the_settings_is_one_that_verl_has_or_takes():
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    from astuner_verl.native import WITHOUT_FLASH_ATTENTION, platform_settings

    assert platform_settings({}) == WITHOUT_FLASH_ATTENTION, "flash-attn is not installed here"
    for settings in (WITHOUT_FLASH_ATTENTION, platform_settings({"VERL_PLATFORM": "cpu"})):
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer")
        for key, value in ((marked.removeprefix("?"), value) for marked, value in settings.items()):
            place, _, name = key.lstrip("+").rpartition(".")
            assert (name in list(OmegaConf.select(config, place) or {})) != key.startswith("+"), key
            OmegaConf.update(config, key.lstrip("+"), value, force_add=key.startswith("+"))
    assert config.ray_kwargs.ray_init.num_gpus == config.trainer.n_gpus_per_node
