"""The weights of a model folder, as they lie in its files of safetensors, and in another dtype."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from astuner.contracts.errors import CheckpointError

INDEX = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""As files of safetensors name them."""


def weight_map(folder: Path) -> dict[str, str]:
    """Which tensor is in which file, where there are several; otherwise empty.

    :raises ValueError, OSError, KeyError, TypeError: the index cannot be read.
    """
    if not (folder / INDEX).is_file():
        return {}
    found: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    return found


def shards(folder: Path) -> list[Path]:
    """The files of weights; raises as `weight_map`, or AttributeError."""
    return [folder / name for name in sorted(set(weight_map(folder).values()) or {"model.safetensors"})]


def header(file: Path) -> dict[str, Any]:
    """The tensors in a file of safetensors: the length of its header in 8 bytes, the header as JSON, the numbers.

    :returns: name -> dtype, shape, data_offsets.
    :raises ValueError: it is no such file, or is not as long as its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size - 8:
            raise ValueError("it was cut off")
        found: dict[str, Any] = json.loads(opened.read(length))
    found.pop("__metadata__", None)
    expected = 8 + length + max((tensor["data_offsets"][1] for tensor in found.values()), default=0)
    if size != expected:
        raise ValueError(f"it has {size} bytes instead of {expected}")
    return found


def stored_tensors(folder: Path) -> list[tuple[str, tuple[int, ...], Path]]:
    """Name, shape and file of every tensor of a complete folder."""
    return [(name, tuple(one["shape"]), file) for file in shards(folder) for name, one in header(file).items()]


def contradicts_tie(folder: Path) -> bool:
    """Whether ``config.json`` of a complete folder ties embedding and head while its files hold two that differ."""
    if not json.loads((folder / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings", False):
        return False
    files = {name: file for name, _, file in stored_tensors(folder)}
    embedding = next((name for name in files if name.endswith("embed_tokens.weight")), None)
    if embedding is None or "lm_head.weight" not in files:
        return False
    import torch
    from safetensors import safe_open

    def tensor(name: str) -> Any:
        with safe_open(files[name], "pt") as file:
            return file.get_tensor(name)

    return not torch.equal(tensor(embedding), tensor("lm_head.weight"))


def stored_dtype(folder: Path) -> str:
    """The dtype of most numbers of a complete folder: float32, float16 or bfloat16; another as safetensors names it."""
    sizes: Counter[str] = Counter()
    for file in shards(folder):
        for one in header(file).values():
            sizes[one["dtype"]] += one["data_offsets"][1] - one["data_offsets"][0]
    kind = sizes.most_common(1)[0][0] if sizes else "F32"
    return DTYPES.get(kind, kind)


def converted(tensor: Any, dtype: str, name: str) -> Any:
    """A tensor of floating point in ``dtype``; another kind as it is.

    :raises CheckpointError: a number is too large for it.
    """
    import torch

    if not tensor.is_floating_point():
        return tensor
    new = tensor.to(getattr(torch, dtype))
    if not new.isfinite().all() and tensor.isfinite().all():
        raise CheckpointError(f"{name} holds numbers that are too large for {dtype}; take --dtype bfloat16 or float32")
    return new


def convert(source: Path, target: Path, dtype: str) -> None:
    """Write the weights of ``source`` to the folder ``target`` in ``dtype``, and say so in its config.json.

    :raises CheckpointError: as `converted`.
    :raises OSError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    for file in shards(source):
        tensors = {name: converted(tensor, dtype, name) for name, tensor in load_file(file).items()}
        try:
            save_file(tensors, target / file.name, metadata={"format": "pt"})
        except SafetensorError as e:  # a full disk among them
            raise OSError(str(e)) from e
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # as it was called before transformers 5
    config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if (target / INDEX).is_file():
        index = json.loads((target / INDEX).read_text(encoding="utf-8"))
        ends = [one["data_offsets"] for file in shards(target) for one in header(file).values()]
        index["metadata"] = {**(index.get("metadata") or {}), "total_size": sum(b - a for a, b in ends)}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
