"""VERL's whole configuration for one experiment, composed as VERL itself composes it.

    VERL's YAML files  <  `table.ROWS`  <  what the platform needs  <  the person's ``verl:`` section

Hydra reads VERL's YAML files where they are installed; VERL itself is not imported, so this takes a second.  Nothing
is dropped: a key that VERL does not have, or that ASTuner must set itself, is an error with its place.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from astuner.config.places import Place
from astuner.config.secrets import is_secret
from astuner.contracts.errors import ConfigError, MissingDependency
from astuner_ray.native.keys import nearest, place_of, refuse, spelled, written
from astuner_ray.native.table import UNSET
from astuner_verl import separate
from astuner_verl.facts import Facts
from astuner_verl.locked import why_locked
from astuner_verl.table import ROWS

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from astuner.config import Config

__all__ = ["Facts", "Native", "check", "compose", "defaults"]

SECTION = "verl"
_BELOW: Final = object()
"""In place of the value of a section that has keys."""


@dataclass(frozen=True, kw_only=True)
class Native:
    """What VERL is told."""

    config: DictConfig
    """VERL's own, interpolations unresolved; what the run decides later may still be put into it."""
    written: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """VERL's keys that the person wrote over ASTuner's: key -> (ASTuner's value, theirs)."""
    notes: tuple[str, ...] = ()
    """What a person should know: each of these, and what the platform replaced."""

    def as_dict(self) -> dict[str, Any]:
        """Everything, resolved, as plain data."""
        from omegaconf import OmegaConf

        data: dict[str, Any] = OmegaConf.to_container(self.config, resolve=True)  # type: ignore[assignment]
        return data


def compose(facts: Facts, platform: Mapping[str, Any]) -> Native:
    """VERL's configuration for the experiment of ``facts``.

    :param platform: what the machine needs, see `astuner_verl.platforms`.
    :raises ConfigError: keys of the ``verl:`` section that VERL does not have, or that ASTuner sets, all at once; or a
        key of ours that means nothing in the mode they choose.
    :raises MissingDependency: VERL or Hydra is not installed.
    """
    config, native = facts.config, defaults()
    mine = _checked(config, native)
    notes: list[str] = []
    decided: dict[str, tuple[str, ...]] = {}
    for row in ROWS:
        if (value := row.value(facts)) is not UNSET:
            decided[_put(native, row.native, value)] = row.ours
    for key, value in platform.items():
        before = _get(native, key)
        name = _put(native, key, value)
        asked = [f"astuner.{ours}" for ours in decided.get(name, ()) if facts.is_written(ours)]
        if asked and before != value:
            notes.append(f"{' and '.join(asked)}: this platform needs {name}: {value} instead of {before}")
        decided.setdefault(name, ())
    written: dict[str, tuple[Any, Any]] = {}
    for key, value in mine.items():
        before = _get(native, key)
        name = _put(native, key, value)
        if name in decided and before != value:
            written[name] = (before, value)
            source = " and ".join(f"astuner.{ours}" for ours in decided[name])
            shown = "…" if is_secret(name.rpartition(".")[2]) else value
            whose = f"{before}, which came from {source}" if source else f"{before}"
            notes.append(f"{place_of(config, SECTION, key)}: {SECTION}.{name}: {shown} replaces {whose}")
    _check_mode(config, native)
    if _get(native, separate.LENT) is not None:
        _put(native, separate.LENT, separate.training_gpus(native))
    return Native(config=native, written=written, notes=tuple(notes))


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


def _checked(config: Config, native: DictConfig) -> dict[str, Any]:
    """What the person wants: VERL's key, with its ``+`` -> value."""
    known = dict(_every_key(native))
    wanted: dict[str, Any] = {}
    problems = []
    for key, value in written(config, SECTION).items():
        if value in (None, {}) and known.get(key) is _BELOW:
            continue  # `trainer:` alone is empty
        wanted[key] = value
        if message := _wrong(key, value, known):
            problems.append((place_of(config, SECTION, key), f"{SECTION}.{key} {message}"))
    refuse(problems)
    return wanted


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


def _wrong(key: str, value: Any, known: Mapping[str, Any]) -> str:
    """What is wrong with one of the person's keys, or an empty string."""
    *sections, last = key.split(".")
    name = ".".join([*sections, last.removeprefix("+")])
    if reason := why_locked(name):
        return f"is set by ASTuner: {reason}"
    if name in known:
        return _unlike(known[name], value)
    if last.startswith("+") or _is_free(name, known):
        return ""
    beside = [k for k in known if k.rpartition(".")[0] == name.rpartition(".")[0]]
    near = nearest(name, beside) or nearest(name, [k for k in known if not why_locked(k)])
    if near and (reason := why_locked(near)):
        return f"is no key of verl; {near} is one, and is set by ASTuner: {reason}"
    added = f"for a key that its YAML files lack write {'.'.join([*sections, f'+{last}'])}"
    return f"is no key of verl; {f'did you mean {near}?' if near else added}"


def _is_free(name: str, known: Mapping[str, Any]) -> bool:
    """Whether VERL leaves what stands below a section of ``name`` to the person: it is empty or null there."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return bool(name) and known[name] in (None, {})  # not a section with keys: that is `_BELOW`


def _unlike(default: Any, value: Any) -> str:
    """What kind of value VERL's default asks for, if ``value`` is of another; null is left to VERL."""
    if value is None or default is None or (isinstance(default, str) and "${" in default):
        return ""
    if default is _BELOW or isinstance(default, dict):
        return "" if isinstance(value, dict) else "is a section of verl's; write keys below it"
    kinds = ((bool, "true or false"), ((int, float), "a number"), (str, "text"), (list, "a list"))
    kind, text = next((kind, text) for kind, text in kinds if isinstance(default, kind))
    fits = isinstance(value, kind) and isinstance(value, bool) == isinstance(default, bool)
    return "" if fits else f"should be {text}, as verl's {default!r} is"


def _every_key(native: DictConfig) -> Iterator[tuple[str, Any]]:
    """VERL's keys and sections, dotted; a section that has keys has the value `_BELOW`."""
    from omegaconf import OmegaConf

    def walk(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, below in value.items():
            has_keys = isinstance(below, dict) and below != {}
            yield f"{prefix}{name}", _BELOW if has_keys else below
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
