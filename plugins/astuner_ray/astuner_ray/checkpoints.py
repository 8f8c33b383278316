"""Publish checkpoints of models trained with VERL or Trinity as ``checkpoints/step-N`` (`astuner_ray.step_states`).

VERL exports a model with LoRA as base weights and adapters under PEFT's names, which standard tools do not load as one
model.  The adapters are therefore merged into the base, shard by shard to limit memory: ``W + alpha / r * B A``,
computed in float32, for each weight with adapters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from astuner_ray import step_states

_LORA = "lora_train_meta.json"
"""File that VERL writes next to the export of a model with adapters."""
_WRAPPER = "base_model.model."
_BASE = ".base_layer."
_INDEX = "model.safetensors.index.json"


def publish(state: Path, checkpoints: Path, *, keep: int | None) -> Path | None:
    """Write ``checkpoints/step-NNNNNN`` from VERL's export, with adapters merged; return None without weights."""
    export = state / "actor" / "huggingface"

    def merged(folder: Path) -> None:
        if has_adapters(export):
            lora = json.loads((state / "actor" / _LORA).read_text(encoding="utf-8"))
            merge(export, folder, scale=lora["lora_alpha"] / lora["r"])

    return step_states.publish(export, checkpoints, step_states.step_of(state), keep=keep, finish=merged)


def has_adapters(export: Path) -> bool:
    """Return whether an exported folder contains adapters."""
    return any(".lora_" in name for name, _ in _where(export).items())


def merge(export: Path, target: Path, *, scale: float) -> None:
    """Write the merged weights of ``export`` to ``target``, which already contains all other files.

    :param scale: ``alpha / r``, from the ``lora_train_meta.json`` next to VERL's export.
    """
    files = sorted(set(_where(export).values()))
    adapters: dict[str, Tensor] = {}
    for file in files:
        adapters |= _read(export / file, adapters=True)
    names: dict[str, str] = {}
    size = 0
    for file in files:
        merged = {}
        for name, weight in _read(export / file, adapters=False).items():
            if name.endswith(f"{_BASE}weight"):
                module = name.removesuffix(f"{_BASE}weight")
                weight = _with(weight, module, adapters, scale)
            merged[name.removeprefix(_WRAPPER).replace(_BASE, ".")] = weight.contiguous()
        (target / file).unlink(missing_ok=True)  # a hard link to VERL's file
        if merged:
            save_file(merged, target / file, metadata={"format": "pt"})
        names |= dict.fromkeys(merged, file)
        size += sum(t.numel() * t.element_size() for t in merged.values())
    if (export / _INDEX).is_file():
        (target / _INDEX).unlink(missing_ok=True)
        index = {"metadata": {"total_size": size}, "weight_map": names}
        (target / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _with(weight: Tensor, module: str, adapters: Mapping[str, Tensor], scale: float) -> Tensor:
    down, up = (adapters[f"{module}.lora_{side}.default.weight"].float() for side in "AB")
    merged: Tensor = (weight.float() + scale * (up @ down)).to(weight.dtype)
    return merged


def _where(export: Path) -> dict[str, str]:
    """Return the file of each weight."""
    if (export / _INDEX).is_file():
        found: dict[str, Any] = json.loads((export / _INDEX).read_text(encoding="utf-8"))
        return dict(found["weight_map"])
    with safe_open(export / "model.safetensors", "pt") as file:
        return dict.fromkeys(file.keys(), "model.safetensors")


def _read(file: Path, *, adapters: bool) -> dict[str, Tensor]:
    """Return either the adapters of a file or all other weights."""
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys() if (".lora_" in name) is adapters}  # noqa: SIM118
