"""`astuner export --to gguf`: what is in the file, and what is refused. llama.cpp reads it in tests/llama_cpp."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, TokenType

import astuner_local
from astuner.contracts.errors import CheckpointError, ConfigError
from astuner_export.gguf_file import MAGIC, PRE_TOKENIZERS, pre_tokenizer, write_gguf
from astuner_export.model import export
from tests.table import table

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
TINY = Path(astuner_local.__file__).parent / "tiny" / "model"


def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment in ``e.yaml``, and a checkpoint, a copy of the shipped model, in ``saved``."""
    monkeypatch.chdir(tmp_path)
    Path("e.yaml").write_text("astuner:\n  model: {path: tiny-calculator}\n", encoding="utf-8")
    shutil.copytree(TINY, "saved")


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`begin`, for tests that are no tables."""
    begin(tmp_path, monkeypatch)


def small(folder: Path, model_type: str, **settings: Any) -> None:
    """Put another model beside the shipped one's tokenizer: random weights of another architecture."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6}
    others = {"vocab_size": 512, "num_key_value_heads": 2, "tie_word_embeddings": True, "initializer_range": 0.2}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**sizes, **others, **settings})
    ).save_pretrained(folder)


def value(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    assert field is not None, key
    return field.contents()


@pytest.mark.usefixtures("begun")
def test_the_file_has_the_model_its_tokenizer_and_its_template() -> None:
    from safetensors.numpy import load_file

    result = export("e.yaml", to="m.gguf", form="gguf", checkpoint="saved")
    assert result.models == {"default": Path("m.gguf").resolve()}
    assert result.dtypes == {"default": "float32"}
    assert result.parity["default"].difference == 0
    assert {p.name for p in Path().iterdir()} == {"e.yaml", "saved", "m.gguf"}
    reader = GGUFReader("m.gguf")
    assert value(reader, "general.architecture") == "qwen2"
    for key, expected in {
        "qwen2.block_count": 2,
        "qwen2.context_length": 2048,
        "qwen2.embedding_length": 64,
        "qwen2.feed_forward_length": 192,
        "qwen2.attention.head_count": 2,
        "qwen2.attention.head_count_kv": 1,
        "qwen2.attention.key_length": 32,
        "qwen2.rope.freq_base": 100.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": (TINY / "chat_template.jinja").read_text(encoding="utf-8"),
    }.items():
        assert value(reader, key) == expected, key
    spec = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    tokens, kinds = (value(reader, f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    assert tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert all(tokens[number] == text for text, number in spec["model"]["vocab"].items())
    assert [kinds[one["id"]] for one in spec["added_tokens"]] == [
        TokenType.CONTROL if one["special"] else TokenType.USER_DEFINED for one in spec["added_tokens"]
    ]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in spec["model"]["merges"]]
    assert value(reader, "tokenizer.ggml.merges") == merges
    ours, theirs = load_file(TINY / "model.safetensors"), {t.name: t.data for t in reader.tensors}
    assert np.array_equal(theirs["token_embd.weight"], ours["model.embed_tokens.weight"])
    assert np.array_equal(theirs["blk.1.ffn_down.weight"], ours["model.layers.1.mlp.down_proj.weight"])
    assert "output.weight" not in theirs  # the embedding's


@table(
    ("model_type", "settings"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": False}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
        ("qwen2", {"rope_parameters": YARN}),
        ("mistral", {"sliding_window": None, "head_dim": 16}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_every_architecture_says_what_the_checkpoint_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, settings: dict[str, Any]
) -> None:
    begin(tmp_path, monkeypatch)
    small(Path("saved"), model_type, **settings)
    found = export("e.yaml", to="m.gguf", form="gguf", checkpoint="saved").parity["default"]
    assert found.difference <= 1e-6


@table(("dtype", "kind"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")])
def test_matrices_are_in_the_dtype_and_vectors_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, kind: str
) -> None:
    begin(tmp_path, monkeypatch)
    result = export("e.yaml", to="m.gguf", form="gguf", dtype=dtype, checkpoint="saved")
    kinds = {len(t.shape): t.tensor_type.name for t in GGUFReader("m.gguf").tensors}
    assert kinds == {1: "F32", 2: kind}
    assert result.parity["default"].holds


@pytest.mark.usefixtures("begun")
def test_each_policy_gets_a_file() -> None:
    agents = "  agents:\n    writer: {policy: writer}\n    critic: {policy: critic}\n"
    Path("e.yaml").write_text(Path("e.yaml").read_text() + agents)
    for policy in ("writer", "critic"):
        shutil.copytree(TINY, f"both/{policy}")
    for again in (False, True):
        result = export("e.yaml", to="out", form="gguf", checkpoint="both", force=again)
        assert {p.name for p in Path("out").iterdir()} == {"writer.gguf", "critic.gguf"}
    assert result.parity.keys() == {"writer", "critic"}


@pytest.mark.usefixtures("begun")
def test_the_template_that_was_trained_with_goes_along() -> None:
    Path("mine.jinja").write_text("{{ messages }}")
    export("e.yaml", ["astuner.model.chat_template=mine.jinja"], to="m.gguf", form="gguf", checkpoint="saved")
    assert value(GGUFReader("m.gguf"), "tokenizer.chat_template") == "{{ messages }}"


@pytest.mark.usefixtures("begun")
def test_what_is_there_is_replaced_on_request_only_and_only_if_it_is_gguf() -> None:
    Path("m.gguf").write_bytes(MAGIC + b"an older one")
    Path("folder").mkdir()
    for target, why in (("m.gguf", "--force"), ("e.yaml", "more than a model"), ("folder", "/model.gguf")):
        with pytest.raises(CheckpointError, match=why):
            export("e.yaml", to=target, form="gguf", checkpoint="saved")
    export("e.yaml", to="m.gguf", form="gguf", checkpoint="saved", force=True)
    assert len(GGUFReader("m.gguf").tensors) == 26
    with pytest.raises(ConfigError, match=r"'safetensors' is not supported\. Use one of hf, gguf"):
        export("e.yaml", to="x", form="safetensors")


def _tokenizer(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        small(folder, "llama")  # for which transformers takes tokenizer.json as it is; for qwen2 it knows better
        file = folder / "tokenizer.json"
        spec = json.loads(file.read_text(encoding="utf-8"))
        change(spec)
        file.write_text(json.dumps(spec), encoding="utf-8")
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        settings["tokenizer_class"] = "TokenizersBackend"
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")

    return apply


def _config(**settings: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | settings), encoding="utf-8")

    return apply


@table(
    ("change", "why"),
    [
        (_config(model_type="gpt_neox"), r"architecture 'gpt_neox' is not supported \(llama, mistral, qwen2, qwen3\)"),
        (_config(model_type="no_such"), r"Cannot read .*no_such"),
        (_config(hidden_act="gelu"), "its activation 'gelu' is not silu"),
        (
            _config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
            "rope type 'dynamic'",
        ),
        (_config(rope_parameters=YARN | {"beta_fast": 16.0}), "beta_fast of rope type 'yarn'"),
        (_config(use_sliding_window=True, sliding_window=64, max_window_layers=0, layer_types=None), "sliding-window"),
        (_tokenizer(lambda spec: spec["added_tokens"][4].update(lstrip=True)), "strips adjacent white space"),
        (
            _tokenizer(lambda spec: spec.update(pre_tokenizer={"type": "Whitespace"})),
            "uses a pre-tokenizer other than",
        ),
        (_tokenizer(lambda spec: spec.update(normalizer={"type": "Lowercase"})), "uses a pre-tokenizer other than"),
        (_config(vocab_size=256), "has more tokens than its model"),
    ],
)
def test_what_llama_cpp_would_read_otherwise_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], why: str
) -> None:
    begin(tmp_path, monkeypatch)
    change(Path("saved"))
    with pytest.raises(CheckpointError, match=why) as raised:
        export("e.yaml", to="m.gguf", form="gguf", checkpoint="saved", check=False)
    assert "convert_hf_to_gguf.py" in str(raised.value)
    assert not Path("m.gguf").exists()


@pytest.mark.usefixtures("begun")
def test_a_weight_that_has_no_name_is_refused() -> None:
    from safetensors.numpy import load_file, save_file

    weights = load_file("saved/model.safetensors") | {"model.more.weight": np.zeros((2, 2), np.float32)}
    save_file(weights, "saved/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no name for tensor model\.more\.weight"):
        write_gguf(Path("saved"), Path("m.gguf"), dtype="float32", name="x")


def _spec(steps: list[dict[str, Any]], **model: Any) -> dict[str, Any]:
    return {
        "model": {"type": "BPE", **model},
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
    }


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
SPLIT = {
    "type": "Split",
    "pattern": {"Regex": PRE_TOKENIZERS["llama-bpe"][0][0][1]},
    "behavior": "Isolated",
    "invert": False,
}
DIGITS = {"type": "Digits", "individual_digits": True}


@table(
    ("spec", "name"),
    [
        (_spec([BYTES]), "gpt-2"),
        (_spec([DIGITS, BYTES]), "smollm"),
        (_spec([SPLIT, {**BYTES, "use_regex": False}], ignore_merges=True), "llama-bpe"),
        (_spec([SPLIT, {**BYTES, "use_regex": False}], ignore_merges=False), ""),
        (_spec([{**DIGITS, "individual_digits": False}, BYTES]), ""),
        (_spec([{**BYTES, "add_prefix_space": True}]), ""),
        (_spec([BYTES], byte_fallback=True), ""),
        ({**_spec([BYTES]), "pre_tokenizer": None}, ""),
    ],
)
def test_a_pre_tokenizer_is_known_by_all_that_it_does(spec: dict[str, Any], name: str) -> None:
    assert pre_tokenizer(spec) == name
