"""Read the weights of a model folder from its safetensors files, and convert them to another data type."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from astuner.contracts.errors import CheckpointError

INDEX = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Data type names in safetensors files."""


def weight_map(folder: Path) -> dict[str, str]:
    """Return tensor name -> file if the weights are in several files, otherwise an empty mapping.

    :raises ValueError, OSError, KeyError, TypeError: The index is unreadable.
    """
    if not (folder / INDEX).is_file():
        return {}
    found: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    return found


def shards(folder: Path) -> list[Path]:
    """Return the weight files. Raises as `weight_map`, or AttributeError."""
    return [folder / name for name in sorted(set(weight_map(folder).values()) or {"model.safetensors"})]


def header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, which starts with the header length in 8 bytes.

    :returns: Tensor name -> dtype, shape, data_offsets.
    :raises ValueError: The file is not in this format, or its length differs from the header.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size - 8:
            raise ValueError("it is truncated")
        found: dict[str, Any] = json.loads(opened.read(length))
    found.pop("__metadata__", None)
    expected = 8 + length + max((tensor["data_offsets"][1] for tensor in found.values()), default=0)
    if size != expected:
        raise ValueError(f"it has {size} bytes instead of {expected}")
    return found


def stored_tensors(folder: Path) -> list[tuple[str, tuple[int, ...], Path]]:
    """Return name, shape and file of every tensor of a complete folder."""
    return [(name, tuple(one["shape"]), file) for file in shards(folder) for name, one in header(file).items()]


def contradicts_tie(folder: Path) -> bool:
    """Return whether ``config.json`` ties embedding and head, while the files contain two different tensors."""
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
    """Return the data type of most weights of a complete folder: float32, float16, bfloat16, or a safetensors name."""
    sizes: Counter[str] = Counter()
    for file in shards(folder):
        for one in header(file).values():
            sizes[one["dtype"]] += one["data_offsets"][1] - one["data_offsets"][0]
    kind = sizes.most_common(1)[0][0] if sizes else "F32"
    return DTYPES.get(kind, kind)


def converted(tensor: Any, dtype: str, name: str) -> Any:
    """Return a floating-point tensor in ``dtype``, and other tensors unchanged.

    :raises CheckpointError: A value is too large for the data type.
    """
    import torch

    if not tensor.is_floating_point():
        return tensor
    new = tensor.to(getattr(torch, dtype))
    if not new.isfinite().all() and tensor.isfinite().all():
        raise CheckpointError(f"{name} contains values too large for {dtype}. Use --dtype bfloat16 or float32.")
    return new


def convert(source: Path, target: Path, dtype: str) -> None:
    """Write the weights of ``source`` to ``target`` in ``dtype``, and update its config.json.

    :raises CheckpointError: As `converted`.
    :raises OSError: The folder cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    for file in shards(source):
        tensors = {name: converted(tensor, dtype, name) for name, tensor in load_file(file).items()}
        try:
            save_file(tensors, target / file.name, metadata={"format": "pt"})
        except SafetensorError as e:  # includes a full disk
            raise OSError(str(e)) from e
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # name before transformers 5
    config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if (target / INDEX).is_file():
        index = json.loads((target / INDEX).read_text(encoding="utf-8"))
        ends = [one["data_offsets"] for file in shards(target) for one in header(file).values()]
        index["metadata"] = {**(index.get("metadata") or {}), "total_size": sum(b - a for a, b in ends)}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
