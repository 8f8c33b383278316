"""A loaded experiment: every key has a checked value, and its origin is known.

Frozen, picklable (it travels to Ray workers), and written out as YAML that `load_config` reads back to the same
values without the original file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel

from astuner.config.schema import Astuner, Model, Policy
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

    astuner: Astuner
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
            found = [place for name, place in self.origins.items() if f"{name}.".startswith(f"{key}.")]
            if found:
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
        """The class that a plugin brings as the part ``name``; as `astuner.plugins.registry.part`."""
        return registry.part(self.plugins, name, wanted_by=wanted_by)

    def model_of(self, policy: str) -> Model:
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
        if folder.is_dir():
            return str(folder.resolve())
        found: str | None = self.plugins.hook.locate_model(path=path)
        return found or path

    def as_dict(self) -> dict[str, Any]:
        """Every setting as plain data, defaults included and secrets removed."""
        data: dict[str, Any] = {"astuner": self.astuner.model_dump(mode="json")}
        for key, section in self._placed.items():
            at = data
            for part in key[:-1]:
                at = at.setdefault(part, {})
            at[key[-1]] = section.model_dump(mode="json")
        clean: dict[str, Any] = redact(data, self._expressions)
        return clean

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
