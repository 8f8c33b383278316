"""vLLM itself, on a CPU, as the engine of ASTuner: its tokens, log-probabilities, ends, prefixes and adapters.

``make test-vllm`` runs this; `tests/VLLM.md` says what came of it, with the figures that are printed here.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from astuner.contracts.errors import ModelFailed
from astuner.contracts.types import FinishReason, Generation, SamplingParams
from astuner_debug.engine import OpenAICompletionsEngine
from astuner_models.serving import load_tokenizer
from tests.checker.folder import Folder, episode
from tests.checker.rules import check

from .conftest import CALLED_VLLM, MODEL, Server, environment, free_port, serving

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "math_agent" / "math_agent.yaml"
TEXTS = (
    "Each of 9 bags holds 6 cards. How many does Sam carry?",
    "What is 12 + 30?",
    "Zoe shares 10 books among 2 friends. How many for each? Write the answer into a box, and nothing else.",
)
FLOAT32 = 1e-4
"""Nats, at most, between log-probabilities of vLLM and of transformers, both in float32."""
BFLOAT16 = 0.5, 0.02
"""Nats, at most and on average, between vLLM in bfloat16 and transformers in either type."""


@cache
def model(dtype: torch.dtype = torch.float32) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).eval()


@cache
def tokenizer() -> Any:
    return load_tokenizer(str(MODEL))


def connected(server: Server, name: str = str(MODEL)) -> OpenAICompletionsEngine:
    engine = OpenAICompletionsEngine(server.url, paths=[name])
    assert (engine.model, engine.note) == (name, "")
    return engine


def generate(engine: OpenAICompletionsEngine, sampling: SamplingParams, texts: Sequence[str] = TEXTS) -> list[Any]:
    """One generation for each text, all at once."""

    async def all_at_once() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(tokenizer().encode(text), sampling) for text in texts))

    return asyncio.run(all_at_once())


def differences(
    which: Any, made: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]], temperature: float = 1.0
) -> torch.Tensor:
    """Of recorded log-probabilities from ``which`` model's, token by token, of the same ids; absolute, in nats."""
    found = []
    for prompt, response, logprobs in made:
        with torch.inference_mode():
            logits = which(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
        theirs = (logits / temperature).log_softmax(-1)
        theirs = theirs.gather(1, torch.tensor(list(response))[:, None])[:, 0]
        found.append((theirs - torch.tensor(list(logprobs))).abs())
    return torch.cat(found)


def parts(made: Sequence[Generation]) -> list[tuple[Sequence[int], Sequence[int], Sequence[float]]]:
    return [(one.prompt_ids, one.response_ids, one.logprobs) for one in made]


def figures(what: str, found: torch.Tensor) -> None:
    print(f"\n{what}: {len(found)} tokens, max {found.max():.2g}, mean {found.mean():.2g} nats")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_its_log_probabilities_are_those_of_transformers(server: Server, temperature: float) -> None:
    made = generate(connected(server), SamplingParams(max_tokens=120, temperature=temperature), TEXTS * 8)
    assert [one.prompt_ids for one in made] == [tokenizer().encode(text) for text in TEXTS * 8]
    found = differences(model(), parts(made), temperature)
    figures(f"float32, temperature {temperature}", found)
    assert found.max() < FLOAT32
    other = differences(model(), parts(made), 1.3)  # the measure can tell
    assert other.max() > 100 * FLOAT32


def test_a_seed_repeats_a_generation_and_greedy_ones_are_transformers(server: Server) -> None:
    engine = connected(server)
    seeded = SamplingParams(max_tokens=30, seed=5)
    first, second, other = (
        [list(one.response_ids) for one in generate(engine, sampling)]
        for sampling in (seeded, seeded, SamplingParams(max_tokens=30, seed=6))
    )
    assert first == second != other
    (made,) = generate(engine, SamplingParams(max_tokens=12, temperature=0), TEXTS[:1])
    with torch.inference_mode():
        logits = model()(torch.tensor([[*made.prompt_ids, *made.response_ids]])).logits[0]
    assert logits[len(made.prompt_ids) - 1 : -1].argmax(-1).tolist() == list(made.response_ids)


def test_stop_strings_and_stop_tokens_end_it_and_stay_in_it(server: Server) -> None:
    engine = connected(server)
    (free,) = generate(engine, SamplingParams(max_tokens=40, seed=7), TEXTS[:1])
    text = tokenizer().decode(free.response_ids)
    word = text[len(text) // 3 : len(text) // 3 + 2]
    (stopped,) = generate(engine, SamplingParams(max_tokens=40, seed=7, stop=(word,)), TEXTS[:1])
    ids = list(stopped.response_ids)
    assert stopped.finish_reason is FinishReason.STOP
    assert ids == list(free.response_ids)[: len(ids)]
    assert word in tokenizer().decode(ids)
    assert word not in tokenizer().decode(ids[:-1])
    end = free.response_ids[len(free.response_ids) // 2]
    (stopped,) = generate(engine, SamplingParams(max_tokens=40, seed=7, stop_token_ids=(end,)), TEXTS[:1])
    assert list(stopped.response_ids) == list(free.response_ids)[: list(free.response_ids).index(end) + 1]
    (cut,) = generate(engine, SamplingParams(max_tokens=3, seed=7), TEXTS[:1])
    assert cut.finish_reason is FinishReason.LENGTH


def test_prefixes_are_kept_and_do_not_change_log_probabilities(server: Server) -> None:
    engine = connected(server)
    text = " ".join(TEXTS * 4) + " "  # two blocks of what is kept, 128 tokens each on a CPU, and less than the context
    sampling = SamplingParams(max_tokens=20, temperature=0)
    generate(engine, sampling, [text])
    before = server.count("prefix_cache_hits_total")
    again = generate(engine, sampling, [text, text + "Well?"])
    assert server.count("prefix_cache_hits_total") >= before + 2 * 128
    assert differences(model(), parts(again)).max() < FLOAT32


def test_a_client_that_goes_away_ends_its_generations(server: Server) -> None:
    engine = connected(server)
    body = {"model": str(MODEL), "prompt": [5] * 8, "max_tokens": 480, "ignore_eos": True, "n": 8}
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
    before = server.count("generation_tokens_total")
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    _until(lambda: server.count("num_requests_running") > 0)
    connection.close()
    one_more = SamplingParams(max_tokens=4)  # what runs is counted where something goes on
    _until(lambda: generate(engine, one_more, TEXTS[:1]) and server.count("num_requests_running") == 0)
    assert server.count("generation_tokens_total") - before < 8 * 480


def _until(holds: Any) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        if time.monotonic() > deadline:
            pytest.fail("not within a minute")
        time.sleep(0.01)


def _ask(server: Server, route: str, body: dict[str, str]) -> None:
    data = json.dumps(body).encode()
    request = urllib.request.Request(server.url + route, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request):
        pass


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
def test_an_adapter_is_loaded_while_it_runs_and_goes_again(server: Server, tmp_path: Path) -> None:
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")).eval()
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:  # zero at first, and then an adapter is none
            torch.nn.init.normal_(weight, std=0.05)
    adapted.save_pretrained(tmp_path / "adapter")
    _ask(server, "/load_lora_adapter", {"lora_name": "mine", "lora_path": str(tmp_path / "adapter")})
    sampling = SamplingParams(max_tokens=60)
    theirs, plain = generate(connected(server, "mine"), sampling), generate(connected(server), sampling)
    found = differences(adapted, parts(theirs))
    figures("float32, an adapter of rank 8", found)
    assert found.max() < FLOAT32
    assert differences(model(), parts(theirs)).max() > 100 * FLOAT32  # the adapter matters
    assert differences(model(), parts(plain)).max() < FLOAT32  # to nobody else
    gone = connected(server, "mine")
    _ask(server, "/unload_lora_adapter", {"lora_name": "mine"})
    with pytest.raises(ModelFailed, match="404"):
        generate(gone, sampling)
    assert differences(model(), parts(generate(connected(server), sampling))).max() < FLOAT32


def test_bfloat16_is_as_far_from_transformers_as_is_said(tmp_path: Path) -> None:
    with serving(tmp_path / "vllm.log", "--dtype", "bfloat16") as server:
        made = parts(generate(connected(server), SamplingParams(max_tokens=120), TEXTS * 8))
    for dtype in (torch.float32, torch.bfloat16):
        found = differences(model(dtype), made)
        figures(f"bfloat16, and transformers in {dtype}", found)
        assert FLOAT32 < found.max() < BFLOAT16[0]
        assert found.mean() < BFLOAT16[1]


def _run(folder: Path, *overrides: str, **variables: str) -> Path:
    """A run of twelve episodes of the math agent, so hot that replies are seldom what the tokenizer makes of them."""
    told = [f"astuner.model.path={MODEL}", "astuner.debug.debug_first_n_tasks=12", "astuner.debug.debug_max_parallel=6"]
    told += ["astuner.rollout.temperature=1.3", "astuner.rollout.max_model_len=480", *overrides]
    command = [sys.executable, "-m", "astuner", "run", str(EXAMPLE), "--backbone", "debug"]
    bin_folder = str(Path(sys.executable).parent)
    done = subprocess.run(
        [*command, "--run-dir", str(folder / "run"), *told],
        env={**environment(PATH=f"{bin_folder}{os.pathsep}{os.environ['PATH']}"), **variables},
        capture_output=True,
        text=True,
        timeout=280,
    )
    log = folder / "run.debug" / "vllm.log"
    said = log.read_text(errors="replace")[-3000:] if log.exists() else ""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{said}"
    assert "log-probabilities from before" not in done.stderr
    return folder / "run.debug"


def _certify(run: Path) -> None:
    report = check(run, MODEL)
    assert [str(problem) for problem in report.problems] == []
    assert report.counts["episodes"] == 12
    folder = Folder(run, MODEL)
    made = []
    for found in (episode(row) for _, row in folder.rows()):
        for turn in found.turns:
            prompt: list[int] = []
            for one in found.chain(turn):
                prompt += one.tail + (one.response if one is not turn else [])
            assert len(prompt) == turn.prompt_tokens
            made.append((prompt, turn.response, turn.logprobs))
    folder.close()
    found = differences(model(), made, 1.3)
    figures(f"a run of the math agent, {report.counts['turns']} turns, float32", found)
    assert found.max() < FLOAT32


def test_what_the_math_agent_said_to_a_running_vllm_is_exact(server: Server, tmp_path: Path) -> None:
    run = _run(tmp_path, "astuner.debug.engine=openai", f"astuner.debug.base_url={server.url}")
    _certify(run)


def test_a_vllm_that_the_debug_backbone_starts_is_exact_and_ends(tmp_path: Path) -> None:
    port = free_port()
    told = "astuner.debug.engine=vllm", f"astuner.debug.debug_vllm_port={port}", "astuner.model.dtype=float32"
    _certify(_run(tmp_path, *told, PYTHONPATH=str(CALLED_VLLM)))
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection("127.0.0.1", port, timeout=5).connect()
