"""What makes a real language model fast on a CPU, and must change nothing else: layouts, types, memory that is kept."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astuner import TrainerCommon, load_config
from astuner_local import memory, modeling, speed
from astuner_local.engine.forward import Chunk, Forward
from astuner_local.engine.kv_cache import KVCache
from astuner_local.engine.weights import BlockedMatrix, FusedWeights
from astuner_local.trainer.layout import plan

from ._tiny_models import SHAPES, tiny_config, tiny_model

BIG = modeling.Dimensions.of(tiny_config("llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30))
CPU = torch.device("cpu")


@pytest.mark.parametrize(("gain", "dtype"), [(2.0, torch.bfloat16), (1.1, torch.float32), (0.5, torch.float32)])
def test_auto_is_the_type_that_is_measured_to_be_faster(
    monkeypatch: pytest.MonkeyPatch, gain: float, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(speed, "product_speed", lambda of: gain if of is torch.bfloat16 else 1.0)
    assert modeling.resolve_dtype("auto", CPU, BIG) is dtype
    assert modeling.resolve_dtype("float32", CPU, BIG) is torch.float32
    assert modeling.resolve_dtype("bfloat16", CPU, BIG) is torch.bfloat16


def test_a_small_model_stays_in_float32_and_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "product_speed", None)
    small = replace(BIG, layers=2)
    assert (BIG.is_small, small.is_small) == (False, True)
    assert modeling.resolve_dtype("auto", CPU, small) is torch.float32


def test_the_size_of_a_model_is_told_from_its_config() -> None:
    model = tiny_model("llama")
    linears = [m for layer in model.model.layers for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    assert modeling.Dimensions.of(model.config).linear == sum(linear.weight.numel() for linear in linears)


def test_a_product_has_a_speed() -> None:
    assert speed.product_speed(torch.float32) > 1e6


def _logits(model: Any, weights: FusedWeights) -> torch.Tensor:
    """Of the last tokens of two prompts."""
    cache = KVCache(weights.dimensions, dtype=weights.dtype, device=CPU, max_slots=2, token_budget=128)
    cache.resize(2, 64)
    forward = Forward(weights, 64)
    with torch.inference_mode():
        return forward.prefill(cache, [Chunk(0, [5, 3, 8, 1], 0, True), Chunk(1, [7, 2], 0, True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name in ("qwen2", "qwen3-tied", "llama-biased")])
def test_another_layout_computes_the_same(shape: str, dtype: torch.dtype) -> None:
    model = tiny_model(shape, intermediate_size=80).to(dtype)
    plain, packed = FusedWeights(model, packs=False), FusedWeights(model, packs=True)
    layer = packed.layers[0]
    assert isinstance(layer.gate_up, BlockedMatrix), "a wide one"
    assert isinstance(layer.down, BlockedMatrix) is (dtype is torch.bfloat16)
    # bfloat16 keeps 8 bits, and sums that are added in another order round differently
    tolerance = 1e-5 if dtype is torch.float32 else 0.15

    def differ() -> float:
        ours, theirs = _logits(model, packed).float(), _logits(model, plain).float()
        return float((ours - theirs).abs().max() / theirs.abs().max())

    assert differ() <= tolerance
    with torch.no_grad():  # an update
        for parameter in model.parameters():
            parameter.mul_(-0.5)
    plain.refresh()  # the norms of heads are copies everywhere
    assert differ() > 0.3, "a copy follows at a refresh only"
    packed.refresh()
    assert differ() <= tolerance


_FAULTS = """
import resource, sys
from astuner_local.allocator import keep_freed_memory
assert sys.argv[1] == "plain" or keep_freed_memory()
def step():
    kept = [b"x" * (2**24 + 2**22 * n) for n in range(16)]
for _ in range(2):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries are left as they are")
def test_what_was_freed_is_not_cleared_again() -> None:
    def faults(how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", _FAULTS, how], check=True, capture_output=True).stdout)

    assert faults("kept") < faults("plain") / 4


_HOLES = """
import os, sys
from astuner_local.allocator import give_back, keep_freed_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
assert keep_freed_memory()
blocks = [b"x" * 2**24 for _ in range(16)]
above = b"x" * 2**20  # so that glibc itself has nothing to cut off at the end
del blocks
before = resident()
give_back(int(sys.argv[1]))
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries are left as they are")
@pytest.mark.parametrize(("most", "given_back"), [(2**26, True), (2**31, False)])
def test_what_lies_free_is_given_back_when_it_is_too_much(most: int, given_back: bool) -> None:
    done = subprocess.run([sys.executable, "-c", _HOLES, str(most)], check=True, capture_output=True)
    assert (int(done.stdout) > 15 * 2**24) == given_back


def test_only_who_gains_has_a_copy() -> None:
    assert not FusedWeights(tiny_model("qwen2")).packs


def test_the_estimate_of_activations_is_what_a_forward_pass_keeps() -> None:
    model = tiny_model(
        "qwen2", num_hidden_layers=12, hidden_size=96, intermediate_size=256, max_position_embeddings=512
    )
    ids = np.arange(400) % 61
    [micro] = plan([ids], [np.arange(1, 400)], hidden_size=96)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = modeling.hidden_states(model, micro.input_ids, micro.position_ids, micro.attention)
    assert hidden.requires_grad
    dims = modeling.Dimensions.of(model.config)
    estimated = len(micro.input_ids) * memory._activation_bytes(TrainerCommon(), dims, torch.float32)
    assert sum(kept.values()) == pytest.approx(estimated, rel=0.15)


def test_the_plan_tells_the_copy_and_the_time_of_a_model_that_is_not_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    big = tiny_config("llama", **{**shape, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True})
    (tmp_path / "e.yaml").write_text("astuner: {model: {path: tiny-calculator, dtype: float32, device: cpu}}")
    config = load_config(tmp_path / "e.yaml", ["local.threads=2", "astuner.rollout.max_model_len=64"], backbone="local")
    assert "time of a step (estimate)" not in memory.estimate(config)

    monkeypatch.setattr(memory, "product_speed", lambda dtype: 1e11)
    monkeypatch.setattr(memory, "checked_config", lambda config, policy: big)
    told = memory.estimate(config)
    assert told["parameters"].startswith("134,515,008 on cpu")
    assert "weights 1.00, gradients 0.50, optimizer 1.00, " in told["memory (estimate)"]
    a = config.astuner
    seconds = 8 * 134.5e6 * a.data.train_batch_size * a.rollout.num_repeat * 100 / (0.65 * 2e11)
    assert float(told["time of a step (estimate)"].split()[0]) == pytest.approx(seconds, rel=0.01)
