"""VERL's whole configuration for one experiment, composed as VERL itself composes it.

    VERL's YAML files  <  ``keys.yaml``  <  what the platform needs  <  the person's ``verl:`` section

Hydra reads VERL's YAML files where they are installed; VERL itself is not imported, so this takes a second.
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
"""What VERL needs where flash-attn is not installed: torch's own attention, which wants padded rows."""
PRECISION = ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype", "actor_rollout_ref.rollout.dtype")
"""Where the types are that trainer and rollout engine compute in."""


@dataclass(frozen=True, kw_only=True)
class Native:
    """What VERL is told."""

    config: DictConfig
    """VERL's own, interpolations unresolved; what the run decides later may still be put into it."""
    notes: tuple[str, ...]
    """What a person should know of what replaced what."""
    common: TrainerCommon
    """``trainer_common`` with a `rollout_is` that is decided."""

    def as_dict(self) -> dict[str, Any]:
        """Everything, resolved, as plain data."""
        from omegaconf import OmegaConf

        data: dict[str, Any] = OmegaConf.to_container(self.config, resolve=True)  # type: ignore[assignment]
        return data


def platform_settings(env: Mapping[str, str] = os.environ) -> Mapping[str, Any]:
    """VERL's keys that this machine needs, a GPU's or as ``VERL_PLATFORM`` says: dotted, a leading ``+`` adds one.

    :raises ConfigError: the CPU is asked for, and the package that brings it is not installed.
    """
    on_gpus = without_flash_attention(WITHOUT_FLASH_ATTENTION)
    return platform("verl", engine_has_others=True, on_gpus=on_gpus, env=env)


def compose(facts: Facts, machine: Mapping[str, Any]) -> Native:
    """VERL's configuration for the experiment of ``facts``.

    :param machine: what it needs, see `platform_settings`.
    :raises ConfigError: keys of the ``verl:`` section that VERL does not have, or that ASTuner sets, all at once; or a
        key of ours that means nothing in the mode they choose.
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
            is_free=lambda default: default in (None, {}),  # not a section with keys: that is `HAS_KEYS`
            else_="for a key that its YAML files lack write {key}",
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
    """VERL's configuration as its YAML files have it.

    :raises MissingDependency: VERL or Hydra is not installed.
    """
    found = find_spec("verl")
    if found is None or not found.submodule_search_locations or find_spec("hydra") is None:
        raise MissingDependency("the backbone verl needs VERL, which is not installed here: pip install astuner-verl")
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    folder = Path(next(iter(found.submodule_search_locations))) / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        composed: DictConfig = hydra_compose("ppo_trainer")
    return composed


def check(native: Native) -> None:
    """Ask VERL itself whether it takes the configuration. Imports VERL.

    :raises ConfigError: what VERL says, if it does not.
    """
    from hydra.errors import InstantiationException
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = native.config
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it prints that all is well
            validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=False)
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)  # left to the workers by verl
    except (AssertionError, ImportError, NotImplementedError, TypeError, ValueError, InstantiationException) as e:
        raise ConfigError(f"verl does not take this configuration: {' '.join(str(e).split())}") from e


def _check_mode(config: Config, native: DictConfig) -> None:
    """:raises ConfigError: the mode that the person chose does not go with the rest."""
    mode = native.trainer.v1.trainer_mode
    problems = []
    if mode != "sync" and config.astuner.rollout.oversample != 1:
        place = config.origins.get("astuner.rollout.oversample", Place(str(config.path)))
        problems.append(
            f"{place}: astuner.rollout.oversample means nothing with {SECTION}.{separate.KEY}: {mode}, "
            "in which groups are begun ahead anyway; leave it out"
        )
    if separate.chosen(native):
        problems += [
            f"{place_of(config, SECTION, key)}: {SECTION}.{key} {text}" for key, text in separate.wrong(native)
        ]
    if problems:
        raise ConfigError(problems)


def _unlike(default: Any, value: Any) -> str:
    """What kind of value VERL's default asks for, if ``value`` is of another; null is left to VERL."""
    if value is None or default is None or (isinstance(default, str) and "${" in default):
        return ""
    if default is HAS_KEYS or isinstance(default, dict):
        return "" if isinstance(value, dict) else "is a section of verl's; write keys below it"
    kinds = ((bool, "true or false"), ((int, float), "a number"), (str, "text"), (list, "a list"))
    kind, text = next((kind, text) for kind, text in kinds if isinstance(default, kind))
    fits = isinstance(value, kind) and isinstance(value, bool) == isinstance(default, bool)
    return "" if fits else f"should be {text}, as verl's {default!r} is"


def _every_key(native: DictConfig) -> Iterator[tuple[str, Any]]:
    """VERL's keys and sections, dotted; a section that has keys has the value `HAS_KEYS`."""
    from omegaconf import OmegaConf

    def walk(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, below in value.items():
            has_keys = isinstance(below, dict) and below != {}
            yield f"{prefix}{name}", HAS_KEYS if has_keys else below
            if has_keys:
                yield from walk(below, f"{prefix}{name}.")

    yield from walk(OmegaConf.to_container(native, resolve=False), "")


def _put(native: DictConfig, key: str, value: Any) -> str:
    """Set VERL's ``key``; its name without ``+``."""
    from omegaconf import OmegaConf

    name = spelled(key).replace("+", "")
    OmegaConf.update(native, name, value, merge=False, force_add=True)
    return name


def _get(native: DictConfig, key: str) -> Any:
    from omegaconf import OmegaConf

    value = OmegaConf.select(native, spelled(key).replace("+", ""))
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
