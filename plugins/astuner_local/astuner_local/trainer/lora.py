"""Low-rank adapters (Hu et al. 2021) with peft: wrap, disable, save, merge.

The base weights do not change, so they also serve as reference model without a second copy.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from astuner import LoraSection
from astuner.contracts.errors import CheckpointError, ConfigError, MissingDependency
from astuner_local.engine.weights import merged_weight


def wrap(model: Any, config: LoraSection, *, seed: int = 0) -> Any:
    """Add adapters to a causal LM and freeze the rest; return the model unchanged if ``rank`` is 0.

    :raises MissingDependency: peft is not installed.
    :raises ConfigError: ``target_modules`` names no linear layer of this model, or the vocabulary head.
    """
    if config.rank == 0:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingDependency("astuner.model.lora needs peft: pip install 'astuner-local[lora]'") from error
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft divides it by r; floats work
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 reads a name that transformers 5 renamed
        warnings.filterwarnings("ignore", message=r".*tie_word_embeddings=True")  # checkpoints untie the two
        torch.manual_seed(seed)  # adapters are initialized randomly; the run's own random stream is unchanged
        try:
            wrapped = get_peft_model(model, settings)
        except ValueError as error:
            raise ConfigError(f"astuner.model.lora.target_modules is {config.target_modules}: {error}") from error
    if is_lora_layer(wrapped.get_base_model().lm_head):
        raise ConfigError(
            "astuner.model.lora.target_modules includes the vocabulary head, which cannot have adapters; remove "
            "lm_head, or use all-linear"
        )
    return wrapped.eval()


def is_lora(model: Any) -> bool:
    """Return whether peft has wrapped a model."""
    return hasattr(model, "peft_config")


def is_lora_layer(module: Any) -> bool:
    """Return whether a module carries adapters."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


@torch.no_grad()
def merged_state_dict(model: Any) -> dict[str, Tensor]:
    """Return the base model's state dict with all adapters merged; the model itself does not change.

    :returns: W + (alpha / rank) B A, added in float32, under the names of the unwrapped model.
    """
    base = model.get_base_model()
    merged = {f"{name}.weight": merged_weight(m) for name, m in base.named_modules() if is_lora_layer(m)}
    plain = {name.replace(".base_layer.", "."): t for name, t in base.state_dict().items() if ".lora_" not in name}
    return {name: merged.get(name, tensor) for name, tensor in plain.items()}


def load_adapter(model: Any, folder: Path) -> None:
    """Restore the adapters in place.

    :raises CheckpointError: The folder has no adapters, or their shapes differ.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    if not (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder} has no adapters, because the checkpoint was written without LoRA; set astuner.model.lora.rank: 0"
        )
    try:
        result: Any = set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    except RuntimeError as error:
        raise CheckpointError(
            f"the adapters in {folder} do not fit: {error}; resume with the astuner.model.lora of the checkpoint"
        ) from error
    if result.unexpected_keys:
        raise CheckpointError(
            f"the adapters in {folder} have layers that this model lacks ({result.unexpected_keys[0]}, …); resume "
            "with the astuner.model.lora settings of the checkpoint"
        )
