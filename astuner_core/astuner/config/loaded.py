"""A loaded experiment: checked values of all keys, and their origins.

A `Config` is frozen and picklable, because Ray workers receive it. `load_config` reads its YAML form back to the same
values without the original file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel

import astuner
from astuner.config.schema import AstunerSection, ModelSection, Policy
from astuner.contracts.errors import AstunerError, ConfigError, problems_of
from astuner.contracts.places import Key, Place, Tree
from astuner.contracts.secrets import redact
from astuner.contracts.types import DEFAULT_POLICY
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager

Added = TypeVar("Added", bound=BaseModel)

RESOLVED = "resolved"
"""Root section of a written-out config: its original file, the keys set there, and the keys implied by others."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one experiment, created by `load_config`."""

    astuner: AstunerSection
    path: Path
    """The experiment file."""
    plugins: PluginManager = field(repr=False, compare=False)
    """Plugins enabled for this experiment. After unpickling, the same selection of the plugins installed there."""
    origins: Mapping[str, Place]
    """Dotted key -> the place that sets or implies it. Other keys have their defaults."""
    written: frozenset[str]
    """Dotted keys set by the user."""
    notes: tuple[str, ...] = ()
    """Notes for the user, such as legacy spellings and ignored sections."""
    wrong: frozenset[str] = frozenset()
    """Dotted keys with errors, which are left out (`astuner.config.loading.read_config`). Empty in a run."""
    _sections: Mapping[tuple[str, str], BaseModel] = field(default_factory=dict, repr=False)
    _placed: Mapping[Key, BaseModel] = field(default_factory=dict, repr=False)
    _expressions: Mapping[Key, str] = field(default_factory=dict, repr=False)

    @property
    def base_dir(self) -> Path:
        """Return the folder of the experiment file, the base of user code and relative data paths."""
        return self.path.parent

    @property
    def experiment_name(self) -> str:
        """Return ``astuner.experiment_name``, by default the name of the file."""
        return self.astuner.experiment_name

    @property
    def run_dir(self) -> Path:
        """Return ``experiment_dir/experiment_name``, relative to the current folder unless absolute."""
        return Path(self.astuner.experiment_dir).expanduser() / self.experiment_name

    def place(self, key: str) -> Place:
        """Return the place of a full key, of the first key below it, or of the first key in its section."""
        while "." in key:
            if found := [place for name, place in self.origins.items() if f"{name}.".startswith(f"{key}.")]:
                return min(found, key=lambda place: (not place.line, place.line, place.column))
            key = key.rpartition(".")[0]
        return Place(str(self.path))

    def section(self, kind: str, name: str) -> Any:
        """Return the checked section of a provider (or its defaults), or None if the provider has no model.

        :param kind: A kind of `astuner.contracts.hookspecs.KINDS`.
        :param name: Any accepted name of the provider.
        """
        return self._sections.get((kind, name))

    def keys_of(self, added: type[Added]) -> Added:
        """Return the keys that a package adds below ``astuner``, or their defaults if the package is disabled.

        :param added: The section class that the package registers.
        """
        places = [self.astuner, *(section for _, section in self.astuner)]
        return next((section for section in places if isinstance(section, added)), None) or added()

    def backbone_section(self, name: str) -> Any:
        """Return the checked root section of the selected backbone; None for other backbones or without a model."""
        return self.section("backbone", name)

    def resolve(self, kind: str, reference: str) -> Any:
        """Import the object that ``reference`` names; user code is relative to the experiment file.

        :raises astuner.contracts.errors.PluginError: As `astuner.plugins.registry.resolve`.
        """
        return registry.resolve(self.plugins, kind, reference, base_dir=self.base_dir)

    def part(self, name: str, *, wanted_by: str) -> Any:
        """Return the class that a plugin registers as the part ``name``; see `astuner.plugins.registry.find_part`."""
        return registry.find_part(self.plugins, name, wanted_by=wanted_by)

    def model_of(self, policy: str) -> ModelSection:
        """Return the model section of a policy: ``astuner.model`` overridden by its entry in ``astuner.policies``."""
        own = self.astuner.policies.get(policy, Policy())
        written: dict[str, Any] = {name: value for name, value in own if value is not None}
        if own.path:
            written["revision"] = None  # it belongs to astuner.model.path
        return self.astuner.model.model_copy(update=written)

    def locate_model(self, *, policy: str = DEFAULT_POLICY) -> str:
        """Return the model of a policy: an existing folder, the folder of a plugin's model, or a Hugging Face name."""
        path = self.model_of(policy).path
        folder = self.base_dir / Path(path).expanduser()
        if os.path.isdir(folder):
            return str(folder.resolve())
        return str(self.plugins.hook.locate_model(path=path) or path)

    def as_dict(self) -> dict[str, Any]:
        """Return all settings as plain data, including defaults and without secrets."""
        tree = Tree({"astuner": self.astuner.model_dump(mode="json")})
        for key, section in self._placed.items():
            tree.put(key, section.model_dump(mode="json"))
        return dict(redact(tree.data, self._expressions))

    def dump_yaml(self) -> str:
        """Return the settings as YAML that `load_config` reads back, even after the original file has changed."""
        implied = sorted(set(self.origins) - self.written)
        origin = {"file": str(self.path.absolute()), "written": sorted(self.written), "implied": implied}
        return yaml.safe_dump({RESOLVED: origin, **self.as_dict()}, sort_keys=False, allow_unicode=True, width=120)

    def items(self) -> Iterator[tuple[str, Any, str]]:
        """Yield every key with its value (without secrets) and its origin, in the order of the schema."""
        for key, value in Tree(self.as_dict()).leaves():
            name = ".".join(key)
            yield name, value, str(self.origins.get(name, "default"))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return astuner.older_names(f"{__name__}.Config")(name)(self)


T = TypeVar("T")


class Mistakes:
    """Collects the errors of several checks, with their places in the experiment."""

    def __init__(self, config: Config, told: Sequence[str] = ()) -> None:
        """Start with the errors that are known already.

        :param told: Their messages.
        """
        self._config = config
        self._places = tuple({f"{place}: " for place in (*config.origins.values(), config.path)})
        self.told = list(told)
        self._left_out = False
        self._errors: list[AstunerError] = [ConfigError(list(told))] if told else []

    def ask(self, key: str, question: Callable[[], T], *, needs: Sequence[str] = ()) -> T | None:
        """Return the result of ``question``, or None if it raises `AstunerError` or depends on a key with an error.

        :param key: Key to report with an error; empty if the error message names it.
        :param needs: Other keys and sections that the question depends on.
        """
        about = tuple(f"{name}." for name in (key, *needs) if name)
        if any(f"{wrong}.".startswith(about) for wrong in self._config.wrong):
            self._left_out = True
            return None
        try:
            return question()
        except AstunerError as e:
            self.keep(key, e)
            return None

    def keep(self, key: str, error: AstunerError) -> None:
        """Record an error, like `ask`."""
        self._errors.append(error)
        for text in problems_of(error):
            told = self._place(key, text) if key and not text.startswith(self._places) else text
            if told not in self.told:
                self.told.append(told)

    def raise_all(self) -> None:
        """Raise the recorded errors, if any.

        :raises AstunerError: The only error, with its place.
        :raises ConfigError: All errors, if there are several or a question was skipped.
        """
        if len(self._errors) == 1 and not isinstance(self._errors[0], ConfigError):
            self._errors[0].args = (self.told[0], *self._errors[0].args[1:])
            raise self._errors[0]
        if self._errors or self._left_out:
            raise ConfigError(self.told)

    def _place(self, key: str, text: str) -> str:
        """Return ``text`` with the place of ``key``, or of the key below it whose value ``text`` mentions."""
        values = {
            name: value
            for name, value, _ in self._config.items()
            if name in self._config.written and name.startswith(f"{key}.") and isinstance(value, str) and len(value) > 2
        }
        named = [name for name, value in values.items() if value in text or os.path.expanduser(value) in text]
        key = max(named, key=lambda name: len(values[name]), default=key)
        about = "" if key in text else f"{key}: "
        return f"{self._config.place(key)}: {about}{text}"
