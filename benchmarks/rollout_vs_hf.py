"""Generation: the engine compared with transformers' ``generate`` and with the limit of the machine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from astuner.contracts.types import SamplingParams
from benchmarks.local_side import make_engine
from benchmarks.machine import matmul_flops, read_bandwidth
from benchmarks.measure import interleave
from benchmarks.models import SHAPES, Shape, make, parameters
from benchmarks.report import Report

PROMPT, NEW, VOCAB = 64, 48, 512
SEQUENCES = (1, 8, 32, 64)


def run(*, quick: bool) -> Report:
    flops, memory = matmul_flops(), read_bandwidth(256 << 20)
    report = Report(
        "Rollout: the engine against transformers' generate, and against the machine",
        f"Different random prompts of {PROMPT} tokens (nothing to share), exactly {NEW} new tokens each, sampled at "
        "temperature 1, one thread, float32, random weights, prefill included. In turns, in one process; tokens per "
        "second are generated tokens by the median of the repetitions. The engine also returns every token's "
        "log-probability, `generate` does not have to.",
    )
    report.text(
        f"Measured on this machine, one thread: {flops / 1e9:.0f} GF/s in float32 matrix products, "
        f"{memory / 1e9:.0f} GB/s reading main memory. The *limit* of a row is what these allow: the larger of its "
        "operations over the former and its reads (weights once per decode step, keys and values of every sequence) "
        "over the bandwidth at that working set, which for a small model is a cache's. No sampling, norms or Python."
    )
    for name in ("tiny",) if quick else SHAPES:
        _model(report, name, repeats=2 if quick else 7)
    return report


def _model(report: Report, name: str, *, repeats: int) -> None:
    import torch

    torch.set_num_threads(1)
    hf_model, engine_model = make(name), make(name)
    engine = make_engine(engine_model, (), max(SEQUENCES))
    loop = asyncio.new_event_loop()
    rows = []
    try:
        for count in SEQUENCES:
            sides = {"hf": _generate(hf_model, count), "local": _engine(engine, loop, count)}
            times = interleave(sides, repeats=repeats)
            speed = {side: count * NEW / t.median_cpu for side, t in times.items()}
            wall = {side: count * NEW / t.median_wall for side, t in times.items()}
            limit = count * NEW / least_seconds(SHAPES[name], count)
            rows.append(
                (
                    count,
                    f"{speed['hf']:,.0f}",
                    f"{speed['local']:,.0f}",
                    f"{speed['local'] / speed['hf']:.2f}x",
                    f"{wall['hf']:,.0f}",
                    f"{wall['local']:,.0f}",
                    f"{wall['local'] / wall['hf']:.2f}x",
                    f"{limit:,.0f}",
                    f"{speed['hf'] / limit:.1%}",
                    f"{speed['local'] / limit:.1%}",
                )
            )
    finally:
        engine.close()
        loop.close()
    report.heading(f"{parameters(hf_model) / 1e6:.2f} million weights")
    report.table(
        (
            "sequences",
            "generate (per CPU s)",
            "local (per CPU s)",
            "ratio",
            "generate (wall)",
            "local (wall)",
            "ratio",
            "limit",
            "generate of limit",
            "local of limit",
        ),
        rows,
    )


def _prompts(count: int) -> list[list[int]]:
    return [[random.randrange(3, VOCAB) for _ in range(PROMPT)] for _ in range(count)]


def _generate(model: Any, count: int) -> Callable[[], object]:
    import torch
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=NEW, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0, eos_token_id=None
    )

    def side() -> None:
        ids = torch.tensor(_prompts(count))
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        _expect(out.shape[1] - PROMPT)

    return side


def _engine(engine: Any, loop: asyncio.AbstractEventLoop, count: int) -> Callable[[], object]:
    sampling = SamplingParams(max_tokens=NEW)

    async def all_of(prompts: list[list[int]]) -> None:
        for generation in await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts)):
            _expect(len(generation.response_ids))

    return lambda: loop.run_until_complete(all_of(_prompts(count)))


def _expect(new: int) -> None:
    if new != NEW:
        raise RuntimeError(f"{new} new tokens instead of {NEW}: the sides did different amounts of work")


def least_seconds(shape: Shape, count: int) -> float:
    """Return the minimum time to generate ``count`` sequences here, counting only arithmetic and memory reads.

    A token costs 2 operations per weight it passes (the head only where a token is drawn) and 4 x heads x head size
    per layer and earlier token. A decode step reads all weights once, and all keys and values.
    """
    head_dim = shape.hidden // shape.heads
    kv_width = shape.kv_heads * head_dim
    layer = shape.hidden * (2 * shape.hidden + 2 * kv_width + 3 * shape.mlp)
    linear, head = shape.layers * layer, VOCAB * shape.hidden
    pairs = sum(range(PROMPT)) + sum(range(PROMPT, PROMPT + NEW))
    attention = 4 * shape.layers * shape.hidden * pairs
    operations = count * (2 * linear * (PROMPT + NEW) + 2 * head * NEW + attention)
    weights = 4 * (linear + head)
    caches = count * 4 * 2 * shape.layers * kv_width * (PROMPT + NEW // 2)
    reads = NEW * (weights + caches)
    return max(operations / matmul_flops(), reads / read_bandwidth(weights + caches))
