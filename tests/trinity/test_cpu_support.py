"""The CPU engine of astuner-trinity-cpu over real HTTP, and the hooks that put it in vLLM's place. No Ray."""

import asyncio
import copy
import importlib.metadata
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from astuner.contracts.errors import ContextOverflow
from astuner.contracts.types import FinishReason, SamplingParams
from astuner_cpu.engine import CpuEngine
from astuner_debug.engine import OpenAICompletionsEngine
from astuner_http.client import HttpError, JsonClient
from astuner_trinity_cpu import hooks
from astuner_trinity_cpu.openai_server import OpenAIServer, bind, url
from astuner_trinity_cpu.settings import platform_settings

STOP = 2
"""The model's ``<|im_end|>``."""
PROMPTS = [[1, 40, 41, 42], [1, 50], list(range(60, 91)), [7] * 13, [1, 40, 41], [9, 8, 7, 6, 5, 4]]
CONTEXT = 256


class Served:
    """An engine with its server, on an event loop of its own."""

    def __init__(self, folder):
        self.engine = CpuEngine(folder, max_model_len=CONTEXT)
        self.tokenizer = self.engine.tokenizer
        with torch.no_grad():  # less sure of itself, so that there is something to choose from
            self.engine.model.model.norm.weight.mul_(0.25)
        self.socket = bind("127.0.0.1")
        self.url = f"{url(self.socket)}/v1"
        self.raw = JsonClient(self.url, timeout=60.0)
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self):
        self._thread.start()
        self.client = OpenAICompletionsEngine(self.url)
        return self

    def __exit__(self, *_):
        self.raw.close()
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()
        self.engine.engine.close()

    async def _serve(self):
        async with OpenAIServer(self.engine, name="the/model").serving(self.socket):
            await self._end.wait()

    @property
    def steps(self):
        """How often every request of the batch was given a token."""
        return self.engine.engine.stats().decode_steps

    @property
    def rows(self):
        """The prompts of the requests in the batch."""
        return [request.prompt for request in list(self.engine.engine._scheduler._decoding.values())]

    def load(self, weights, version):
        asyncio.run_coroutine_threadsafe(self.engine.load(weights, version, at_once=True), self._loop).result(60)

    def ask(self, prompt, **sampling):
        return asyncio.run(self.client.generate(prompt, SamplingParams(**{"max_tokens": 12, **sampling})))

    def complete(self, **body):
        body = {"prompt": [1, 40, 41], "max_tokens": 8, "return_token_ids": True, "logprobs": 0, **body}
        return self.raw.post("/completions", body)

    def refusal(self, route="/completions", **body):
        with pytest.raises(HttpError) as caught:
            self.raw.post(route, body)
        assert caught.value.status == 400
        return caught.value.refusal["error"]["message"]


@pytest.fixture
def served(tiny_model):
    with Served(tiny_model) as served:
        yield served


def log_distribution(model, ids, temperature=1.0):
    """[len(ids), V]: of each next token, by a forward pass of its own in float64."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    return torch.log_softmax(logits / temperature, -1)


def chosen(logprobs, prompt, response):
    return [logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(response)]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)


# ---------------------------------------------------------------------------------------------- token ids over HTTP


def test_greedy_tokens_are_those_of_transformers_and_the_logprobs_those_of_a_forward_pass(served):
    model = served.engine.model
    ends = set()
    for prompt in PROMPTS:
        said = served.ask(prompt, temperature=0.0, max_tokens=60)
        with torch.no_grad():
            known = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=60, pad_token_id=0)
        assert said.response_ids == known[0, len(prompt) :].tolist()
        exact = chosen(log_distribution(model, [*prompt, *said.response_ids]), prompt, said.response_ids)
        assert said.logprobs == pytest.approx(exact, abs=2e-5)
        stopped = said.response_ids[-1] == STOP
        assert said.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        ends.add(stopped)
    assert served.client.max_model_len == CONTEXT
    assert True in ends


def test_sampled_logprobs_are_those_of_the_distribution_that_was_drawn_from(served):
    for seed, prompt in enumerate(PROMPTS):
        warm = served.ask(prompt, temperature=1.7, seed=seed, stop_token_ids=())
        exact = log_distribution(served.engine.model, [*prompt, *warm.response_ids], 1.7)
        assert warm.logprobs == pytest.approx(chosen(exact, prompt, warm.response_ids), abs=2e-5)
        cut = served.ask(prompt, temperature=0.8, top_k=3, seed=seed)
        exact = log_distribution(served.engine.model, [*prompt, *cut.response_ids], 0.8)
        for i, (token, logprob) in enumerate(zip(cut.response_ids, cut.logprobs, strict=True), len(prompt) - 1):
            best = exact[i].topk(3)
            assert token in best.indices
            assert logprob == pytest.approx((exact[i, token] - best.values.logsumexp(0)).item(), abs=2e-5)


def test_seeds_and_stop_tokens_are_honoured(served):
    free = served.ask(PROMPTS[0], seed=4, max_tokens=30)
    assert served.ask(PROMPTS[0], seed=4, max_tokens=30).response_ids == free.response_ids
    assert served.ask(PROMPTS[0], seed=5, max_tokens=30).response_ids != free.response_ids
    stop = free.response_ids[5]
    cut = served.ask(PROMPTS[0], seed=4, max_tokens=30, stop_token_ids=(stop,))
    assert cut.response_ids == free.response_ids[: free.response_ids.index(stop) + 1]
    assert cut.finish_reason is FinishReason.STOP


def test_several_responses_to_one_prompt_differ_and_one_request_says_all_of_them(served):
    answer = served.complete(n=4, seed=1, temperature=1.5)
    responses = [tuple(choice["token_ids"]) for choice in answer["choices"]]
    assert len(set(responses)) == 4
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[1, 40, 41]] * 4
    made = sum(map(len, responses))
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": made, "total_tokens": 3 + made}
    for choice in answer["choices"]:
        assert choice["text"] == served.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    silent = served.complete(logprobs=None, return_token_ids=False)["choices"][0]
    assert (silent["logprobs"], silent["token_ids"], silent["prompt_token_ids"]) == (None, None, None)


def test_the_context_is_never_left(served):
    assert len(served.ask([5] * 250, max_tokens=200).response_ids) <= 6
    with pytest.raises(ContextOverflow, match="256 tokens leaves no room in a context of 256"):
        served.ask([5] * CONTEXT)
    assert "256 tokens leaves no room in a context of 256" in served.refusal(prompt=[5] * CONTEXT)


def test_what_would_be_ignored_is_refused_with_its_name(served):
    for wrong in ([], [5, 512], [5, -1], [5, "a"], [True]):
        assert "tokens from 0 to 511" in served.refusal(prompt=wrong)
    assert "must be a list of token IDs or a string" in served.refusal(prompt=None)
    for name, value in {"stream": True, "echo": True, "logit_bias": {"5": 1}}.items():
        assert repr(name) in served.refusal(prompt=[5], **{name: value})
    assert "'min_p'" in served.refusal(prompt=[5], min_p=0.1)
    assert "repetition_penalty" in served.refusal(prompt=[5], repetition_penalty=1.1)
    assert "logprobs: 0" in served.refusal(prompt=[5], logprobs=5)
    harmless = {"stream": False, "stop": [], "min_p": 0.0, "presence_penalty": 0.0, "best_of": 1, "user": "me"}
    assert served.complete(**harmless)["choices"][0]["token_ids"]
    assert not served.engine._running


def test_it_listens_on_the_address_that_it_was_given_and_nowhere_else(served):
    assert served.socket.getsockname()[0] == "127.0.0.1"
    assert served.url.startswith("http://127.0.0.1:")


# ------------------------------------------------------------------------------------------------------ many at once


def test_requests_are_decoded_together_and_answered_as_if_alone(served):
    alone = [served.ask(prompt, seed=i, max_tokens=40, temperature=1.2) for i, prompt in enumerate(PROMPTS)]
    before = served.steps
    assert before >= sum(len(one.response_ids) for one in alone) - len(alone)

    async def together():
        ask = served.client.generate
        how = [SamplingParams(max_tokens=40, temperature=1.2, seed=i) for i in range(len(PROMPTS))]
        return await asyncio.gather(*(ask(p, h) for p, h in zip(PROMPTS, how, strict=True)))

    for one, other in zip(alone, asyncio.run(together()), strict=True):
        assert one.response_ids == other.response_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)
    # joining takes a few steps, on a busy machine some more
    assert served.steps - before < 0.6 * before


def test_a_client_that_goes_away_takes_its_request_along_and_no_other(served):
    async def talk():
        stays = asyncio.create_task(served.client.generate(PROMPTS[1], SamplingParams(max_tokens=80, seed=3)))
        host, port = served.socket.getsockname()
        _, goes = await asyncio.open_connection(host, port)
        body = json.dumps({"prompt": [7] * 20, "max_tokens": 230, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        goes.write(head.encode() + body)
        await until(lambda: [7] * 20 in served.rows)
        assert await asyncio.to_thread(load) >= 1
        goes.transport.abort()
        await until(lambda: [7] * 20 not in served.rows)
        return await stays

    base = JsonClient(served.url.removesuffix("/v1"), timeout=60.0)

    def load():
        return base.get("/load")["server_load"]

    alone = served.ask(PROMPTS[1], max_tokens=80, seed=3)
    reached = served.steps
    assert asyncio.run(talk()).response_ids == alone.response_ids
    assert served.steps - reached < 230  # the one that went was not generated to its end
    assert load() == 0
    base.close()


# ------------------------------------------------------------------------------------------------------------ weights


def test_new_weights_take_effect_between_two_tokens_and_requests_go_on(served):
    old = copy.deepcopy(served.engine.model)
    new = {name: tensor * 0.5 for name, tensor in old.state_dict().items()}
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(served.complete, prompt=prompt, max_tokens=200, ignore_eos=True, seed=i, temperature=1.3)
            for i, prompt in enumerate(PROMPTS[:2])
        ]
        asyncio.run(until(lambda: len(served.rows) == 2))
        reached = served.steps
        asyncio.run(until(lambda: served.steps > reached + 6))
        served.load(new, 7)
        answers = [one.result()["choices"][0] for one in running]
    assert served.engine.version == 7
    for prompt, answer in zip(PROMPTS[:2], answers, strict=True):
        response, said = answer["token_ids"], answer["logprobs"]["token_logprobs"]
        ids = [*prompt, *response]
        before = chosen(log_distribution(old, ids, 1.3), prompt, response)
        after = chosen(log_distribution(served.engine.model, ids, 1.3), prompt, response)
        is_old = [abs(a - b) < 2e-5 for a, b in zip(said, before, strict=True)]
        is_new = [abs(a - b) < 2e-5 for a, b in zip(said, after, strict=True)]
        change = next(i for i, (o, n) in enumerate(zip(is_old, is_new, strict=True)) if n and not o)
        assert 5 < change < 200
        assert all(is_old[:change])
        assert all(is_new[change:])


def test_weights_that_do_not_fit_change_nothing_and_disturb_nobody(served):
    model = served.engine.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    alone = served.ask(PROMPTS[0], seed=2, max_tokens=100)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(served.ask, PROMPTS[0], seed=2, max_tokens=100)
        asyncio.run(until(lambda: served.rows))
        with pytest.raises(ValueError, match=r"model.norm.weight is missing"):
            served.load({name: tensor * 2 for name, tensor in before.items() if name != "model.norm.weight"}, 9)
        assert running.result().response_ids == alone.response_ids
    assert served.engine.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# ------------------------------------------------------------------------------------------------------ as Trinity does


def test_chat_for_a_judge(served):
    import openai

    messages = [{"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]}]
    ids = served.tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 2?"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    with openai.OpenAI(base_url=served.url, api_key="EMPTY") as client:
        answer = client.chat.completions.create(
            model="the/model",
            messages=messages,
            temperature=0.0,
            max_completion_tokens=20,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
        with pytest.raises(openai.BadRequestError, match="text only"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": picture}])
    said = served.ask(ids, temperature=0.0, max_tokens=20)
    choice = answer.choices[0]
    assert answer.prompt_token_ids == ids
    assert choice.token_ids == said.response_ids
    assert choice.message.content == served.tokenizer.decode(said.response_ids, skip_special_tokens=True)
    assert [token.logprob for token in choice.logprobs.content] == pytest.approx(said.logprobs, abs=2e-5)
    assert choice.finish_reason == ("stop" if said.response_ids[-1] == STOP else "length")


@pytest.fixture
def rollout_model(tiny_model, tmp_path):
    from trinity.common.config import InferenceModelConfig
    from trinity.common.models.vllm_model import vLLMRolloutModel

    config = InferenceModelConfig(
        model_path=str(tiny_model),
        max_model_len=CONTEXT,
        max_response_tokens=20,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        repetition_penalty=1.0,
        checkpoint_job_dir=str(tmp_path),
    )
    return vLLMRolloutModel(config)


def test_trinity_gets_new_weights_into_the_class_it_takes_for_vllms(rollout_model, tmp_path):
    from trinity.common.constants import SyncMethod

    async def talk():
        await rollout_model.prepare()
        assert rollout_model.get_api_server_url() is None  # not asked for
        engine = rollout_model._engine
        half = engine.model.state_dict()["model.norm.weight"] * (0.5 + 2**-20)  # not a number of bfloat16
        for version, place in ((4, "actor"), (5, "actor/huggingface")):  # for a sync only; a full checkpoint
            folder = tmp_path / f"global_step_{version}" / place
            engine.model.save_pretrained(folder)
            (file,) = folder.glob("*.safetensors")
            save_file({**load_file(file), "model.norm.weight": half * version}, file)
            assert await rollout_model.sync_model_weights(version, SyncMethod.CHECKPOINT) == version
            assert rollout_model.get_model_version() == version
            assert torch.equal(engine.model.state_dict()["model.norm.weight"], half * version)
        with pytest.raises(ValueError, match="sync_method: memory"):
            await rollout_model.sync_model_weights(6, SyncMethod.NCCL)
        assert rollout_model.get_model_version() == 5
        await rollout_model.shutdown()

    asyncio.run(talk())


def test_a_default_that_would_be_ignored_is_refused_before_the_first_request(tiny_model):
    with pytest.raises(ValueError, match="repetition_penalty"):
        CpuEngine(tiny_model, defaults={"repetition_penalty": 1.2})


# -------------------------------------------------------------------------------------------------------------- hooks


def run(code, **env):
    import os

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )


def test_without_the_hooks_there_is_no_vllm_anywhere():
    assert "No module named 'vllm'" in run("import vllm").stderr


def test_the_hooks_import_nothing_heavy_and_stand_in_for_vllm():
    code = """
import sys
from astuner_trinity_cpu import hooks
hooks.setup()
hooks.setup()
assert not {"torch", "ray", "trinity", "verl", "transformers"} & sys.modules.keys()
from vllm.entrypoints.chat_utils import parse_chat_messages
import importlib.util
assert importlib.util.find_spec("vllm").origin is None
try:
    parse_chat_messages([])
except RuntimeError as e:
    assert "vLLM is not installed" in str(e)
else:
    raise AssertionError
try:
    import vllm.distributed
except ModuleNotFoundError:
    print("fine")
"""
    shown = run(code)
    assert shown.stdout == "fine\n", shown.stderr


def test_verl_runs_on_the_cpu_whether_it_was_imported_before_or_after():
    code = """
import {first}
{setup}
import torch
from verl.utils import device
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
assert device.get_device_id() == torch.device("cpu")
assert device.get_torch_device().mem_get_info()[0] > 0
engine = EngineRegistry.get_engine_cls("language_model", "fsdp2")
assert issubclass(engine, transformer_impl.FSDPEngineWithLMHead)
weight = torch.tensor([[1.0 + 2**-20]])
module = torch.nn.Linear(1, 1, bias=False)
module.weight.data = weight
names_and_tensors, _ = engine.get_per_tensor_param(type("E", (), {{"module": module}})())
assert dict(names_and_tensors)["weight"].equal(weight)
from verl.utils.attention_utils import pad_input, unpad_input
mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
ids = torch.arange(6).reshape(2, 3, 1)
packed, where, *_ = unpad_input(ids, mask)
assert packed[:, 0].tolist() == [1, 2, 3, 4, 5]
assert torch.equal(pad_input(packed, where, 2, 3), ids)
print("fine")
"""
    setup = "from astuner_trinity_cpu import hooks; hooks.setup()"
    for first in ("sys", "verl.utils.device"):
        shown = run(code.format(first=first, setup=setup))
        assert shown.stdout.endswith("fine\n"), shown.stderr


def test_other_versions_are_refused_with_what_to_type(monkeypatch):
    monkeypatch.setattr(hooks.wrapt, "register_post_import_hook", lambda *_: pytest.fail("it changes something"))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.1" if name == "verl" else "0.6.0")
    with pytest.raises(RuntimeError, match=r"verl 0\.8\.0, but found 0\.9\.1.*pip install verl==0\.8\.0"):
        hooks.setup.__wrapped__()


def test_every_key_of_the_settings_is_one_that_trinity_has_or_takes():
    from omegaconf import OmegaConf
    from trinity.common.config import Config

    (point,) = importlib.metadata.entry_points(group="astuner_trinity.platforms", name="cpu")
    platform = point.load()()
    assert platform == platform_settings()
    config = OmegaConf.structured(Config)
    for key, value in platform["settings"].items():
        OmegaConf.update(config, key.removeprefix("?"), value)  # raises for a key that Trinity's schema has not
    assert config.trainer.trainer_config.actor.fsdp_config.mixed_precision.param_dtype == "fp32"
    module, _, name = platform["worker_setup"].rpartition(".")
    assert (module, getattr(hooks, name)) == (hooks.__name__, hooks.setup)
