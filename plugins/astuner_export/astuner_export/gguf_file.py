"""Write a model folder as a GGUF file for llama.cpp and tools based on it: weights, tokenizer, chat template.

Supports the configurations tested with llama.cpp and rejects others by name: the architectures of `ARCHITECTURES`, a
byte-level BPE tokenizer with a pre-tokenizer of `PRE_TOKENIZERS`, and the rotary embeddings of `ROPES`.

Invariant: a model that llama.cpp would silently interpret differently than transformers is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import CheckpointError, MissingDependency
from astuner_export.parity import load, load_tokenizer
from astuner_export.weights import converted, stored_tensors
from astuner_models.pretrained import load_pretrained

if TYPE_CHECKING:
    from gguf import GGUFWriter

MAGIC = b"GGUF"
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""transformers' `model_type` -> architecture name in llama.cpp."""
ROPES = ("default", "linear", "llama3", "yarn")
_YARN = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"}
_INSTEAD = "Export with --to hf, and convert that folder with convert_hf_to_gguf.py of your llama.cpp version."

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
PRE_TOKENIZERS: Mapping[str, tuple[tuple[Any, ...], bool]] = {
    "gpt-2": ((("ByteLevel", True),), False),
    "smollm": ((("Digits", True), ("ByteLevel", True)), False),
    "qwen2": ((("Split", _QWEN2), ("ByteLevel", False)), False),
    "llama-bpe": ((("Split", _LLAMA3), ("ByteLevel", False)), True),
}
"""Pre-tokenizer name in llama.cpp -> its steps in the tokenizers library, and `ignore_merges`."""


def write_gguf(folder: Path, target: Path, *, dtype: str, name: str, chat_template: str | None = None) -> None:
    """Write the model in ``folder`` to the file ``target``.

    Matrices are stored in ``dtype``, vectors (norms, biases) in float32, as llama.cpp computes with them.

    :param dtype: float32, float16 or bfloat16.
    :param name: Model name in the file.
    :param chat_template: Chat template to use instead of the tokenizer's.
    :raises CheckpointError: llama.cpp would interpret the model differently; the message suggests an alternative.
    :raises MissingDependency: gguf, transformers or torch is not installed.
    """
    try:
        import gguf
        from transformers import AutoConfig
    except ImportError as e:
        raise MissingDependency(
            f"GGUF export requires gguf and transformers, and {e.name} is not installed. Run: "
            "pip install 'astuner-export[check,gguf]'"
        ) from e
    try:
        config = load_pretrained(AutoConfig, folder)
    except (OSError, ValueError) as e:
        raise CheckpointError(f"Cannot read the configuration of {folder}: {e}. {_INSTEAD}") from e
    if why := _unsupported(config):
        raise CheckpointError(f"Cannot write {folder} as GGUF: {why}. {_INSTEAD}")
    tokenizer = load_tokenizer(folder)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(None, arch)
    try:
        writer.add_type("model")
        writer.add_name(name)
        writer.add_file_type(_file_types()[dtype])
        _describe(writer, config)
        _add_tokenizer(writer, tokenizer, folder, config.vocab_size)
        _write_tensors(writer, config, folder, target, dtype)
    finally:
        writer.close()


def load_gguf(file: Path, folder: Path) -> Any:
    """Load a file written from ``folder`` with transformers, in float32.

    transformers reads the weights from GGUF, but not every setting that llama.cpp reads; settings come from the folder.
    """
    from transformers import AutoConfig

    told = load_pretrained(AutoConfig, folder).to_dict()
    kind = ARCHITECTURES[told.pop("model_type")]
    return load(file.parent, gguf_file=file.name, config=AutoConfig.for_model(kind, **told))


def _file_types() -> Mapping[str, Any]:
    from gguf import LlamaFileType as Type

    return {"float32": Type.ALL_F32, "float16": Type.MOSTLY_F16, "bfloat16": Type.MOSTLY_BF16}


def _unsupported(config: Any) -> str:
    if config.model_type not in ARCHITECTURES:
        return f"architecture {config.model_type!r} is not supported ({', '.join(ARCHITECTURES)})"
    rope = config.rope_parameters or {}
    kind = rope.get("rope_type", "default")
    if kind not in ROPES or (kind == "llama3" and ARCHITECTURES[config.model_type] != "llama"):
        return f"rope type {kind!r} has not been tested with llama.cpp"
    if kind == "yarn" and (more := sorted(k for k, v in rope.items() if k not in _YARN and v is not None)):
        return f"{', '.join(more)} of rope type 'yarn' has not been tested with llama.cpp"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "it rotates only part of each head (partial_rotary_factor)"
    layers = getattr(config, "layer_types", None) or ()
    if "sliding_attention" in layers or (not layers and getattr(config, "sliding_window", None)):
        return f"it uses sliding-window attention (sliding_window: {config.sliding_window})"
    if config.hidden_act != "silu":
        return f"its activation {config.hidden_act!r} is not silu"
    if getattr(config, "mlp_bias", False):
        return "its feed-forward layers have biases (mlp_bias)"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantized"
    return ""


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _describe(writer: GGUFWriter, config: Any) -> None:
    from gguf import RopeScalingType

    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(_head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    rope = config.rope_parameters
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


# ------------------------------------------------------------------------------------------------------- tokenizer


def _add_tokenizer(writer: GGUFWriter, tokenizer: Any, folder: Path, vocab_size: int) -> None:
    from gguf import TokenType

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(f"The tokenizer of {folder} has no tokenizer.json (it is a slow tokenizer). {_INSTEAD}")
    spec = json.loads(backend.to_str())
    pre = pre_tokenizer(spec)
    if not pre:
        raise CheckpointError(
            f"The tokenizer of {folder} uses a pre-tokenizer other than {', '.join(PRE_TOKENIZERS)}, so llama.cpp "
            f"would read different tokens. {_INSTEAD}"
        )
    added = {one["id"]: one for one in spec["added_tokens"]}
    for one in added.values():
        if one["lstrip"] or one["rstrip"] or one["single_word"]:
            raise CheckpointError(
                f"Token {one['content']!r} of {folder} strips adjacent white space, which GGUF cannot express. "
                f"{_INSTEAD}"
            )
    texts = {number: text for text, number in spec["model"]["vocab"].items()}
    texts |= {number: one["content"] for number, one in added.items()}
    if texts and max(texts) >= vocab_size:
        raise CheckpointError(f"The tokenizer of {folder} has more tokens than its model ({vocab_size}). {_INSTEAD}")
    kinds = [
        TokenType.UNUSED
        if number not in texts
        else TokenType.NORMAL
        if number not in added
        else TokenType.CONTROL
        if added[number]["special"]
        else TokenType.USER_DEFINED
        for number in range(vocab_size)
    ]
    merges = spec["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([texts.get(number, f"[PAD{number}]") for number in range(vocab_size)])
    writer.add_token_types(kinds)
    # llama.cpp expects a list, even if it is empty
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    ends = _ends(folder, tokenizer)
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
        (writer.add_eot_token_id, ends[0] if ends else None),
    ):
        if number is not None:
            add(number)
    text = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and text[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and text[-1] == tokenizer.eos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def pre_tokenizer(spec: Mapping[str, Any]) -> str:
    """Return the name in llama.cpp of a tokenizer's pre-tokenizer, or an empty string if it is not supported.

    :param spec: Content of tokenizer.json.
    """
    model, normalizer = spec["model"], spec["normalizer"]
    if model["type"] != "BPE" or model.get("byte_fallback") or (normalizer or {"type": "NFC"})["type"] != "NFC":
        return ""
    outer = spec["pre_tokenizer"] or {"type": ""}
    steps = tuple(_step(one) for one in (outer["pretokenizers"] if outer["type"] == "Sequence" else [outer]))
    found = (name for name, known in PRE_TOKENIZERS.items() if known == (steps, bool(model.get("ignore_merges"))))
    return next(found, "")


def _step(one: Mapping[str, Any]) -> tuple[Any, ...]:
    if one["type"] == "ByteLevel" and not one["add_prefix_space"]:
        return "ByteLevel", one["use_regex"]
    if one["type"] == "Digits":
        return "Digits", one["individual_digits"]
    if one["type"] == "Split" and one["behavior"] == "Isolated" and not one["invert"]:
        return "Split", one["pattern"].get("Regex")
    return (one["type"],)


def _ends(folder: Path, tokenizer: Any) -> list[int]:
    """Return the additional end tokens of generation_config.json."""
    file = folder / "generation_config.json"
    told = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    numbers = told if isinstance(told, list) else [told]
    return [number for number in numbers if number not in (None, tokenizer.eos_token_id)]


# --------------------------------------------------------------------------------------------------------- weights


def _write_tensors(writer: GGUFWriter, config: Any, folder: Path, target: Path, dtype: str) -> None:
    """Write tensors one at a time, to keep only one in memory."""
    import numpy as np
    from gguf import GGMLQuantizationType as Type

    kinds = {"float32": Type.F32, "float16": Type.F16, "bfloat16": Type.BF16}
    names = _names(config, [name for name, _, _ in stored_tensors(folder)])
    for name, shape, _ in stored_tensors(folder):
        if name not in names:
            continue
        kept = dtype if len(shape) > 1 else "float32"
        width = 4 if kept == "float32" else 2
        in_bytes = (*shape[:-1], shape[-1] * width)
        nbytes = int(np.prod(in_bytes))
        writer.add_tensor_info(names[name], in_bytes, np.dtype(np.uint8), nbytes, raw_dtype=kinds[kept])
    factors = _rope_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    writer.write_header_to_file(target)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in _read(folder, names):
        kept = dtype if tensor.dim() > 1 else "float32"
        writer.write_tensor_data(_bytes(converted(_permuted(config, names[name], tensor), kept, name)))
    if factors is not None:
        writer.write_tensor_data(factors)


def _names(config: Any, stored: Iterable[str]) -> dict[str, str]:
    """Return transformers' tensor name -> llama.cpp's, for the tensors that llama.cpp stores."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key, text in MODEL_ARCH_NAMES.items() if text == ARCHITECTURES[config.model_type])
    known, names = get_tensor_name_map(arch, config.num_hidden_layers), {}
    for name in stored:
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if (found := known.get_name(name, try_suffixes=(".weight", ".bias"))) is None:
            raise CheckpointError(f"llama.cpp has no name for tensor {name}. {_INSTEAD}")
        names[name] = found
    return names


def _permuted(config: Any, name: str, tensor: Any) -> Any:
    """Reorder query and key projections for ``llama``.

    llama.cpp stores the two rows of a rotated pair next to each other; transformers stores all first halves of a head
    before all second halves.
    """
    kind = name.split(".")[-2]
    if ARCHITECTURES[config.model_type] != "llama" or kind not in ("attn_q", "attn_k"):
        return tensor
    heads = config.num_attention_heads if kind == "attn_q" else config.num_key_value_heads
    shape = tensor.shape
    return tensor.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).transpose(1, 2).reshape(shape)


def _rope_factors(config: Any) -> Any:
    """Return Llama 3's rope scaling divisors per frequency, float32 [head_dim / 2], or None without scaling."""
    if config.rope_parameters.get("rope_type") != "llama3":
        return None
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    half = torch.arange(0, _head_dim(config), 2, dtype=torch.float32) / _head_dim(config)
    return (config.rope_parameters["rope_theta"] ** -half / scaled).float().numpy()


def _read(folder: Path, names: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for name, _, shard in stored_tensors(folder):
        if name in names:
            with safe_open(str(shard), framework="pt") as opened:
                yield name, opened.get_tensor(name)


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().view(torch.uint8).numpy()
