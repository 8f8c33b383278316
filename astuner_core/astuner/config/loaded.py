"""A loaded experiment: every key has a checked value, and its origin is known.

Frozen, picklable (it travels to Ray workers), and written out as YAML that `load_config` reads back to the same
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
"""The root section that marks a written-out config: its file, and which keys were written and implied by others."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one experiment; made by `load_config`."""

    astuner: AstunerSection
    path: Path
    """The experiment file."""
    plugins: PluginManager = field(repr=False, compare=False)
    """Those that are on for this experiment; in another process, the same ones of what is installed there."""
    origins: Mapping[str, Place]
    """Dotted key -> where it was written, or what implied it; a key that is not here has its default."""
    written: frozenset[str]
    """The dotted keys that a person wrote."""
    notes: tuple[str, ...] = ()
    """What a person should know: older spellings used, sections not read."""
    wrong: frozenset[str] = frozenset()
    """The dotted keys that are wrong, and left out here (`astuner.config.loading.read_config`); a run's has none."""
    _sections: Mapping[tuple[str, str], BaseModel] = field(default_factory=dict, repr=False)
    _placed: Mapping[Key, BaseModel] = field(default_factory=dict, repr=False)
    _expressions: Mapping[Key, str] = field(default_factory=dict, repr=False)

    @property
    def base_dir(self) -> Path:
        """The experiment file's folder, where the user's own code and relative data paths are looked for."""
        return self.path.parent

    @property
    def experiment_name(self) -> str:
        """The file's name unless the experiment has one of its own."""
        return self.astuner.experiment_name

    @property
    def run_dir(self) -> Path:
        """``experiment_dir/experiment_name``, relative to the current folder unless absolute."""
        return Path(self.astuner.experiment_dir).expanduser() / self.experiment_name

    def place(self, key: str) -> Place:
        """Where a whole key was written: it, or the first key below it, or below the section around it."""
        while "." in key:
            if found := [place for name, place in self.origins.items() if f"{name}.".startswith(f"{key}.")]:
                return min(found, key=lambda place: (not place.line, place.line, place.column))
            key = key.rpartition(".")[0]
        return Place(str(self.path))

    def section(self, kind: str, name: str) -> Any:
        """The checked section of a provider, its defaults if it was not written; None when it has no model.

        :param kind: as in `astuner.contracts.hookspecs.KINDS`.
        :param name: any spelling of the provider's name.
        """
        return self._sections.get((kind, name))

    def keys_of(self, added: type[Added]) -> Added:
        """The keys that a package adds below ``astuner``, as the class that it registers; the defaults if it is off."""
        places = [self.astuner, *(section for _, section in self.astuner)]
        return next((section for section in places if isinstance(section, added)), None) or added()

    def backbone_section(self, name: str) -> Any:
        """The checked root section of the chosen backbone; None for another one, or when it has no model."""
        return self.section("backbone", name)

    def resolve(self, kind: str, reference: str) -> Any:
        """Import what ``reference`` names, the user's own code relative to the experiment file.

        :raises astuner.contracts.errors.PluginError: as `astuner.plugins.registry.resolve`.
        """
        return registry.resolve(self.plugins, kind, reference, base_dir=self.base_dir)

    def part(self, name: str, *, wanted_by: str) -> Any:
        """The class that a plugin brings as the part ``name``; as `astuner.plugins.registry.find_part`."""
        return registry.find_part(self.plugins, name, wanted_by=wanted_by)

    def model_of(self, policy: str) -> ModelSection:
        """The model section of one policy: ``astuner.model``, with what ``astuner.policies`` says differently."""
        own = self.astuner.policies.get(policy, Policy())
        written: dict[str, Any] = {name: value for name, value in own if value is not None}
        if own.path:
            written["revision"] = None  # the other model's
        return self.astuner.model.model_copy(update=written)

    def locate_model(self, *, policy: str = DEFAULT_POLICY) -> str:
        """What a policy's ``model.path`` means: a folder (from the experiment file's), a shipped model's, or a name."""
        path = self.model_of(policy).path
        folder = self.base_dir / Path(path).expanduser()
        if os.path.isdir(folder):
            return str(folder.resolve())
        return str(self.plugins.hook.locate_model(path=path) or path)

    def as_dict(self) -> dict[str, Any]:
        """Every setting as plain data, defaults included and secrets removed."""
        tree = Tree({"astuner": self.astuner.model_dump(mode="json")})
        for key, section in self._placed.items():
            tree.put(key, section.model_dump(mode="json"))
        return dict(redact(tree.data, self._expressions))

    def dump_yaml(self) -> str:
        """The settings as YAML that `load_config` reads back, also after the original file has changed."""
        implied = sorted(set(self.origins) - self.written)
        origin = {"file": str(self.path.absolute()), "written": sorted(self.written), "implied": implied}
        return yaml.safe_dump({RESOLVED: origin, **self.as_dict()}, sort_keys=False, allow_unicode=True, width=120)

    def items(self) -> Iterator[tuple[str, Any, str]]:
        """Every key with its value (secrets removed) and its origin, in the order of the schema."""
        for key, value in Tree(self.as_dict()).leaves():
            name = ".".join(key)
            yield name, value, str(self.origins.get(name, "default"))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return astuner.older_names(f"{__name__}.Config")(name)(self)


T = TypeVar("T")


class Mistakes:
    """Asks one thing after the other, and keeps what is refused, with the place in the experiment that leads there."""

    def __init__(self, config: Config, told: Sequence[str] = ()) -> None:
        """:param told: mistakes that are known already."""
        self._config = config
        self._places = tuple({f"{place}: " for place in (*config.origins.values(), config.path)})
        self.told = list(told)
        self._left_out = False
        self._errors: list[AstunerError] = [ConfigError(list(told))] if told else []

    def ask(self, key: str, question: Callable[[], T], *, needs: Sequence[str] = ()) -> T | None:
        """What ``question`` gives; None where it raises an `AstunerError`, or what it is about is known to be wrong.

        :param key: of the experiment, to blame for what is refused; empty: whoever refuses says it.
        :param needs: other keys and sections that it is about.
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
        """Keep what was refused; as `ask` does."""
        self._errors.append(error)
        for text in problems_of(error):
            told = self._place(key, text) if key and not text.startswith(self._places) else text
            if told not in self.told:
                self.told.append(told)

    def raise_all(self) -> None:
        """:raises AstunerError: the one that was raised, with its place.
        :raises ConfigError: all of them, where there are several; none, where something could not even be asked.
        """
        if len(self._errors) == 1 and not isinstance(self._errors[0], ConfigError):
            self._errors[0].args = (self.told[0], *self._errors[0].args[1:])
            raise self._errors[0]
        if self._errors or self._left_out:
            raise ConfigError(self.told)

    def _place(self, key: str, text: str) -> str:
        """``text`` behind the place of ``key``; of a section, the place of the key in it whose value ``text`` names."""
        values = {
            name: value
            for name, value, _ in self._config.items()
            if name in self._config.written and name.startswith(f"{key}.") and isinstance(value, str) and len(value) > 2
        }
        named = [name for name, value in values.items() if value in text or os.path.expanduser(value) in text]
        key = max(named, key=lambda name: len(values[name]), default=key)
        about = "" if key in text else f"{key}: "
        return f"{self._config.place(key)}: {about}{text}"
