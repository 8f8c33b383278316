"""Check the sections that belong to plugins.

The section of a task reader is ``astuner.task_reader.<name>``, of a judge ``astuner.task_judge.<name>``, of a workflow
``astuner.rollout.<name>``, of a service ``astuner.services.<name>``, and of a backbone the root section with its name.
The provider's model checks each section. A section without an installed owner is an error, unless this run does not use
it. This module also suggests full keys for misplaced ones (`whole_keys`).
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from astuner.config import schema
from astuner.config.checking import check_section, keys_of_other_tools, section_of, unknown_key, walk_fields
from astuner.contracts.errors import AmbiguousName, PluginError, UnknownName
from astuner.contracts.places import Key, Report, Tree, did_you_mean, dotted
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager
from astuner.plugins.user_code import find_user_file


@dataclass(frozen=True)
class Home:
    """Location of the sections of a kind, and the key that selects one of them."""

    kind: str
    section: Key
    chooser: str
    """Empty if the command line selects it (``--with NAME``)."""
    model: type[BaseModel]


HOMES = (
    Home("task reader", ("astuner", "task_reader"), "type", schema.TaskReader),
    Home("workflow", ("astuner", "rollout"), "workflow", schema.Rollout),
    Home("judge", ("astuner", "task_judge"), "judge", schema.TaskJudge),
    Home("service", ("astuner", "services"), "", schema.Services),
)


_NAMED: Mapping[Key, str] = {
    ("astuner", "trainer_common", "logger"): "log sink",
    ("astuner", "trainer_common", "algorithm", "loss"): "loss",
    ("astuner", "trainer_common", "algorithm", "adv_estimator"): "advantage estimator",
    ("astuner", "rollout", "compute_madness_checklist"): "output check",
    ("astuner", "trainer_common", "sentinel", "rules"): "sentinel rule",
}
"""Keys whose values are names of providers without sections -> their kind."""


@dataclass
class Sections:
    """The plugin sections of one experiment."""

    tree: Tree
    manager: PluginManager
    report: Report
    models: dict[tuple[str, str], BaseModel] = field(default_factory=dict)
    """(kind, any accepted name) -> the checked section."""
    places: dict[Key, BaseModel] = field(default_factory=dict)
    """Key -> the checked section."""
    taken: set[Key] = field(default_factory=set)
    """Keys that this class has checked, with or without errors."""

    def check(self, base_dir: Path) -> None:
        """Check every plugin section below ``astuner:`` and rename it to its owner's current name in the tree."""
        for home in HOMES:
            chosen = self._chosen(home, base_dir)
            parent = self.tree.get(home.section)
            extra = [name for name in parent if name not in home.model.model_fields] if isinstance(parent, dict) else []
            seen: dict[Key, registry.Offer] = {}
            for name in extra:
                found = self._owner(home, name, chosen)
                if found is None:
                    self.tree.remove((*home.section, name))
                else:
                    self._settle(home.section, name, found, seen)
            if chosen is not None:
                seen.setdefault((*home.section, chosen.full_name), chosen)
            for key, found in seen.items():
                self._check_section(found, key)
        self._check_names()

    def check_roots(self, chosen: registry.Offer) -> None:
        """Check the root section of the selected backbone; remove sections of other backbones, with one note."""
        tree, report = self.tree, self.report
        backbones = registry.offers(self.manager, "backbone")
        owners = {name: found for found in backbones for name in (found.name, *found.spellings)}
        skipped: list[str] = []
        seen: dict[Key, registry.Offer] = {}
        for root in [name for name in tree.data if name != "astuner"]:
            found, key = owners.get(root), (root,)
            if found == chosen:
                self._settle((), root, chosen, seen)
            elif found is not None or ("backbone", root) in registry.known_plugins():
                skipped.append(f"{root}:")
                tree.remove(key)
            elif root in schema.AstunerSection.model_fields:
                report.problem(tree.place(key), f"section {root} belongs below `astuner:`; move and indent it")
            elif close := did_you_mean(root, schema.AstunerSection.model_fields):
                report.problem(tree.place(key), f"unknown section {root}{close} It belongs below astuner:")
            else:
                unknown_key(key, ["astuner", *sorted({owner.full_name for owner in owners.values()})], tree, report)
        if skipped:
            whose = "sections of other backbones" if len(skipped) > 1 else "a section of another backbone"
            report.note(f"{', '.join(skipped)} ignored: {whose}, not of {chosen.full_name!r}")
        self._check_section(chosen, (chosen.full_name,))

    def choose(self, kind: str, reference: str, key: Key) -> registry.Offer | None:
        """Return the provider that ``reference`` names, or report an error and return None.

        Replaces a legacy name in the tree by the current one.
        """
        try:
            found = registry.find_offer(self.manager, kind, reference)
        except (UnknownName, AmbiguousName) as e:
            self.report.problem(self.tree.place(key), f"{dotted(key)}: {e}")
            return None
        if reference not in (found.full_name, f"{found.plugin.name}/{found.name}"):
            self.report.note(f"{dotted(key)}: {reference!r} is now {found.full_name!r}", self.tree.place(key))
        self.tree.put(key, found.full_name)
        return found

    def _chosen(self, home: Home, base_dir: Path) -> registry.Offer | None:
        key = (*home.section, home.chooser)
        reference = self.tree.get(key) if home.chooser else None
        if not isinstance(reference, str) or not reference:
            return None
        if registry.is_code(reference):
            if find_user_file(reference, base_dir) is not None:
                return None  # user code takes precedence over a plugin's legacy name
            try:
                registry.find_offer(self.manager, home.kind, reference)
            except UnknownName:
                if registry.hint_for(home.kind, reference) is None:
                    return None
        return self.choose(home.kind, reference, key)

    def _owner(self, home: Home, name: str, chosen: registry.Offer | None) -> registry.Offer | None:
        key, tree, report = (*home.section, name), self.tree, self.report
        if chosen is not None and name in {chosen.name, *chosen.spellings}:
            return chosen
        try:
            return registry.find_offer(self.manager, home.kind, name)
        except AmbiguousName as e:
            report.problem(tree.place(key), f"{dotted(key)}: {e}")
        except UnknownName:
            dist = registry.hint_for(home.kind, name)
            if dist is not None and isinstance(tree.get(key), dict):
                report.note(f"{dotted(key)} ignored: its package {dist} is not installed", tree.place(key))
            else:
                known = {*home.model.model_fields, *(n for _, n, _ in self.manager.offers(home.kind))}
                unknown_key(key, sorted(known), tree, report)
        return None

    def _settle(self, section: Key, name: str, found: registry.Offer, seen: dict[Key, registry.Offer]) -> None:
        """Rename a section to its owner's full name; report an error if both names are present."""
        key, settled, tree = (*section, name), (*section, found.full_name), self.tree
        if settled in seen or (key != settled and tree.has(settled)):
            self.report.problem(tree.place(key), f"{dotted(key)} and {dotted(settled)} are the same section; keep one")
            tree.remove(key)
            return
        if key != settled:
            self.report.note(f"{dotted(key)} is now {dotted(settled)}", tree.place(key))
            tree.move(key, settled)
        seen[settled] = found

    def _check_section(self, found: registry.Offer, key: Key) -> None:
        value, place = self.tree.get(key), self.tree.place(key)
        self.taken.add(key)
        if value is not None and not isinstance(value, dict):
            self.report.problem(place, f"{dotted(key)} should be a section (keys below it), got {value!r}")
        elif found.provider.config is None:
            if value:
                self.report.problem(
                    place, f"{dotted(key)}: the {found.kind} {found.full_name!r} takes no options; remove its keys"
                )
        else:
            try:
                model = registry.import_target(found.provider.config)
            except PluginError as e:
                self.report.problem(place, f"{dotted(key)}: {e}")
            else:
                if (checked := check_section(model, self.tree, key, self.report)) is not None:
                    self.places[key] = checked
                    self._keep(found, checked)

    def _keep(self, found: registry.Offer, model: BaseModel) -> None:
        self.models.update({(found.kind, name): model for name in (found.name, *found.spellings)})

    def _check_names(self) -> None:
        """Report names that are not registered. User code is checked when the run starts."""
        for key, kind in _NAMED.items():
            value = self.tree.get(key)
            each = {(*key, str(i)): name for i, name in enumerate(value)} if isinstance(value, list) else {key: value}
            for at, name in each.items():
                if not isinstance(name, str):
                    continue
                try:
                    found = registry.find_offer(self.manager, kind, name)
                except (UnknownName, AmbiguousName) as e:
                    # The package of a default may be missing.
                    if self.tree.is_written(key) and not registry.is_code(name):
                        self.report.problem(self.tree.place(at), f"{dotted(key)}: {e}")
                    continue
                if kind == "log sink" and found.provider.config is not None:
                    self._keep(found, registry.import_target(found.provider.config)())


def key_models(manager: PluginManager) -> list[tuple[Key, type[BaseModel]]]:
    """Return the keys and models of the section ``astuner`` and of all plugin sections that can be imported."""
    found: list[tuple[Key, type[BaseModel]]] = [(("astuner",), schema.with_packages(manager))]
    for kind, prefix in [*((home.kind, home.section) for home in HOMES), ("backbone", ())]:
        for offer in registry.offers(manager, kind):
            if offer.provider.config is not None:
                with contextlib.suppress(PluginError):
                    found.append(((*prefix, offer.full_name), registry.import_target(offer.provider.config)))
    return found


def whole_keys(key: str, manager: PluginManager) -> dict[str, bool]:
    """Return the full keys that ``key`` may refer to, most likely first -> whether it is a section.

    ``key`` may lack its parent sections (``tracing.keep``, ``num_repeat``), or its first part may be misspelled
    (``trainer.logger``). Empty if no key is similar.
    """
    models = key_models(manager)
    fields = [one for at, model in models for one in walk_fields(model, at)]
    known = {dotted(name): section_of(info) is not None for name, info in fields}
    known |= {dotted(prefix): True for prefix, _ in models}
    older = registry.older_spellings(manager)

    def meant() -> list[str]:
        if f"astuner.{key}" in {*known, *older.renamed, *older.gone}:
            return [f"astuner.{key}"]
        parts = key.split(".")
        is_unknown = len(parts) == 1 or not any(name.endswith(f".{parts[0]}") for name in known)
        if is_unknown and (names := keys_of_other_tools(tuple(parts))):
            return names
        for n in range(len(parts), 0, -1):
            begins, rest = ".".join(parts[:n]), "".join(f".{part}" for part in parts[n:])
            found = sorted((name for name in known if name.endswith(f".{begins}")), key=lambda name: name.count("."))
            if f"astuner.{begins}" in found:
                return [f"astuner.{begins}{rest}"]
            if found:
                return [f"{name}{rest}" for name in found[:3]]
        for n in range(1, len(parts) - 1):  # VERL: actor_rollout_ref.actor.optim.lr
            if found := [name for name in known if name.endswith(f".{'.'.join(parts[n:])}")]:
                return found[:1]
        near = difflib.get_close_matches(parts[0], list(models[0][1].model_fields), 1)
        return [".".join(["astuner", near[0], *parts[1:]])] if near and len(parts) > 1 else []

    return {name: known.get(name, False) for name in meant()}
