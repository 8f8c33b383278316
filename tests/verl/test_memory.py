"""The arithmetic of GPU memory, against models whose size is known and against the comments of the examples."""

import json
import re
from pathlib import Path

import pytest

from astuner.config import load_config
from astuner_ray.native import facts, gpu_memory
from astuner_ray.native.gpu_memory import Shape
from astuner_verl.facts import Facts

EXAMPLES = Path(__file__).parents[2] / "examples" / "verl"
BASE = {"vocab_size": 151936, "tie_word_embeddings": True}
QWEN = {
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
    "3B": {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "intermediate_size": 11008},
    "7B": {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18944,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
}  # fmt: skip
QWEN = {name: {**BASE, "num_key_value_heads": 2, **said} for name, said in QWEN.items()}
"""Of the `config.json` of Qwen2.5; what is written in the examples is about them."""


@pytest.mark.parametrize(("name", "billions"), [("0.5B", 0.494), ("1.5B", 1.544), ("3B", 3.086), ("7B", 7.616)])
def test_parameters_are_those_of_the_model_card(name, billions):
    assert Shape.of(QWEN[name]).parameters / 1e9 == pytest.approx(billions, abs=1e-3)


def test_the_parameters_of_a_model_on_disk_are_counted_right(tiny_model):
    from transformers import AutoModelForCausalLM

    real = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny_model).parameters())
    found = Shape.of(json.loads((tiny_model / "config.json").read_text()))
    assert found.parameters == pytest.approx(real, rel=0.01)


def test_a_config_that_does_not_say_enough():
    assert Shape.of({"hidden_size": 8}) is None


def test_experts_are_counted():
    dense, sparse = QWEN["3B"], {**QWEN["3B"], "num_experts": 8, "moe_intermediate_size": 1000}
    difference = Shape.of(dense).parameters - Shape.of(sparse).parameters
    assert difference == 36 * 3 * 2048 * (11008 - 8 * 1000)


def test_what_each_switch_changes():
    shape = Shape.of(QWEN["7B"])
    plain = gpu_memory.memory(shape, gpus=8, tokens=8192)
    assert plain.state == 16 * shape.parameters // 8
    assert plain.resting == 12 * shape.parameters // 8
    assert gpu_memory.memory(shape, gpus=4, tokens=8192).state == 16 * shape.parameters // 4
    assert gpu_memory.memory(shape, gpus=8, tokens=8192, optimizer_offload=True).resting == 4 * shape.parameters // 8
    both = gpu_memory.memory(shape, gpus=8, tokens=8192, param_offload=True, optimizer_offload=True)
    assert (both.resting, both.update) == (0, plain.update)
    assert gpu_memory.memory(shape, gpus=8, tokens=4096).activations < 0.6 * plain.activations
    assert gpu_memory.memory(shape, gpus=8, tokens=8192, checkpointing=False).activations > plain.activations
    halved = gpu_memory.memory(shape, gpus=8, tokens=8192, tensor_parallel=2)
    assert (halved.rollout_weights, halved.kv_per_token) == (shape.parameters, plain.kv_per_token // 2)
    adapters = gpu_memory.memory(shape, gpus=8, tokens=8192, lora_rank=32)
    assert 4 * shape.parameters // 8 < adapters.state < 1.05 * 4 * shape.parameters // 8


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_says_what_is_computed_and_fits(file, monkeypatch):
    config = load_config(file, backbone="verl")
    described = QWEN[config.astuner.model.path.split("-")[1]]
    monkeypatch.setattr(facts, "model_config", lambda model, **_: described)
    lines = Facts.of(config).memory_plan()
    text = file.read_text()
    state, activations, update = re.findall(r"([\d.]+) GiB", lines["an update"])
    card = float(re.search(r"GPUs? (?:with|of) (\d+) GiB", text).group(1))
    comment = " ".join(line.lstrip("# ") for line in text.partition("astuner:")[0].splitlines())
    assert re.search(rf"update +{state} GiB .* \+ {activations} GiB .* = {update} GiB", comment)
    assert float(re.search(r"about ([\d.]+) GiB", lines["GPU memory"]).group(1)) < 0.8 * card
    assert float(re.search(r"rollout .* = ([\d.]+) GiB|rollout +([\d.]+) GiB", comment).group(1) or 0) < 0.8 * card


def test_engines_with_gpus_of_their_own_are_counted_apart(monkeypatch, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "astuner: {model: {path: some/model}, rollout: {max_model_len: 8192}, trainer_common: {n_gpus_per_node: 8}}\n"
    )
    monkeypatch.setattr(facts, "model_config", lambda model, **_: QWEN["7B"])
    little = ["verl.actor_rollout_ref.rollout.gpu_memory_utilization=0.1"]  # so that the engine decides
    apart = [*little, "verl.trainer.v1.trainer_mode=separate_async"]
    said = {}
    for name, overrides in (
        ("together", little),
        ("apart", apart),
        ("only trains", [*apart, "verl.actor_rollout_ref.hybrid_engine=false"]),
    ):
        config = load_config(file, overrides, backbone="verl")
        said[name] = Facts.of(config).memory_plan()
    numbers = {
        name: [float(n) for n in re.findall(r"([\d.]+) GiB", lines["GPU memory"])] for name, lines in said.items()
    }
    ((together,), (validates, rolls_out), (trains, the_same)) = numbers.values()
    assert validates == together == rolls_out, "the trainer's GPUs have an engine too, for validations"
    assert rolls_out == the_same
    assert trains == float(re.search(r"= ([\d.]+) GiB", said["only trains"]["an update"]).group(1)) < validates
    assert "of the trainer stay" in said["together"]["a rollout"]
    assert "stay" not in said["apart"]["a rollout"]


def test_a_model_that_is_described_in_other_words_is_not_guessed_at():
    assert Shape.of({"vocab_size": 5, "n_layer": 2}) is None
