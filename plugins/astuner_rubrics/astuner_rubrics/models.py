"""Helper models of a command: those of an experiment file, or one given by options."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from astuner import load_config
from astuner.contracts.errors import ConfigError
from astuner_helpers import Helper, HelperModels
from astuner_helpers.settings import HelperModel, HelperModelKeys

ONE = "helper"
"""The name of the one that options give."""
WHICH_MODEL = (
    "which model helps? --base-url URL --model NAME (--api-key-env NAME), or --config FILE with astuner.helper_models"
)


def helpers_of(
    config: Path | None, base_url: str | None, model: str | None, api_key_env: str | None, *, scope: Path
) -> HelperModels:
    """The helper models that a person means.

    :param scope: what budgets are counted for: the file that the command writes.
    :raises ConfigError: neither is given, or both, or something in them is wrong.
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
    """The section that options make; None where there are none.

    :raises ConfigError: they are not whole, or beside a file.
    """
    if base_url is None and model is None and api_key_env is None:
        return None
    if config is not None:
        raise ConfigError("--config brings helper models, and --base-url gives another; one of them")
    if base_url is None or model is None:
        raise ConfigError(f"{'--base-url URL' if base_url is None else '--model NAME'} is missing")
    try:
        return HelperModel(base_url=base_url, model=model, api_key_env=api_key_env)
    except ValidationError as e:
        wrong = [f"--{str((p['loc'] or ('base_url',))[0]).replace('_', '-')}: {p['msg']}" for p in e.errors()]
        raise ConfigError(wrong) from None


def choose(helpers: HelperModels, name: str | None) -> Helper:
    """The helper model of a name, or the only one.

    :raises ConfigError: there is none, or there are several.
    """
    if name is None and len(helpers.names) != 1:
        there = f"there are {', '.join(helpers.names)}" if helpers.names else "astuner.helper_models is empty"
        raise ConfigError(f"--helper NAME: which helper model? {there}")
    return helpers.get(name or helpers.names[0], where="--helper")
