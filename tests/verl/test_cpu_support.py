"""The CPU server of astuner-verl-cpu: what it draws, what it says about it, and what happens around it. No Ray."""

import asyncio
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM
from verl.workers.config import HFModelConfig, RolloutConfig

from astuner_cpu.decoder import Decoder, Request
from astuner_cpu.sampling import Sampling, draw, read_sampling
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
def model(tiny_model):
    """The tiny model, made less sure of itself, so that every way to sample has something to choose from."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        model.model.norm.weight.mul_(0.25)
    return model


def request(prompt, *, seed=0, **how):
    how = {"max_tokens": 12, **how}
    return Request(list(prompt), Sampling(**how), torch.Generator().manual_seed(seed))


def decode(model, requests, *, max_rows=64, max_prefill_tokens=4096, late=()):
    """Decode to the end; ``late`` joins after three steps."""
    decoder = Decoder(model, max_rows=max_rows, max_prefill_tokens=max_prefill_tokens)
    for one in requests:
        decoder.add(one)
    finished = []
    for step in range(500):
        if step == 3:
            for one in late:
                decoder.add(one)
        finished += decoder.step()
        if len(finished) == len(requests) + len(late):
            return finished
    raise AssertionError("the decoder never ends")


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
def test_logprobs_are_those_of_the_distribution_that_was_drawn_from(model, way):
    requests = [request(prompt, seed=i, **WAYS[way]) for i, prompt in enumerate(PROMPTS)]
    late = [request(prompt, seed=50 + i, **WAYS[way]) for i, prompt in enumerate(PROMPTS)]
    for one in decode(model, requests, late=late):
        assert len(one.tokens) == len(one.logprobs) == 12
        assert one.logprobs == pytest.approx(expected(model, one.prompt, one.tokens, one.sampling), abs=2e-5)


def test_tokens_come_as_often_as_their_probability_says():
    logits = torch.tensor([1.0, 0.5, 0.0, -1.0, -3.0])
    generator = torch.Generator().manual_seed(3)
    sampling = Sampling(max_tokens=1, temperature=0.8, top_k=4, top_p=0.95)
    drawn = [draw(logits, sampling, generator) for _ in range(20_000)]
    for token in range(5):
        times = sum(t == token for t, _ in drawn)
        said = {round(logprob, 6) for t, logprob in drawn if t == token}
        assert len(said) == (token < 3)  # the fourth is outside top_p, the fifth outside top_k
        if said:
            probability = torch.tensor(said.pop()).exp().item()
            assert times / 20_000 == pytest.approx(probability, abs=4 * (probability / 20_000) ** 0.5)


@pytest.mark.parametrize("limits", [{}, {"max_rows": 2}, {"max_prefill_tokens": 1}])
def test_a_request_is_the_same_alone_and_among_others(model, limits):
    ways = [{"max_tokens": 3 + 7 * (i % 3), "temperature": 0.5 + i / 4} for i in range(len(PROMPTS))]
    alone = [decode(model, [request(p, seed=i, **ways[i])])[0] for i, p in enumerate(PROMPTS)]
    together = [request(p, seed=i, **ways[i]) for i, p in enumerate(PROMPTS)]
    decode(model, together[:3], late=together[3:], **limits)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)


def test_seeds_repeat_a_generation_and_differ_from_one_another(model):
    first, again, other = decode(model, [request([1, 40, 41], seed=seed) for seed in (4, 4, 5)])
    assert first.tokens == again.tokens != other.tokens


def test_a_stop_token_ends_it_and_stays(model):
    free = decode(model, [request([1, 40, 41], seed=4)])[0]
    stop = free.tokens[5]
    cut = decode(model, [request([1, 40, 41], seed=4, stop=frozenset({stop}))])[0]
    assert cut.tokens == free.tokens[: free.tokens.index(stop) + 1]


def test_a_stop_string_ends_it_with_the_token_that_completes_it(model):
    free = decode(model, [request([1, 40, 41], seed=4)])[0]
    cut = request([1, 40, 41], seed=4, stop_strings=(f"<{free.tokens[5]}>",))
    cut.decode = lambda tokens: "".join(f"<{token}>" for token in tokens)
    assert decode(model, [cut])[0].tokens == free.tokens[: free.tokens.index(free.tokens[5]) + 1]
    assert cut.stopped


def test_parameters_are_read_by_vllms_names():
    eos = frozenset({STOP})

    def read(given, room=100):
        return read_sampling(given, eos=eos, default_tokens=48, room=room)

    full = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "stop_token_ids": [9], "logprobs": True}
    assert read({**full, "max_tokens": 5, "repetition_penalty": 1.0}) == Sampling(
        max_tokens=5, temperature=0.5, top_p=0.9, top_k=7, seed=3, stop=frozenset({STOP, 9})
    )
    assert read({"stop": "END"}).stop_strings == ("END",)
    assert read({"stop": ["a", "b"]}).stop_strings == ("a", "b")
    assert read({}) == Sampling(max_tokens=48, stop=eos)
    assert read({"max_tokens": 500}, room=4).max_tokens == 4
    assert read({"ignore_eos": True}).stop == frozenset()
    with pytest.raises(ValueError, match="does not know the sampling parameter 'min_p'"):
        read({"min_p": 0.1})
    with pytest.raises(ValueError, match="repetition_penalty"):
        read({"repetition_penalty": 1.2})


# ------------------------------------------------------------------------------------------------- as VERL talks to it


def server_on(folder, **rollout):
    rollout = {"prompt_length": 64, "response_length": 32, "max_model_len": 256, "load_format": "auto", **rollout}
    return HFServer(RolloutConfig(name="hf_cpu", **rollout), HFModelConfig(path=str(folder), use_remove_padding=False))


@pytest.fixture
def server(tiny_model):
    return server_on(tiny_model)


def ask(server, prompt=(1, 40, 41), **how):
    how = {"logprobs": True, "ignore_eos": True, **how}
    return server.generate(prompt_ids=list(prompt), sampling_params=how, request_id="r")


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_it_answers_as_verls_servers_do(server, model):
    async def talk():
        await server.set_global_steps(7)
        return await asyncio.gather(ask(server, max_tokens=5), ask(server, max_tokens=5, logprobs=False))

    said, silent = asyncio.run(talk())
    assert (len(said.token_ids), len(said.log_probs), said.stop_reason) == (5, 5, "completed")
    assert said.extra_fields == {"global_steps": 7}
    assert silent.log_probs is None


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
        running = [asyncio.create_task(ask(server, [7] * n, max_tokens=200)) for n in (3, 9)]
        await until(lambda: server._serving._decoder._rows)
        report = await server.abort_all_requests()
        stopped = [await task for task in running]
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
        decoder = server._serving._decoder
        alone = await ask(server, seed=3, max_tokens=40)
        goes = asyncio.create_task(ask(server, [7] * 20, max_tokens=200))
        stays = asyncio.create_task(ask(server, seed=3, max_tokens=40))
        await until(lambda: len(decoder._rows) == 2)
        goes.cancel()
        with pytest.raises(asyncio.CancelledError):
            await goes
        output = await stays
        assert decoder._rows == []
        return alone, output

    alone, output = asyncio.run(talk())
    assert output.token_ids == alone.token_ids


def test_weights_change_between_requests_only(server):
    async def talk():
        before = await ask(server, seed=3, max_tokens=60)
        weights = {name: tensor * 0.5 for name, tensor in server._model.state_dict().items()}
        running = asyncio.create_task(ask(server, seed=3, max_tokens=60))
        await until(lambda: server._serving._decoder._rows)
        update = asyncio.create_task(server.load_weights(weights, global_steps=5))
        await asyncio.sleep(0)
        later = asyncio.create_task(ask(server, seed=3, max_tokens=60))
        during, updates, after = await asyncio.gather(running, update, later)
        assert during.token_ids == before.token_ids
        assert during.log_probs == pytest.approx(before.log_probs, abs=2e-5)
        assert during.extra_fields == {"global_steps": 0}
        assert updates == 1
        assert after.token_ids != before.token_ids
        assert after.extra_fields == {"global_steps": 5}
        sampling = Sampling(max_tokens=60)
        said = expected(server._model, [1, 40, 41], list(after.token_ids), sampling)
        assert after.log_probs == pytest.approx(said, abs=2e-5)

    asyncio.run(talk())


def test_weights_that_do_not_fit_change_nothing(server):
    whole = {name: torch.zeros_like(tensor) for name, tensor in server._model.state_dict().items()}
    norm = "model.norm.weight"
    cases = {
        "model.norm.weight is missing": {name: tensor for name, tensor in whole.items() if name != norm},
        "nobody.weight has no place": {**whole, "nobody.weight": torch.zeros(1)},
        r"model.norm.weight is \(3,\)": {**whole, norm: torch.zeros(3)},
    }
    before = {name: tensor.clone() for name, tensor in server._model.state_dict().items()}
    for message, weights in cases.items():
        with pytest.raises(ValueError, match=message):
            asyncio.run(server.load_weights(weights))
    assert server.updates == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in server._model.state_dict().items())
    without_the_tied_head = {name: tensor for name, tensor in whole.items() if name != "lm_head.weight"}
    assert asyncio.run(server.load_weights(without_the_tied_head)) == 1
    assert not server._model.lm_head.weight.any()


def test_a_step_that_fails_is_told_to_whoever_waits_and_the_next_request_works(server, monkeypatch):
    async def talk():
        forward = server._model.forward
        monkeypatch.setattr(server._model, "forward", lambda *_, **__: 1 / 0)
        failed = await asyncio.gather(*(ask(server) for _ in range(2)), return_exceptions=True)
        monkeypatch.setattr(server._model, "forward", forward)
        return failed, await ask(server, max_tokens=3)

    failed, after = asyncio.run(talk())
    assert [type(error) for error in failed] == [ZeroDivisionError] * 2
    assert len(after.token_ids) == 3


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

    from astuner_verl.platforms import platform_settings

    settings = platform_settings({"VERL_PLATFORM": "cpu"})
    assert platform_settings({}) == {}
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer")
    for key, value in settings.items():
        place, _, name = key.lstrip("+").rpartition(".")
        assert (name in list(OmegaConf.select(config, place) or {})) != key.startswith("+"), key
        OmegaConf.update(config, key.lstrip("+"), value, force_add=key.startswith("+"))
    assert config.ray_kwargs.ray_init.num_gpus == config.trainer.n_gpus_per_node
