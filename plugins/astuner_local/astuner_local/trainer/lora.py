"""Low-rank adapters (Hu et al. 2021) by peft: wrap, switch off, save, merge.

The base weights stay as they were, so they are also the reference model: it costs no second copy.
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
    """Give a causal LM adapters and freeze the rest; the model itself when ``rank`` is 0.

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
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft divides it by r; it need not be whole
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 reads a name that transformers 5 renamed
        warnings.filterwarnings("ignore", message=r".*tie_word_embeddings=True")  # checkpoints untie the two
        torch.manual_seed(seed)  # adapters start at random; the run's own random stream is left alone
        try:
            wrapped = get_peft_model(model, settings)
        except ValueError as error:
            raise ConfigError(f"astuner.model.lora.target_modules is {config.target_modules}: {error}") from error
    if is_lora_layer(wrapped.get_base_model().lm_head):
        raise ConfigError(
            "astuner.model.lora.target_modules names the vocabulary head, which cannot carry adapters here; leave "
            "lm_head out, or write all-linear"
        )
    return wrapped.eval()


def is_lora(model: Any) -> bool:
    return hasattr(model, "peft_config")


def is_lora_layer(module: Any) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


@torch.no_grad()
def merged_state_dict(model: Any) -> dict[str, Tensor]:
    """The base model's state dict with every adapter added in; the model is left as it is.

    :returns: under the names of the unwrapped model; W + (alpha / rank) B A, added in float32.
    """
    base = model.get_base_model()
    merged = {f"{name}.weight": merged_weight(m) for name, m in base.named_modules() if is_lora_layer(m)}
    plain = {name.replace(".base_layer.", "."): t for name, t in base.state_dict().items() if ".lora_" not in name}
    return {name: merged.get(name, tensor) for name, tensor in plain.items()}


def load_adapter(model: Any, folder: Path) -> None:
    """Restore the adapters in place.

    :raises CheckpointError: the folder holds no adapters, or those of another shape.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    if not (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder} holds no adapters: the checkpoint was written without LoRA; set astuner.model.lora.rank: 0"
        )
    try:
        result: Any = set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    except RuntimeError as error:
        raise CheckpointError(
            f"the adapters in {folder} do not fit: {error}; resume with the astuner.model.lora they were trained with"
        ) from error
    if result.unexpected_keys:
        raise CheckpointError(
            f"the adapters in {folder} have layers that this model has not ({result.unexpected_keys[0]}, …); resume "
            "with the astuner.model.lora they were trained with"
        )
