"""The functional forward is the transformers forward, for every family; what it cannot run is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from astuner import load_config, make_codec
from astuner.config.schema import ModelSection
from astuner.contracts.errors import ConfigError, RunError
from astuner_local import modeling
from astuner_local.plugin import locate_model
from tests.table import table

from ._tiny_models import SHAPES, VOCAB, reference_logprobs, tiny_config, tiny_model

LENGTHS = (9, 1, 23)


def naive_attention(lengths: tuple[int, ...]) -> modeling.AttentionFn:
    """Causal attention per sequence of a packed row, written the long way."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs = []
        for q1, k1, v1 in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            k1 = k1.repeat_interleave(q1.shape[1] // k1.shape[1], 1)
            v1 = v1.repeat_interleave(q1.shape[1] // v1.shape[1], 1)
            scores = torch.einsum("qhd,khd->hqk", q1, k1) / q1.shape[-1] ** 0.5
            hidden = torch.ones(scores.shape[1:]).triu(1).bool()
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v1).flatten(1))
        return torch.cat(outputs)

    return attend


def packed(seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]
    return sequences, torch.cat(sequences), torch.cat([torch.arange(n) for n in LENGTHS])


def packed_logits(model: Any, **options: Any) -> Tensor:
    _, ids, positions = packed()
    hidden = modeling.hidden_states(model, ids, positions, naive_attention(LENGTHS), **options)
    logits: Tensor = modeling.lm_head(model)(hidden)
    return logits


@table("shape", SHAPES)
def test_packed_forward_equals_transformers(shape: str) -> None:
    model = tiny_model(shape)
    with torch.no_grad():
        ours = packed_logits(model).log_softmax(-1)
    theirs = torch.cat([reference_logprobs(model, ids.tolist()) for ids in packed()[0]])
    assert (ours - theirs).abs().max() <= 1e-4


def test_the_tiny_models_tell_positions_apart() -> None:
    """Guards the test above: with all positions 0 the same comparison fails by far."""
    model = tiny_model("qwen2")
    _, ids, positions = packed()
    with torch.no_grad():
        right = modeling.hidden_states(model, ids, positions, naive_attention(LENGTHS))
        wrong = modeling.hidden_states(model, ids, positions * 0, naive_attention(LENGTHS))
    assert (right - wrong).abs().max() > 0.1


def test_checkpointing_changes_no_gradient() -> None:
    model = tiny_model("qwen3")
    gradients = []
    for activation_checkpointing in (False, True):
        model.zero_grad()
        packed_logits(model, activation_checkpointing=activation_checkpointing).logsumexp(-1).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert all(gradient.abs().max() > 0 for gradient in gradients[0])


def test_gradients_equal_those_of_transformers() -> None:
    model = tiny_model("llama-biased")
    sequences, _, _ = packed()
    packed_logits(model).logsumexp(-1).sum().backward()
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for ids in sequences:
        model(ids[None]).logits.logsumexp(-1).sum().backward()
    for mine, parameter in zip(ours, model.parameters(), strict=True):
        assert (mine - parameter.grad).abs().max() <= 1e-3 * parameter.grad.abs().max()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft
def test_adapters_take_part_and_get_gradients() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("qwen2")
    with torch.no_grad():
        before = packed_logits(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    logits = packed_logits(adapted)
    assert (logits - before).abs().max() > 1e-2
    with torch.no_grad():
        theirs = torch.cat([adapted(ids[None]).logits[0] for ids in packed()[0]])
    assert (logits - theirs).abs().max() <= 1e-4
    F.cross_entropy(logits, packed()[1]).backward()
    trained = [p.grad for p in adapted.parameters() if p.requires_grad]
    assert trained
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in trained)


# --- what is refused --------------------------------------------------------------------------------------------


@table(
    ("shape", "changes", "named"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("mistral", {"sliding_window": 16}, "sliding_window: 16"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "sliding_window: 16"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantised"),
    ],
)
def test_a_config_that_would_not_be_exact_is_refused(shape: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        modeling.check_supported(tiny_config(shape, **changes))


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    from transformers import GPT2Config

    with pytest.raises(ConfigError, match=r"'gpt2'.*qwen3"):
        modeling.check_supported(GPT2Config())


# --- loading ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    vocabulary = {"<|im_end|>": 0, "<|endoftext|>": 1, **{chr(97 + i): 2 + i for i in range(26)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a")), eos_token="<|im_end|>"
    )
    model = tiny_model("qwen3-tied")
    model.generation_config.eos_token_id = [0, 1]
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_load_a_folder(folder: Path) -> None:
    loaded = modeling.load_model(ModelSection(path=str(folder), device="cpu"))
    assert (loaded.device.type, loaded.dtype, loaded.eos_token_ids) == ("cpu", torch.float32, (0, 1))
    assert not loaded.model.training
    ids = [5, 3, 8, 1]
    assert torch.equal(reference_logprobs(loaded.model, ids), reference_logprobs(tiny_model("qwen3-tied"), ids))


def test_load_in_another_dtype_from_another_folder(folder: Path) -> None:
    loaded = modeling.load_model(ModelSection(path="ignored", device="cpu", dtype="bfloat16"), path=str(folder))
    assert loaded.model.dtype == torch.bfloat16


def test_the_template_of_an_experiment_is_the_codecs_and_lies_beside_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, elsewhere = tmp_path / "experiment", tmp_path / "elsewhere"
    tokenizer = modeling.load_model(ModelSection(path="tiny"), path=locate_model("tiny-calculator")).tokenizer
    for place, mark in ((experiment, "beside"), (elsewhere, "elsewhere")):
        place.mkdir()
        (place / "t.jinja").write_text(f"{{# {mark} #}}{tokenizer.chat_template}", encoding="utf-8")
    (experiment / "e.yaml").write_text("astuner: {model: {path: tiny-calculator, chat_template: t.jinja}}")
    monkeypatch.chdir(elsewhere)
    config = load_config(experiment / "e.yaml")
    loaded = modeling.load_model(config.astuner.model, path=config.locate_model())
    assert loaded.tokenizer.chat_template == tokenizer.chat_template
    make_codec(config, loaded.tokenizer)
    assert loaded.tokenizer.chat_template == f"{{# beside #}}{tokenizer.chat_template}"  # and so it is saved


def test_a_folder_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such folder.*Hugging Face name"):
        modeling.load_model(ModelSection(path=str(tmp_path / "absent")))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        modeling.load_model(ModelSection(path=str(tmp_path)))


def test_a_folder_without_tokenizer_or_weights_is_named(folder: Path) -> None:
    for what, pattern in (("tokenizer", "tokenizer*"), ("weights", "*.safetensors")):
        for file in folder.glob(pattern):
            file.rename(folder.parent / file.name)
        with pytest.raises(ConfigError, match=f"cannot read the {what}"):
            modeling.load_model(ModelSection(path=str(folder)))
        for file in folder.parent.glob(pattern):
            file.rename(folder / file.name)


def test_a_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    tiny_model("qwen2", vocab_size=20).save_pretrained(tmp_path / "small")
    for file in folder.glob("tokenizer*"):
        file.rename(tmp_path / "small" / file.name)
    with pytest.raises(ConfigError, match="do not match"):
        modeling.load_model(ModelSection(path=str(tmp_path / "small")))


def test_missing_weights_are_never_made_up(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 weights are missing.*up_proj"):
        modeling.load_model(ModelSection(path=str(folder)))


def test_an_unreachable_hub_is_a_run_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files")

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    with pytest.raises(RunError, match=r"Check the network|cannot be reached"):
        modeling.load_model(ModelSection(path="Qwen/Qwen2.5-0.5B-Instruct"))


def test_an_absent_gpu_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="device: cpu"):
        modeling.load_model(ModelSection(path=str(folder), device="cuda:97"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.embed_tokens.weight", float("nan")),
        ("model.layers.0.self_attn.q_proj.weight", float("nan")),
        ("model.layers.1.mlp.down_proj.weight", float("inf")),
        ("model.layers.1.mlp.up_proj.weight", -float("inf")),
        ("model.layers.0.input_layernorm.weight", float("nan")),
        ("model.norm.weight", float("inf")),
    ],
)
def test_weights_that_are_not_finite_are_named(name: str, value: float, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[3] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{name} is not finite"):
        modeling.load_model(ModelSection(path=str(folder)))


def test_a_config_that_ties_embedding_and_head_that_differ_is_refused(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        modeling.load_model(ModelSection(path=str(folder)))


class _Code:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._marker,)


DAMAGED_WEIGHTS = ("code", "text", "empty", "cut off", "zip", "list")


@pytest.mark.parametrize("kind", DAMAGED_WEIGHTS)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_damaged_and_hostile_weights_are_named(kind: str, name: str, folder: Path, tmp_path: Path) -> None:
    file, marker = folder / name, tmp_path / "code-ran"
    stored = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    contents: dict[str, Any] = {
        "text": b"version https://git-lfs.github.com/spec/v1\n",  # what a clone without LFS has
        "empty": b"",
        "cut off": stored[: len(stored) // 2],
        "zip": b"PK\x03\x04" + bytes(100),
    }
    if kind in contents:
        file.write_bytes(contents[kind])
    else:
        torch.save({"model.norm.weight": _Code(marker)} if kind == "code" else [1, 2], file)
    with pytest.raises(ConfigError, match=r"cannot read the weights of astuner\.model\.path|weights are missing"):
        modeling.load_model(ModelSection(path=str(folder)))
    assert not marker.exists()
