"""Measure a real language model: GRPO steps against TRL, generation against transformers' `generate` and the machine.

The model is SmolLM2-135M, or the model in the folder ASTUNER_BENCHMARK_MODEL. Set ASTUNER_BENCHMARK_VLLM to the
Python interpreter of an environment with vLLM to add vLLM to the tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from astuner.contracts.types import SamplingParams
from astuner_local.tiny.problems import distinct
from astuner_local.tiny.transcripts import TOOLS, transcript
from benchmarks.local_side import REPOSITORY, StepCount, make_engine
from benchmarks.machine import product_flops, read_bandwidth
from benchmarks.measure import Timings, interleave
from benchmarks.models import load, real_model_folder
from benchmarks.report import Report, goal
from benchmarks.side import Side
from benchmarks.step_vs_trl import check_tokens
from benchmarks.trained import run_astuner
from benchmarks.trl_side import SETTINGS, quiet

PROMPT, NEW = 64, 48
SEQUENCES = (8, 32, 64)
GROUPS, GROUP_SIZE = 2, 8
"""With larger groups, TRL's logits of all tokens do not fit into 16 GiB together with another trainer."""
DTYPES = ("float32", "bfloat16")


def run(*, quick: bool) -> Report:
    import torch

    from astuner_local.allocator import keep_freed_memory
    from astuner_local.modeling import Dimensions, resolve_dtype

    folder = real_model_folder()
    torch.set_num_threads(1)
    keep_freed_memory()  # as every run of such a model does; it serves all sides
    model, _ = load(folder)
    dims, size = Dimensions.of(model.config), sum(p.numel() for p in model.parameters())
    dtype = str(resolve_dtype("auto", torch.device("cpu"), dims))[6:]
    del model
    repeats = 1 if quick else 3
    report = Report(
        "A real language model on a CPU: steps and generation",
        f"{Path(folder).resolve().name}, {size / 1e6:.0f} million weights, one thread. The sides take turns, in "
        f"one process when they generate and in one each when they train; medians of {repeats} repetitions; ratios "
        "are of CPU time, since neighbours disturb it less. "
        f"`model.dtype: auto` is {dtype} here.",
    )
    with quiet(), tempfile.TemporaryDirectory() as place:
        for part in (
            lambda: _rollout(report, folder, dims, dtype, repeats),
            lambda: _single_turns(report, folder, dtype, repeats),
            lambda: _tool_turns(report, Path(place), folder, dtype, repeats),
        ):
            told = len(report.parts)
            part()
            print(*report.parts[told:], sep="\n", file=sys.stderr, flush=True)  # the next takes minutes more
    return report


# --- a step -----------------------------------------------------------------------------------------------------


def _single_turns(report: Report, folder: str, dtype: str, repeats: int) -> None:
    report.heading(f"A GRPO step of single turns, {dtype}")
    report.text(
        f"{GROUPS} tasks x {GROUP_SIZE} answers of exactly {NEW} tokens, TRL's best case: equal lengths, and every "
        f"sample is trained. TRL: {SETTINGS.replace('bf16=False', f'bf16=False, the model in {dtype}')}."
    )
    _compare(report, folder, dtype, repeats, tools=False, longest=NEW, tolerance=0, wanted=2)


def _tool_turns(report: Report, place: Path, folder: str, dtype: str, repeats: int) -> None:
    report.heading(f"A GRPO step of a tool agent over two turns, {dtype}")
    report.text(
        f"{GROUPS} tasks x {GROUP_SIZE} episodes: a call of the calculator, its result, an answer. The model was "
        f"trained on {_WARM_STEPS * _CONVERSATIONS} such conversations first (`local.warm_start`) and nearly always "
        "follows the format; both sides use the template `hermes`. Every sample is trained. TRL generates its own "
        "schema for the tool, which makes its prompts a tenth longer."
    )
    model = _taught(place, folder)
    _compare(report, model, dtype, repeats, tools=True, longest=_TOOL_TOKENS, tolerance=_SAMPLED, wanted=3)


def _compare(
    report: Report, model: str, dtype: str, repeats: int, *, tools: bool, longest: int, tolerance: float, wanted: float
) -> None:
    """Measure steps of both trainers in turns and report them.

    :param longest: Token limit after the first prompt; without tools, the exact length of each answer.
    :param tolerance: Allowed relative difference between the token counts of the sides.
    :param wanted: Ratio that is the goal.
    """
    asked = {"model": model, "dtype": dtype, "tools": tools, "longest": longest}
    asked |= {"groups": GROUPS, "group_size": GROUP_SIZE}
    timings, counts = {name: Timings() for name in _TRAINERS}, {name: list[StepCount]() for name in _TRAINERS}
    with contextlib.ExitStack() as stack:
        sides = {}
        for name in _TRAINERS:
            said = json.dumps({"trainer": name, **asked})
            sides[name] = Side(sys.executable, "benchmarks.step_side", said, OMP_NUM_THREADS="1")
            stack.callback(sides[name].close)
        for number in range(_WARM_UP + repeats):
            for name in _TRAINERS[:: -1 if number % 2 else 1]:
                taken = sides[name].ask("step")
                if number >= _WARM_UP:
                    timings[name].wall.append(taken["wall"])
                    timings[name].cpu.append(taken["cpu"])
                    counts[name].append(StepCount(**taken["count"]))
    check_tokens(counts, tolerance)
    _steps_table(report, timings, counts)
    report.text(f"TRL / local: {goal(timings['TRL'].median_cpu / timings['local'].median_cpu, wanted)}.")


_TRAINERS = ("TRL", "local")
_WARM_UP = 2
"""Untimed steps of each side, in which its memory grows."""
_SAMPLED = 0.1
"""Tolerance of token counts: answers are sampled, some are long, and the episodes are few."""
_WARM_STEPS, _CONVERSATIONS = 8, 8
_TOOL_TOKENS = 112
"""Tokens after the first prompt: a call (about 35), its result (20), an answer (10), and a margin for long answers."""


def _taught(place: Path, folder: str) -> str:
    """Return the model after it learned to call the calculator and to answer, with the matching chat template."""
    rng = random.Random(0)
    problems = distinct(_WARM_STEPS * _CONVERSATIONS, 2, held_out=False)
    lines = [json.dumps({"messages": transcript(problem, rng), "tools": TOOLS}) for problem in problems]
    (place / "demonstrations.jsonl").write_text("\n".join(lines))
    agents = f"{REPOSITORY / 'benchmarks/agents.py'}->"
    astuner = {
        "model": {"path": folder, "chat_template": "hermes", "dtype": "float32"},
        "data": {"train_batch_size": 1},
        "rollout": {"workflow": f"{agents}CalculatorLoop", "num_repeat": 2, "max_response_length_in_one_turn": 48},
        "task_reader": {"type": f"{agents}Problems"},
        "trainer_common": {"total_steps": _WARM_STEPS + 1, "optim": {"lr": 0.0}},
    }
    warm = {"file": "demonstrations.jsonl", "steps": _WARM_STEPS, "conversations": _CONVERSATIONS, "lr": 5.0e-5}
    (place / "taught.yaml").write_text(yaml.safe_dump({"astuner": astuner, "local": {"warm_start": warm}}))
    for command in (
        ("run", "taught.yaml", "--backbone", "local", "--run-dir", "run"),
        ("export", "taught.yaml", "--run-dir", "run", "--to", "hf", "--out", "taught", "--no-check"),
    ):
        run_astuner(command, place / "home")
    return str(place / "taught")


def _steps_table(report: Report, timings: Mapping[str, Timings], counts: Mapping[str, Sequence[StepCount]]) -> None:
    rows = [
        (
            name,
            f"{times.median_cpu:.1f}",
            f"{times.median_wall:.1f}",
            f"{statistics.median(s.rollout_cpu for s in counts[name]):.1f}",
            f"{statistics.median(s.train_cpu for s in counts[name]):.1f}",
            *(f"{statistics.fmean(getattr(s, unit) for s in counts[name]):.0f}" for unit in _UNITS),
        )
        for name, times in timings.items()
    ]
    header = ("s per step", "CPU", "wall", "CPU: rollout", "CPU: rest", *(u.replace("_", " ") for u in _UNITS))
    report.table(header, rows)


_UNITS = ("prompt_tokens", "added_tokens", "model_tokens")


# --- generating -------------------------------------------------------------------------------------------------


def _rollout(report: Report, folder: str, dims: Any, dtype: str, repeats: int) -> None:
    import torch

    flops = product_flops(getattr(torch, dtype))
    report.heading("Generating")
    report.text(
        f"Different random prompts of {PROMPT} tokens (nothing to share), exactly {NEW} new tokens each at temperature "
        f"1, prefill included. `generate` runs in every type and is compared in the faster one; `local` runs in {dtype}"
        f". The limit is the larger of the operations over {flops / 1e9:.0f} GF/s, measured of products, and the "
        "reads (weights and keys and values once a decode step) over the bandwidth measured at that working set."
    )
    beside = _vllm(report, folder, repeats)  # alone, before the others take their memory
    models = {f"generate, {name}": load(folder, name)[0] for name in DTYPES}
    mine, _ = load(folder, dtype)
    engine = make_engine(mine.requires_grad_(False), (), max(SEQUENCES))
    loop = asyncio.new_event_loop()
    rows, verdicts = [], []
    try:
        for count in SEQUENCES:
            sides = {name: _generate(model, count, dims.vocab) for name, model in models.items()}
            sides["local"] = _engine(engine, loop, count, dims.vocab)
            times = interleave(sides, repeats=repeats, warm_up=0 if count > SEQUENCES[0] else 1)
            speed = {name: count * NEW / t.median_cpu for name, t in times.items()}
            best = max(speed[name] for name in models)
            limit = count * NEW / _least_seconds(dims, getattr(torch, dtype), count)
            ratio, share = speed["local"] / best, speed["local"] / limit
            numbers = [f"{speed[name]:,.0f}" for name in sides] + [f"{of[count]:,.0f}" for of in beside.values()]
            rows.append((count, *numbers, f"{ratio:.2f}x", f"{limit:,.0f}", f"{share:.0%}"))
            verdicts.append(f"{count}: {goal(ratio, 1.5)}, {share:.0%} of the limit (goal ≥ 50%)")
    finally:
        engine.close()
        loop.close()
    names = [f"{name} (per CPU s)" for name in (*models, "local", *beside)]
    report.table(("sequences", *names, "local / the faster", "limit", "local of limit"), rows)
    report.text("local / generate at " + "; ".join(verdicts) + ".")


def _vllm(report: Report, folder: str, repeats: int) -> dict[str, dict[int, float]]:
    """Return vLLM's tokens per CPU second for each count and supported data type, if vLLM is available."""
    python = os.environ.get("ASTUNER_BENCHMARK_VLLM")
    if python is None:
        report.text(
            "vLLM was not measured: set ASTUNER_BENCHMARK_VLLM to the interpreter of an environment with vLLM (see "
            "README.md)."
        )
        return {}
    columns, version = {}, ""
    for name in DTYPES:
        asked = {"folder": folder, "dtype": name, "prompt": PROMPT, "new": NEW, "counts": SEQUENCES, "repeats": repeats}
        command = [python, "-m", "benchmarks.vllm_side", json.dumps(asked)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr, file=sys.stderr)  # not on the page: it has this machine's paths
            report.text(f"vLLM failed in {name} with exit code {done.returncode}.")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        version, cpu = found["version"], {n: [cpu for cpu, _ in found["seconds"][str(n)]] for n in SEQUENCES}
        columns[f"vLLM, {name}"] = {n: n * NEW / statistics.median(cpu[n]) for n in SEQUENCES}
    if columns:
        report.text(
            f"vLLM {version}, compiled, in a separate process before the other measurements: one thread, no prefix "
            "sharing, no detokenization. It is listed for comparison; the ratios refer to `generate`."
        )
    return columns


def _prompts(count: int, vocab: int) -> list[list[int]]:
    return [[random.randrange(3, vocab) for _ in range(PROMPT)] for _ in range(count)]


def _generate(model: Any, count: int, vocab: int) -> Callable[[], object]:
    import torch
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=NEW, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0, eos_token_id=None
    )
    model.generation_config.eos_token_id = None

    def side() -> None:
        ids = torch.tensor(_prompts(count, vocab))
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        _expect(out.shape[1] - PROMPT)

    return side


def _engine(engine: Any, loop: asyncio.AbstractEventLoop, count: int, vocab: int) -> Callable[[], object]:
    sampling = SamplingParams(max_tokens=NEW)

    async def all_of(prompts: list[list[int]]) -> None:
        for generation in await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts)):
            _expect(len(generation.response_ids))

    return lambda: loop.run_until_complete(all_of(_prompts(count, vocab)))


def _expect(new: int) -> None:
    if new != NEW:
        raise RuntimeError(f"{new} new tokens instead of {NEW}: the sides did different amounts of work")


def _least_seconds(dims: Any, dtype: Any, count: int) -> float:
    """Return `rollout_vs_hf.least_seconds` of a model of any shape and data type."""
    head, kv_width = dims.vocab * dims.hidden, dims.kv_heads * dims.head_dim
    pairs = sum(range(PROMPT + NEW))
    attention = 4 * dims.layers * dims.heads * dims.head_dim * pairs
    operations = count * (2 * dims.linear * (PROMPT + NEW) + 2 * head * NEW + attention)
    weights = dtype.itemsize * (dims.linear + head)
    caches = count * dtype.itemsize * 2 * dims.layers * kv_width * (PROMPT + NEW // 2)
    return max(operations / product_flops(dtype), NEW * (weights + caches) / read_bandwidth(weights + caches))
