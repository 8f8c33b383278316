"""Trinity's whole configuration for one experiment.

    Trinity's defaults  <  `table.ROWS`  <  what the platform needs  <  the person's ``trinity:`` section

A value that Trinity would change in silence, when it looks through the whole, is an error.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from astuner.contracts.errors import ConfigError
from astuner.contracts.secrets import redact
from astuner_ray.native.compose import Composed, checked, layered
from astuner_ray.native.keys import flat, get, put
from astuner_trinity.always import VERL
from astuner_trinity.facts import Facts
from astuner_trinity.schema import every_key, trinity_config, wrong
from astuner_trinity.table import ROWS

__all__ = ["Facts", "Native", "compose"]

SECTION = Facts.BACKBONE
FILE = "trinity.yaml"


@dataclass(frozen=True, kw_only=True)
class Native(Composed):
    """What Trinity is told."""

    values: Mapping[str, Any]
    """Trinity's keys, nested: what ASTuner, the platform and the person set; Trinity's defaults are the rest."""

    def as_dict(self) -> dict[str, Any]:
        """Everything as Trinity reads it, defaults included and secrets removed; plain data.

        :raises ConfigError: Trinity does not take it.
        """
        shown: dict[str, Any] = redact(_plain(self._merged()), {})
        return shown

    def load(self, folder: Path) -> Any:
        """Trinity's own `Config`, checked and completed by Trinity; a copy for a person is in ``folder``.

        Makes the folder of Trinity's files.  Imports torch, and the classes that the configuration names.

        :raises ConfigError: what Trinity says, if it does not take the configuration, or changes it.
        """
        from trinity.common.config import load_config

        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        with open(path, "w", encoding="utf-8", opener=_for_its_owner) as file:  # it may hold keys to other services
            yaml.safe_dump(_literally(self.values), file, sort_keys=False, allow_unicode=True)
        path.chmod(0o600)  # also where an older one was there
        try:
            config = load_config(str(path)).check_and_update()
            _check_parts(config)
        except _COMPLAINTS as e:
            raise ConfigError(f"Trinity does not take this configuration: {' '.join(str(e).split())}") from e
        if changed := list(_changed(self.values, config)):
            raise ConfigError([f"Trinity would not keep {text}" for text in changed])
        return config

    def _merged(self) -> Any:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            values = OmegaConf.create(_literally(self.values))
            return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(trinity_config()), values))
        except OmegaConfBaseException as e:
            raise ConfigError(f"Trinity does not take this configuration: {' '.join(str(e).split())}") from e


_COMPLAINTS = (AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What Trinity's validators, and the classes that they import, raise where something is not to their liking."""


def compose(facts: Facts, platform: Mapping[str, Any]) -> Native:
    """Trinity's configuration for the experiment of ``facts``.

    :param platform: Trinity's keys that the machine needs, see `astuner_trinity.platforms`.
    :raises ConfigError: keys of the ``trinity:`` section that Trinity does not have, or that ASTuner sets, all at once.
    :raises MissingDependency: Trinity is not installed.
    """
    values: dict[str, Any] = {}

    def set_value(key: str, value: Any) -> str:
        put(values, key, copy.deepcopy(value))
        return key

    known = every_key()
    composed = layered(
        facts,
        ROWS,
        flat(platform),
        checked(facts, known, lambda key, value: wrong(key, value, known)),
        get=partial(get, values),
        put=set_value,
    )
    return Native(values=values, written=composed.written, notes=composed.notes)


def _check_parts(config: Any) -> None:
    """What Trinity leaves to the processes that it starts, which would say it in a log file: a person's own keys of
    VERL, and operators that they name.

    :raises ValueError: VERL has no such key.
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
            raise ValueError(f"{VERL}.model.{name} is no key of VERL's")
    for name, part in (("actor", whole.actor), ("ref.fsdp_config", whole.ref.fsdp_config)):
        try:
            omega_conf_to_dataclass(part)
        except InstantiationException as e:
            raise ValueError(f"{VERL}.{name}: {e}") from e


def _changed(told: Mapping[str, Any], config: Any) -> Iterator[str]:
    """Values of ours that Trinity has replaced."""
    for key, value in flat(told):
        now = config
        for name in key.split("."):
            now = now.get(name) if isinstance(now, Mapping) else getattr(now, name, None)
        if not isinstance(value, (list, dict)) and _plain(now) != value and not _alike(now, value):
            yield f"{SECTION}.{key}: {value!r}; it makes that {_plain(now)!r}"


def _alike(now: Any, value: Any) -> bool:
    """Whether an enumeration has the value under an older name or in other letters."""
    return isinstance(now, Enum) and type(now)(value) is now


def _plain(value: Any) -> Any:
    """A configuration as YAML has it: no classes, no enumerations."""
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
    """``value`` so that OmegaConf, which reads it again, takes no text for a reference, as a template may hold one."""
    if isinstance(value, Mapping):
        return {name: _literally(below) for name, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_literally(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
