"""Compose Trinity's complete configuration for one experiment.

Later layers take precedence::

    Trinity's defaults  <  ``keys.yaml``  <  the platform's settings  <  the user's ``trinity:`` section

A value that Trinity would silently change during validation is an error.  Keys and types come from Trinity's own
`Config`: importing it takes a second and loads Ray and OmegaConf, but not torch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from astuner import TrainerCommon
from astuner.contracts.errors import ConfigError, MissingDependency
from astuner.contracts.secrets import redact
from astuner_ray.native import table
from astuner_ray.native.compose import HAS_KEYS, checked, layered
from astuner_ray.native.keys import flat, get, put
from astuner_trinity.facts import ENGINE, SYNC, VERL, Facts
from astuner_trinity.table import TABLE, loss_settings

__all__ = ["Facts", "Native", "compose", "every_key"]

SECTION = Facts.BACKBONE
FILE = "trinity.yaml"
PRECISION = (f"{VERL}.actor.fsdp_config.mixed_precision.param_dtype", f"{ENGINE}.dtype")
"""Keys with the data types of the trainer's passes and of the rollout engine."""
OF_VERL = tuple(f"{VERL}.{name}" for name in ("model", "actor", "ref"))
"""VERL sections that Trinity accepts from users; it silently drops all others."""


@dataclass(frozen=True, kw_only=True)
class Native:
    """Trinity's configuration for one experiment."""

    values: Mapping[str, Any]
    """Trinity's keys, nested, set by ASTuner, the platform and the user; all others have Trinity's defaults."""
    notes: tuple[str, ...]
    """Notes for the user about replaced values."""
    common: TrainerCommon
    """``trainer_common`` with `rollout_is` resolved."""

    def as_dict(self) -> dict[str, Any]:
        """Return the complete configuration as plain data, with defaults and without secrets.

        :raises ConfigError: Trinity rejects it.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            values = OmegaConf.create(_literally(self.values))
            merged = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(_trinity_config()), values))
        except OmegaConfBaseException as e:
            raise ConfigError(f"Trinity rejects this configuration: {' '.join(str(e).split())}") from e
        shown: dict[str, Any] = redact(_plain(merged), {})
        return shown

    def load(self, folder: Path) -> Any:
        """Return Trinity's own `Config`, checked and completed by Trinity; write a readable copy to ``folder``.

        Creates the folder of Trinity's files.  Imports torch and the configured classes.

        :raises ConfigError: Trinity rejects the configuration or changes it.
        """
        from trinity.common.config import LoRAConfig, load_config

        folder.mkdir(parents=True, exist_ok=True)
        path, values = folder / FILE, copy.deepcopy(dict(self.values))
        adapters = values["model"].pop("lora_configs", [])
        with open(path, "w", encoding="utf-8", opener=_for_its_owner) as file:  # it may contain keys of services
            yaml.safe_dump(_literally(values), file, sort_keys=False, allow_unicode=True)
        path.chmod(0o600)  # also if the file existed before
        try:
            config = load_config(str(path)).check_and_update()
            if adapters:  # set late: Trinity would pass them to its engines, whose servers then use the base model
                config.model.lora_configs = [LoRAConfig(**adapters[0], is_dummy=True)]  # dummy: not in any folder
            _check_parts(config)
        except _COMPLAINTS as e:
            raise ConfigError(f"Trinity rejects this configuration: {' '.join(str(e).split())}") from e
        if changed := list(_changed(self.values, config)):
            raise ConfigError([f"Trinity would change {text}" for text in changed])
        return config


_COMPLAINTS = (AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""Exceptions raised by Trinity's validators and by the classes that they import."""


def compose(facts: Facts, machine: Mapping[str, Any]) -> Native:
    """Return Trinity's configuration for the experiment of ``facts``.

    :param machine: Trinity's keys for this machine, see `astuner_trinity.facts.Platform`.
    :raises ConfigError: All keys of the ``trinity:`` section that Trinity does not have or that ASTuner sets.
    :raises MissingDependency: Trinity is not installed.
    """
    values: dict[str, Any] = {}
    if facts.a.model.lora.rank and machine.get(SYNC) == "memory":
        machine = {**machine, SYNC: "checkpoint"}  # see `Facts.wrong`

    def set_value(key: str, value: Any) -> str:
        put(values, key, copy.deepcopy(value))
        return key

    known = every_key()
    notes = layered(
        facts,
        TABLE,
        flat(machine),
        checked(
            facts,
            TABLE,
            known,
            engine="Trinity",
            unlike=lambda key, value: _unlike(key, value, known[key]),
            is_free=lambda kind: kind is Any or (get_origin(kind) or kind) is dict,
        ),
        get=partial(get, values),
        put=set_value,
    )
    common = table.corrected(facts.a.trainer_common, *(get(values, key) for key in PRECISION))
    put(values, "algorithm.policy_loss_fn_args", loss_settings(common))
    put(values, "algorithm.bypass_old_logprobs", table.old_need_no_pass(common))
    return Native(values=values, notes=notes, common=common)


def _check_parts(config: Any) -> None:
    """Check settings that Trinity itself checks only in its processes: the user's VERL keys and operators.

    :raises ValueError: VERL does not have a key, or an operator cannot be imported.
    """
    from trinity.buffer.operators import EXPERIENCE_OPERATORS

    for operator in config.data_processor.experience_pipeline.operators:
        EXPERIENCE_OPERATORS.get(operator.name)
    from hydra.errors import InstantiationException
    from trinity.trainer.verl.config import build_verl_config
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig

    whole = build_verl_config(config)
    for name in whole.model:
        if name not in HFModelConfig.__dataclass_fields__ and name != "_target_":
            raise ValueError(f"{VERL}.model.{name} is not a key of VERL")
    for name, part in (("actor", whole.actor), ("ref.fsdp_config", whole.ref.fsdp_config)):
        try:
            omega_conf_to_dataclass(part)
        except InstantiationException as e:
            raise ValueError(f"{VERL}.{name}: {e}") from e


def _changed(told: Mapping[str, Any], config: Any) -> Iterator[str]:
    """Yield ASTuner's values that Trinity has replaced."""
    for key, value in flat(told):
        now = config
        for name in key.split("."):
            now = now.get(name) if isinstance(now, Mapping) else getattr(now, name, None)
        alike = isinstance(now, Enum) and type(now)(value) is now  # an older name, or different case
        if not isinstance(value, (list, dict)) and _plain(now) != value and not alike:
            yield f"{SECTION}.{key}: {value!r} to {_plain(now)!r}; set a value that it accepts"


def _plain(value: Any) -> Any:
    """Return a configuration as plain YAML data, without classes and enumerations."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: _plain(below) for name, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def _literally(value: Any) -> Any:
    """Return ``value`` with escaped references, because OmegaConf parses it again and templates may contain ``${``."""
    if isinstance(value, Mapping):
        return {name: _literally(below) for name, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_literally(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


# ---------------------------------------------------------------------------------- Trinity's own keys


def _trinity_config() -> type[Any]:
    """Return Trinity's `Config`.

    :raises MissingDependency: Trinity is not installed.
    """
    try:
        from trinity.common.config import Config
    except ImportError as e:
        raise MissingDependency(
            f"the backbone trinity needs Trinity-RFT, which cannot be imported ({e}): pip install astuner-trinity"
        ) from e
    found: type[Any] = Config
    return found


@functools.cache
def every_key() -> Mapping[str, Any]:
    """Return Trinity's keys and sections, dotted, with their types; `HAS_KEYS` marks a section with keys."""
    known = dict(_walk(_trinity_config(), ""))
    known[VERL] = HAS_KEYS
    return {**known, **dict.fromkeys(OF_VERL, dict)}


def _walk(config: type[Any], prefix: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        kind, key = _without_none(hints[field.name]), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(kind):
            yield key, HAS_KEYS
            yield from _walk(kind, f"{key}.")  # type: ignore[arg-type]  # a class, not an instance
        else:
            yield key, kind


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return next(one for one in get_args(kind) if one is not type(None))
    return kind


def _unlike(key: str, value: Any, kind: Any) -> str:
    """Return the type that Trinity expects if ``value`` has another type, according to Trinity's schema."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if kind is HAS_KEYS:
        return "" if isinstance(value, Mapping) else "is a section of Trinity; write keys below it"
    if key in OF_VERL:
        return "" if isinstance(value, Mapping) else "is a section of VERL; write keys below it"
    if kind is bool and not isinstance(value, bool):  # OmegaConf accepts "no", 1 and 0
        return f"should be true or false, got {value!r}"
    if kind is str and not isinstance(value, str):  # OmegaConf accepts numbers
        return f"should be text, got {value!r}"
    section, _, name = key.rpartition(".")
    try:
        OmegaConf.merge(OmegaConf.structured(_class_of(section)), {name: value})
    except (OmegaConfBaseException, AttributeError) as e:  # Trinity's enumerations call .lower() on any value
        reason = " ".join(str(e).split("full_key")[0].split())
        return f"should be {_named(kind)}, got {value!r}" if _named(kind) else f"is not accepted by Trinity: {reason}"
    return ""


def _class_of(section: str) -> type[Any]:
    """Return Trinity's class for a section of keys."""
    found = _trinity_config()
    for name in filter(None, section.split(".")):
        found = _without_none(get_type_hints(found)[name])
    return found


def _named(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(str(member.value) for member in kind)}"
    return {int: "an integer", float: "a number", bool: "true or false", str: "text"}.get(kind, "")
