"""Helper models of a command: from an experiment file, or from options."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from astuner import load_config
from astuner.contracts.errors import ConfigError
from astuner_helpers import Helper, HelperModels
from astuner_helpers.settings import HelperModel, HelperModelKeys

ONE = "helper"
"""Name of the helper model given by options."""
WHICH_MODEL = (
    "set a helper model: --base-url URL --model NAME (--api-key-env NAME), or --config FILE with astuner.helper_models"
)


def helpers_of(
    config: Path | None, base_url: str | None, model: str | None, api_key_env: str | None, *, scope: Path
) -> HelperModels:
    """Return the helper models that the options select.

    :param scope: What budgets are counted for: the file that the command writes.
    :raises ConfigError: Neither or both are given, or a setting is invalid.
    """
    section = section_of(config, base_url, model, api_key_env)
    if section is not None:
        return HelperModels.one(section, scope=scope, name=ONE)
    if config is None:
        raise ConfigError(WHICH_MODEL)
    return HelperModels(load_config(config).keys_of(HelperModelKeys).helper_models, scope=str(scope.absolute()))


def section_of(
    config: Path | None, base_url: str | None, model: str | None, api_key_env: str | None
) -> HelperModel | None:
    """Return the section given by options, or None without options.

    :raises ConfigError: The options are incomplete, or combined with a file.
    """
    if base_url is None and model is None and api_key_env is None:
        return None
    if config is not None:
        raise ConfigError("--config and --base-url both set helper models; use one of them")
    if base_url is None or model is None:
        raise ConfigError(f"{'--base-url URL' if base_url is None else '--model NAME'} is missing")
    try:
        return HelperModel(base_url=base_url, model=model, api_key_env=api_key_env)
    except ValidationError as e:
        wrong = [f"--{str((p['loc'] or ('base_url',))[0]).replace('_', '-')}: {p['msg']}" for p in e.errors()]
        raise ConfigError(wrong) from None


def choose(helpers: HelperModels, name: str | None) -> Helper:
    """Return the helper model with a name, or the only one.

    :raises ConfigError: There is none, or there are several and no name is given.
    """
    if name is None and len(helpers.names) != 1:
        there = f"available: {', '.join(helpers.names)}" if helpers.names else "astuner.helper_models is empty"
        raise ConfigError(f"--helper NAME is required; {there}")
    return helpers.get(name or helpers.names[0], where="--helper")
