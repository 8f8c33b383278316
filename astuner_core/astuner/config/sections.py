"""The sections that belong to plugins.

A reader's section is ``astuner.task_reader.<name>``, a judge's ``astuner.task_judge.<name>``, a workflow's
``astuner.rollout.<name>``, a service's ``astuner.services.<name>``, a backbone's the root key of its name.  Each is
checked by its own provider's model; a section whose owner is not here is an error, unless it belongs to something that
this run does not use.  What a key that stands nowhere may have been meant to be is found here, too.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from astuner.config import schema
from astuner.config.checking import check_section, field_at, section_of, unknown_key, walk_fields
from astuner.contracts.errors import AmbiguousName, PluginError, UnknownName
from astuner.contracts.places import Key, Report, Tree, did_you_mean, dotted
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager
from astuner.plugins.user_code import find_user_file


@dataclass(frozen=True)
class Home:
    """Where one kind's sections are, and the key that chooses among them."""

    kind: str
    section: Key
    chooser: str
    """Empty where the command line chooses (``--with NAME``)."""
    model: type[BaseModel]


HOMES = (
    Home("task reader", ("astuner", "task_reader"), "type", schema.TaskReader),
    Home("workflow", ("astuner", "rollout"), "workflow", schema.Rollout),
    Home("judge", ("astuner", "task_judge"), "judge", schema.TaskJudge),
    Home("service", ("astuner", "services"), "", schema.Services),
)


@dataclass
class Sections:
    """The plugins' sections of one experiment."""

    models: dict[tuple[str, str], BaseModel] = field(default_factory=dict)
    """(kind, any spelling) -> the checked section."""
    places: dict[Key, BaseModel] = field(default_factory=dict)
    """Key -> the same sections."""
    taken: set[Key] = field(default_factory=set)
    """Keys that were dealt with here, well or badly."""

    def keep(self, offer: registry.Offer, key: Key, model: BaseModel) -> None:
        if key:
            self.places[key] = model
        for name in (offer.name, *offer.spellings):
            self.models[(offer.kind, name)] = model


def check_sections(tree: Tree, base_dir: Path, manager: PluginManager, report: Report) -> Sections:
    """Check every plugin's section below ``astuner:``, and bring it under its owner's name in ``tree``."""
    sections = Sections()
    for home in HOMES:
        chosen = _chosen(home, tree, base_dir, manager, report)
        parent = tree.get(home.section)
        extra = [name for name in parent if name not in home.model.model_fields] if isinstance(parent, dict) else []
        seen: dict[str, Key] = {}
        for name in extra:
            found = _owner(home, name, chosen, tree, manager, report)
            if found is None:
                tree.remove((*home.section, name))
            else:
                _settle(home.section, name, found, seen, tree, report)
        for full_name, key in seen.items():
            _check_section(registry.find_offer(manager, home.kind, full_name), key, tree, report, sections)
        if chosen is not None and chosen.full_name not in seen:
            _check_section(chosen, (*home.section, chosen.full_name), tree, report, sections)
    _names(tree, manager, report, sections)
    return sections


def check_roots(tree: Tree, chosen: registry.Offer, manager: PluginManager, report: Report, sections: Sections) -> None:
    """Check the chosen backbone's root section; those of other backbones leave ``tree``, with one note."""
    owners = {name: found for found in _offers(manager, "backbone") for name in (found.name, *found.spellings)}
    skipped: list[str] = []
    seen: dict[str, Key] = {}
    for root in [name for name in tree.data if name != "astuner"]:
        found, key = owners.get(root), (root,)
        if found == chosen:
            _settle((), root, chosen, seen, tree, report)
        elif found is not None or ("backbone", root) in registry.known_plugins():
            skipped.append(f"{root}:")
            tree.remove(key)
        elif root in schema.AstunerSection.model_fields:
            report.problem(tree.place(key), f"section {root} belongs below `astuner:`; indent it there")
        elif close := did_you_mean(root, schema.AstunerSection.model_fields):
            report.problem(tree.place(key), f"unknown section {root}{close} It belongs below astuner:")
        else:
            unknown_key(key, ["astuner", *sorted({owner.full_name for owner in owners.values()})], tree, report)
    if skipped:
        verb = "are for other backbones and are" if len(skipped) > 1 else "is for another backbone and is"
        report.note(f"{', '.join(skipped)} {verb} not read by {chosen.full_name!r}")
    _check_section(chosen, (chosen.full_name,), tree, report, sections)


def choose(
    kind: str, reference: str, key: Key, tree: Tree, manager: PluginManager, report: Report
) -> registry.Offer | None:
    """The offer that the value of ``key`` names, as today's name in ``tree``; None with a problem reported."""
    try:
        found = registry.find_offer(manager, kind, reference)
    except (UnknownName, AmbiguousName) as e:
        report.problem(tree.place(key), f"{dotted(key)}: {e}")
        return None
    if reference not in (found.full_name, f"{found.plugin.name}/{found.name}"):
        report.note(f"{dotted(key)}: {reference!r} is now {found.full_name!r}", tree.place(key))
    tree.put(key, found.full_name)
    return found


def _chosen(home: Home, tree: Tree, base_dir: Path, manager: PluginManager, report: Report) -> registry.Offer | None:
    key = (*home.section, home.chooser)
    reference = tree.get(key) if home.chooser else None
    if not isinstance(reference, str) or not reference:
        return None
    if registry.is_code(reference):
        if find_user_file(reference, base_dir) is not None:
            return None  # code of the user's own, even where a plugin has an older spelling like it
        try:
            registry.find_offer(manager, home.kind, reference)
        except UnknownName:
            if registry.hint_for(home.kind, reference) is None:
                return None
    return choose(home.kind, reference, key, tree, manager, report)


def _owner(
    home: Home, name: str, chosen: registry.Offer | None, tree: Tree, manager: PluginManager, report: Report
) -> registry.Offer | None:
    key = (*home.section, name)
    if chosen is not None and name in {chosen.name, *chosen.spellings}:
        return chosen
    try:
        return registry.find_offer(manager, home.kind, name)
    except AmbiguousName as e:
        report.problem(tree.place(key), f"{dotted(key)}: {e}")
    except UnknownName:
        dist = registry.hint_for(home.kind, name)
        if dist is not None and isinstance(tree.get(key), dict):
            report.note(f"{dotted(key)} belongs to {dist}, which is not installed; it is not read", tree.place(key))
        else:
            known = {*home.model.model_fields, *(n for _, n, _ in manager.offers(home.kind))}
            unknown_key(key, sorted(known), tree, report)
    return None


def _settle(section: Key, name: str, found: registry.Offer, seen: dict[str, Key], tree: Tree, report: Report) -> None:
    """Bring a section under its owner's full name; two spellings of one section are an error."""
    key, settled = (*section, name), (*section, found.full_name)
    if found.full_name in seen or (key != settled and tree.has(settled)):
        report.problem(tree.place(key), f"{dotted(key)} and {dotted(settled)} are one section; keep one")
        tree.remove(key)
        return
    if key != settled:
        report.note(f"{dotted(key)} is now {dotted(settled)}", tree.place(key))
        tree.move(key, settled)
    seen[found.full_name] = settled


def _check_section(found: registry.Offer, key: Key, tree: Tree, report: Report, sections: Sections) -> None:
    value = tree.get(key)
    sections.taken.add(key)
    if value is not None and not isinstance(value, dict):
        report.problem(tree.place(key), f"{dotted(key)} should be a section (keys below it), got {value!r}")
        return
    if found.provider.config is None:
        if value:
            report.problem(tree.place(key), f"{dotted(key)}: the {found.kind} {found.full_name!r} takes no options")
        return
    try:
        model = registry.import_target(found.provider.config)
    except PluginError as e:
        report.problem(tree.place(key), f"{dotted(key)}: {e}")
        return
    checked = check_section(model, tree, key, report)
    if checked is not None:
        sections.keep(found, key, checked)


def _offers(manager: PluginManager, kind: str) -> Iterator[registry.Offer]:
    for plugin, name, _ in manager.offers(kind):
        yield registry.find_offer(manager, kind, f"{plugin.name}/{name}")


_NAMED: Mapping[Key, str] = {
    ("astuner", "trainer_common", "logger"): "log sink",
    ("astuner", "trainer_common", "algorithm", "loss"): "loss",
    ("astuner", "trainer_common", "algorithm", "adv_estimator"): "advantage estimator",
    ("astuner", "rollout", "compute_madness_checklist"): "output check",
    ("astuner", "trainer_common", "sentinel", "rules"): "sentinel rule",
}
"""Keys that hold a name, or list names, of things without sections; and of what kind these are."""


def _names(tree: Tree, manager: PluginManager, report: Report, sections: Sections) -> None:
    """Names that nobody registers; code of the user's own is looked for when the run starts."""
    for key, kind in _NAMED.items():
        value = tree.get(key)
        each = {(*key, str(i)): name for i, name in enumerate(value)} if isinstance(value, list) else {key: value}
        for at, name in each.items():
            if not isinstance(name, str):
                continue
            try:
                found = registry.find_offer(manager, kind, name)
            except (UnknownName, AmbiguousName) as e:
                if not registry.is_code(name):
                    report.problem(tree.place(at), f"{dotted(key)}: {e}")
                continue
            if kind == "log sink" and found.provider.config is not None:
                sections.keep(found, (), registry.import_target(found.provider.config)())


def key_models(manager: PluginManager) -> list[tuple[Key, type[BaseModel]]]:
    """The section ``astuner`` and those that installed plugins bring; those that cannot be imported are left out."""
    found: list[tuple[Key, type[BaseModel]]] = [(("astuner",), schema.with_packages(manager))]
    for kind, prefix in [*((home.kind, home.section) for home in HOMES), ("backbone", ())]:
        for offer in _offers(manager, kind):
            if offer.provider.config is not None:
                with contextlib.suppress(PluginError):
                    found.append(((*prefix, offer.full_name), registry.import_target(offer.provider.config)))
    return found


def whole_keys(key: str, manager: PluginManager) -> list[str]:
    """What ``key`` may have been meant to be, the likeliest first; empty when nothing comes near.

    A section may stand anywhere (``tracing.keep``), and so may a key of its own (``num_repeat``); else the first part
    may be misspelt (``trainer.logger``).
    """
    models = key_models(manager)
    known = [dotted(name) for prefix, model in models for name, _ in walk_fields(model, prefix)]
    known += [dotted(prefix) for prefix, _ in models]
    older = registry.older_spellings(manager)
    if f"astuner.{key}" in {*known, *older.renamed, *older.gone}:
        return [f"astuner.{key}"]
    parts = key.split(".")
    for n in range(len(parts), 0, -1):
        begins, rest = ".".join(parts[:n]), "".join(f".{part}" for part in parts[n:])
        found = sorted((name for name in known if name.endswith(f".{begins}")), key=lambda name: name.count("."))
        if f"astuner.{begins}" in found:
            found = [f"astuner.{begins}"]
        if found:
            return [f"{name}{rest}" for name in found[:3]]
    if len(parts) > 1 and (near := difflib.get_close_matches(parts[0], list(models[0][1].model_fields), 1)):
        return [".".join(["astuner", near[0], *parts[1:]])]
    return []


def is_section(key: str, manager: PluginManager) -> bool:
    """Whether the whole key ``key`` has keys below it."""
    full = tuple(key.split("."))
    for prefix, model in key_models(manager):
        info = field_at(model, full[len(prefix) :]) if full[: len(prefix)] == prefix else None
        if full == prefix or (info is not None and section_of(info) is not None):
            return True
    return False
