"""Compose VERL's complete configuration for one experiment with VERL's own mechanism.

Later layers take precedence::

    VERL's YAML files  <  ``keys.yaml``  <  the platform's settings  <  the user's ``verl:`` section

Hydra reads VERL's YAML files from the installed package; VERL itself is not imported, so this takes a second.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import ConfigError, MissingDependency
from astuner.contracts.places import Place
from astuner_ray.native import table
from astuner_ray.native.compose import HAS_KEYS, checked, layered, platform, without_flash_attention
from astuner_ray.native.keys import place_of, spelled
from astuner_verl import separate
from astuner_verl.facts import Facts
from astuner_verl.table import TABLE

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from astuner import Config, TrainerCommon

__all__ = ["Facts", "Native", "check", "compose", "defaults", "platform_settings"]

SECTION = "verl"
WITHOUT_FLASH_ATTENTION = {
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.model.use_remove_padding": False,
}
"""VERL settings without flash-attn: torch's attention, which needs padded rows."""
PRECISION = ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype", "actor_rollout_ref.rollout.dtype")
"""Keys with the data types of the trainer's passes and of the rollout engine."""


@dataclass(frozen=True, kw_only=True)
class Native:
    """VERL's configuration for one experiment."""

    config: DictConfig
    """VERL's own configuration with unresolved interpolations; values decided later can still be set."""
    notes: tuple[str, ...]
    """Notes for the user about replaced values."""
    common: TrainerCommon
    """``trainer_common`` with `rollout_is` resolved."""

    def as_dict(self) -> dict[str, Any]:
        """Return the resolved configuration as plain data."""
        from omegaconf import OmegaConf

        data: dict[str, Any] = OmegaConf.to_container(self.config, resolve=True)  # type: ignore[assignment]
        return data


def platform_settings(env: Mapping[str, str] = os.environ) -> Mapping[str, Any]:
    """Return VERL's keys for this machine, GPUs or ``VERL_PLATFORM``: dotted, a leading ``+`` adds a key.

    :raises ConfigError: ``VERL_PLATFORM=cpu``, but its package is not installed.
    """
    on_gpus = without_flash_attention(WITHOUT_FLASH_ATTENTION)
    return platform("verl", engine_has_others=True, on_gpus=on_gpus, env=env)


def compose(facts: Facts, machine: Mapping[str, Any]) -> Native:
    """Return VERL's configuration for the experiment of ``facts``.

    :param machine: Settings of this machine, see `platform_settings`.
    :raises ConfigError: All keys of the ``verl:`` section that VERL does not have or that ASTuner sets; or an
        ``astuner.`` key without meaning in the selected mode.
    :raises MissingDependency: VERL or Hydra is not installed.
    """
    native = defaults()
    known = dict(_every_key(native))
    notes = layered(
        facts,
        TABLE,
        machine.items(),
        checked(
            facts,
            TABLE,
            known,
            engine="verl",
            unlike=lambda key, value: _unlike(known[key], value),
            is_free=lambda default: default in (None, {}),  # sections with keys are `HAS_KEYS`
            else_="to add a key that verl's YAML files lack, write {key}",
        ),
        get=partial(_get, native),
        put=partial(_put, native),
    )
    _check_mode(facts.config, native)
    if _get(native, separate.LENT) is not None:
        _put(native, separate.LENT, separate.training_gpus(native))
    passes, rollouts = (_get(native, key) for key in PRECISION)
    common = table.corrected(facts.a.trainer_common, passes, rollouts)
    _put(native, "algorithm.rollout_correction.bypass_mode", table.old_need_no_pass(common))
    return Native(config=native, notes=notes, common=common)


def defaults() -> DictConfig:
    """Return VERL's configuration from its YAML files.

    :raises MissingDependency: VERL or Hydra is not installed.
    """
    found = find_spec("verl")
    if found is None or not found.submodule_search_locations or find_spec("hydra") is None:
        raise MissingDependency("the backbone verl needs VERL, which is not installed: pip install astuner-verl")
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    folder = Path(next(iter(found.submodule_search_locations))) / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        composed: DictConfig = hydra_compose("ppo_trainer")
    return composed


def check(native: Native) -> None:
    """Check with VERL's own code whether it accepts the configuration. Imports VERL.

    :raises ConfigError: VERL's error message.
    """
    from hydra.errors import InstantiationException
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = native.config
    try:
        with contextlib.redirect_stdout(sys.stderr):  # VERL prints a success message
            validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=False)
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)  # VERL checks this only in workers
    except (AssertionError, ImportError, NotImplementedError, TypeError, ValueError, InstantiationException) as e:
        raise ConfigError(f"verl rejects this configuration: {' '.join(str(e).split())}") from e


def _check_mode(config: Config, native: DictConfig) -> None:
    """Check that the selected trainer mode matches the other settings.

    :raises ConfigError: It does not.
    """
    mode = native.trainer.v1.trainer_mode
    problems = []
    if mode != "sync" and config.astuner.rollout.oversample != 1:
        place = config.origins.get("astuner.rollout.oversample", Place(str(config.path)))
        problems.append(
            f"{place}: astuner.rollout.oversample has no effect with {SECTION}.{separate.KEY}: {mode}, "
            "which starts groups ahead anyway; remove it"
        )
    if separate.chosen(native):
        problems += [
            f"{place_of(config, SECTION, key)}: {SECTION}.{key} {text}" for key, text in separate.wrong(native)
        ]
    if problems:
        raise ConfigError(problems)


def _unlike(default: Any, value: Any) -> str:
    """Return the type that VERL's default implies if ``value`` has another type; null is left to VERL."""
    if value is None or default is None or (isinstance(default, str) and "${" in default):
        return ""
    if default is HAS_KEYS or isinstance(default, dict):
        return "" if isinstance(value, dict) else "is a section of verl; write keys below it"
    kinds = ((bool, "true or false"), ((int, float), "a number"), (str, "text"), (list, "a list"))
    kind, text = next((kind, text) for kind, text in kinds if isinstance(default, kind))
    fits = isinstance(value, kind) and isinstance(value, bool) == isinstance(default, bool)
    return "" if fits else f"should be {text}, like verl's default {default!r}"


def _every_key(native: DictConfig) -> Iterator[tuple[str, Any]]:
    """Yield VERL's keys and sections, dotted; a section with keys has the value `HAS_KEYS`."""
    from omegaconf import OmegaConf

    def walk(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, below in value.items():
            has_keys = isinstance(below, dict) and below != {}
            yield f"{prefix}{name}", HAS_KEYS if has_keys else below
            if has_keys:
                yield from walk(below, f"{prefix}{name}.")

    yield from walk(OmegaConf.to_container(native, resolve=False), "")


def _put(native: DictConfig, key: str, value: Any) -> str:
    """Set VERL's ``key`` and return its name without ``+``."""
    from omegaconf import OmegaConf

    name = spelled(key).replace("+", "")
    OmegaConf.update(native, name, value, merge=False, force_add=True)
    return name


def _get(native: DictConfig, key: str) -> Any:
    from omegaconf import OmegaConf

    value = OmegaConf.select(native, spelled(key).replace("+", ""))
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
