"""Everything about an experiment's models that can be wrong, short of their weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner import make_codec
from astuner.contracts.errors import ConfigError
from astuner_local.modeling import Dimensions, read_all_but_weights, resolve_device

if TYPE_CHECKING:
    from astuner import Config


def checked_config(config: Config, policy: str) -> Any:
    """The transformers config of a policy's model, when its weights can be loaded and its turns encoded.

    :raises ConfigError, RunError: not so, as `astuner_local.modeling.load_model` and the engine refuse it.
    """
    model, path = config.model_of(policy), config.locate_model(policy=policy)
    resolve_device(model.device)
    model_config, tokenizer = read_all_but_weights(model, path=path)
    folder = Path(path)
    if folder.is_dir() and not any(True for kind in ("*.safetensors", "*.bin") for _ in folder.glob(kind)):
        raise ConfigError(
            f"astuner.model.path is {path}, but that folder holds no weights (*.safetensors); copy them beside "
            "config.json, or point it at a complete model"
        )
    _check_context(config, Dimensions.of(model_config).context)
    make_codec(config, tokenizer)
    return model_config


def _check_context(config: Config, context: int) -> None:
    asked = config.astuner.rollout.max_model_len
    if asked is not None and asked > context:
        raise ConfigError(
            f"{config.place('astuner.rollout.max_model_len')}: astuner.rollout.max_model_len is {asked}, but the model "
            f"was made for {context} tokens; write {context} or less"
        )
