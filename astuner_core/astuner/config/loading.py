"""Load an experiment file with overrides into a `Config`.

    schema defaults  <  the experiment file  <  ``key=value`` overrides  <  ``--backbone``

All stages work on one `Tree` and write errors to one `Report`, which raises all of them at the end.

``${...}`` is OmegaConf's interpolation over the file and the schema's defaults. All interpolations are evaluated, so
one error does not hide the next. Keys implied by other keys are set only if the user did not set them, and their origin
names the other key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from astuner.config.capabilities import check_together
from astuner.config.checking import check_section, what_is_right
from astuner.config.loaded import RESOLVED, Config
from astuner.config.reading import read_file, read_overrides
from astuner.config.schema import AstunerSection, ModelSection, with_packages
from astuner.config.sections import Sections, whole_keys
from astuner.contracts.errors import AmbiguousName, ConfigError, UnknownName
from astuner.contracts.hookspecs import LossProvider
from astuner.contracts.parts import OlderSpellingsPart
from astuner.contracts.places import Key, Place, Report, Tree, dotted
from astuner.contracts.secrets import is_removed
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager, load_plugins

ROOT = "astuner"
BACKBONE: Key = (ROOT, "backbone")
NAME: Key = (ROOT, "experiment_name")
MAX_NAME_BYTES = 200
"""File systems allow 255 bytes; locks and temporary folders add a suffix."""
ALGORITHM: Key = (ROOT, "trainer_common", "algorithm")
PER_VALIDATION_TASK: tuple[Key, Key] = (
    (ROOT, "trainer_common", "val_pass_n"),
    (ROOT, "rollout", "val_kwargs", "num_repeat"),
)
"""Two keys with the same meaning."""


def interpolate(tree: Tree, root: str, report: Report, model: type[AstunerSection], manager: PluginManager) -> None:
    """Replace the interpolations below ``root`` by their values, in place.

    Also report open values (``???``) and secrets that were removed from a written-out config.

    :param model: Schema of ``astuner``, for the defaults.
    """
    below: DictConfig | None = None
    for key, value in list(tree.leaves()):
        if key[0] != root:
            continue
        if value == "???":
            report.problem(tree.place(key), f"{dotted(key)} is required; replace ??? with a value")
            tree.remove(key)
        elif is_removed(value):
            report.problem(
                tree.place(key),
                f"{dotted(key)} was removed from this file because it is a secret; pass {dotted(key)}=VALUE",
            )
        elif "${" in str(value):
            below = below if below is not None else _everything(tree, model, report.older.roots, manager)
            if isinstance(value, str):
                tree.expressions[key] = value
            _resolve(below, key, tree, report)


def _everything(tree: Tree, model: type[AstunerSection], older: Sequence[str], manager: PluginManager) -> DictConfig:
    some = model.model_construct(model=ModelSection(path="?"))
    defaults = some.model_dump(mode="json", exclude={"model": {"path"}}, warnings=False)
    whole = Tree({ROOT: defaults}).merged(tree)
    imply(whole, Report(""), manager)
    aliases = {old: "${astuner}" for old in older if old not in whole.data}  # `${astune.model.path}`
    return OmegaConf.create({**whole.data, **aliases})


def _resolve(below: DictConfig, key: Key, tree: Tree, report: Report) -> None:
    try:
        value = OmegaConf.select(below, "".join(f"[{part}]" for part in key), throw_on_missing=True)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError) as e:
        reason = " ".join(str(e).split()).partition(" full_key:")[0] or "it refers to itself"
        reason = reason.rpartition("raised while resolving interpolation: ")[2].strip('"')
        report.problem(tree.place(key), f"{dotted(key)}: {reason[0].lower()}{reason[1:]}")
        tree.remove(key)
    else:
        tree.put(key, value)
        place = tree.place(key)
        if place is not None:
            tree.places.update({leaf: place for leaf, _ in tree.leaves(key)})


def imply(tree: Tree, report: Report, manager: PluginManager) -> dict[Key, Place]:
    """Set the keys of ``tree`` that are implied by keys the user set, and return their origins."""
    origins: dict[Key, Place] = {}

    def set_unless_written(key: Key, value: Any, why: str) -> None:
        if not tree.is_written(key) and isinstance(tree.get(key[:-1], {}), (dict, NoneType)):
            tree.put(key, value)
            origins[key] = Place(why)

    loss = tree.get((*ALGORITHM, "loss"))
    if isinstance(loss, str):
        for name, value in by_loss(loss, manager).items():
            set_unless_written((*ALGORITHM, name), value, f"implied by algorithm.loss: {loss}")
    if tree.get((ROOT, "rollout", "num_repeat")) in (1, "1"):
        set_unless_written((ROOT, "rollout", "min_group_size"), 1, "implied by rollout.num_repeat: 1")
    same = [key for key in PER_VALIDATION_TASK if tree.is_written(key)]
    if len(same) == 2 and tree.get(same[0]) != tree.get(same[1]):
        a, b = map(dotted, same)
        report.problem(tree.place(same[1]), f"{b} has the same meaning as {a} ({tree.place(same[0])}); make them equal")
    elif same:
        for key in PER_VALIDATION_TASK:
            set_unless_written(key, tree.get(same[0]), f"same as {dotted(same[0][1:])}")
    return origins


def by_loss(loss: str, manager: PluginManager) -> Mapping[str, object]:
    """Return the keys of ``trainer_common.algorithm`` that a loss implies; none if it is not registered."""
    try:
        provider = registry.find_provider(manager, "loss", loss)
    except (UnknownName, AmbiguousName):  # user code, or reported by `astuner.config.sections`
        return {}
    return provider.implies if isinstance(provider, LossProvider) else {}


def load_config(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    backbone: str | None = None,
    disabled_plugins: Sequence[str] = (),
    plugins: PluginManager | None = None,
) -> Config:
    """Load, complete and check an experiment file.

    This imports the schemas of the plugins in use, but neither user code nor a backbone.
    `astuner.config.capabilities.check_capabilities` checks whether the backbone supports every key.

    :param overrides: Overrides such as ``astuner.rollout.num_repeat=8``; values are YAML.
    :param backbone: Backbone to use instead of ``astuner.backbone``.
    :param disabled_plugins: As for `astuner.plugins.loader.load_plugins`.
    :param plugins: Plugins to use instead of the installed ones.
    :raises ConfigError: All errors in file order, each with ``file:line:column``.
    """
    config, problems = read_config(
        path, overrides, backbone=backbone, disabled_plugins=disabled_plugins, plugins=plugins
    )
    if problems or config is None:
        raise ConfigError(problems)
    return config


def read_config(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    backbone: str | None = None,
    disabled_plugins: Sequence[str] = (),
    plugins: PluginManager | None = None,
) -> tuple[Config | None, list[str]]:
    """Load an experiment like `load_config`, but return the valid keys together with the errors.

    :returns: The experiment without the keys that have errors (`Config.wrong`), or None if too few keys are valid; and
        the error messages.
    :raises ConfigError: The file cannot be read.
    """
    manager = plugins if plugins is not None else load_plugins(disabled_plugins)
    path = Path(path)
    report = Report(
        str(path),
        whole_keys=lambda key: whole_keys(key, manager),
        older=registry.older_spellings(manager),
        who_adds=lambda key: registry.who_adds(manager, key),
    )
    if type(report.older) is OlderSpellingsPart:
        report.hint = f"; for legacy keys: pip install {registry.hint_for('part', 'older_spellings')}"
    backbones = sorted({name for kind, name in registry.known_plugins() if kind == "backbone"})
    backbones += [name for _, name, _ in manager.offers("backbone") if name not in backbones]

    file = read_file(path, report)
    path, file, rest = _unwrap(path, file, report)
    report.defaults = [key for key, _ in rest.leaves()]
    over = read_overrides(overrides, (ROOT, *report.older.roots, *backbones), report)
    for tree in (file, over):
        report.older.modernise(tree, backbones, report)
    tree = rest.merged(file).merged(over)
    if backbone is not None:
        tree.put(BACKBONE, backbone, Place("--backbone"))
    if not isinstance(tree.get((ROOT,)), dict):
        place = tree.place((ROOT,)) or Place(str(path), 1, 1)
        report.problem(place, f"section astuner: is missing; write the experiment's keys below astuner:{report.hint}")
        report.raise_problems()

    report.older.settle(tree, manager, report)
    model = with_packages(manager)
    interpolate(tree, ROOT, report, model, manager)
    implied = imply(tree, report, manager)
    sections = Sections(tree, manager, report)
    chosen = _backbone(sections)
    _experiment_name(tree, path, report)
    sections.check(path.parent)
    if chosen is not None:
        for root in {chosen.name, *chosen.spellings} & tree.data.keys():
            interpolate(tree, root, report, model, manager)
        sections.check_roots(chosen)
    checked = check_section(model, tree, (ROOT,), report, elsewhere=sections.taken)
    astuner = checked or what_is_right(model, tree, (ROOT,), elsewhere=sections.taken)
    # Only the model is required; check the other keys even if it is missing.
    whole = Tree({ROOT: {"model": {"path": "?"}}}).merged(tree)
    right = astuner or what_is_right(model, whole, (ROOT,), elsewhere=sections.taken)
    if right is not None:
        check_together(right, tree, report)
    if astuner is None:
        return None, report.told()
    wrong = report.wrong

    written = {key: tree.places[key] for key, _ in tree.leaves() if tree.is_written(key) and dotted(key) not in wrong}
    config = Config(
        astuner=astuner,
        path=path,
        plugins=manager,
        origins={dotted(key): place for key, place in {**written, **implied}.items()},
        written=frozenset(map(dotted, written)),
        notes=tuple(report.notes),
        wrong=frozenset(wrong),
        _sections=sections.models,
        _placed=sections.places,
        _expressions=tree.expressions,
    )
    return config, report.told()


def _unwrap(path: Path, file: Tree, report: Report) -> tuple[Path, Tree, Tree]:
    """Split a written-out config into the experiment's file, the keys set by the user, and all other keys."""
    if not file.has((RESOLVED,)):
        return path, file, Tree()
    about, rest = file.get((RESOLVED,)), Tree()
    file.remove((RESOLVED,))
    if not isinstance(about, dict) or not isinstance(about.get("file"), str):
        report.problem(
            None, f"{RESOLVED}: is a section that ASTuner writes, and its file is missing; remove the section"
        )
        return path, file, rest
    lists = [found if isinstance(found := about.get(name), list) else [] for name in ("written", "implied")]
    written, implied = (set(map(str, names)) for names in lists)
    for key, value in list(file.leaves()):
        if dotted(key) not in written:
            file.remove(key)
            if dotted(key) not in implied:
                rest.put(key, value)
    while empty := [key for key, value in file.leaves() if value == {} and dotted(key) not in written]:
        for key in empty:
            file.remove(key)
    return Path(about["file"]), file, rest


def _backbone(sections: Sections) -> registry.Offer | None:
    """Return the selected backbone, or None.

    None means that an error was reported, or that the package of the default backbone is not installed. Commands that
    need a backbone report the latter.
    """
    name = str(sections.tree.get(BACKBONE, AstunerSection.model_fields["backbone"].default))
    offered = [name for _, name, _ in sections.manager.offers("backbone")]
    if not sections.tree.is_written(BACKBONE) and name not in offered:
        return None
    return sections.choose("backbone", name, BACKBONE)


def _experiment_name(tree: Tree, path: Path, report: Report) -> None:
    name = tree.get(NAME)
    if name in (None, AstunerSection.model_fields["experiment_name"].default):
        tree.put(NAME, path.stem)
    elif isinstance(name, str) and (name in (".", "..") or not name.strip() or {"/", "\\", "\0"} & set(name)):
        where = "set its parent directory with astuner.experiment_dir"
        report.problem(tree.place(NAME), f"{dotted(NAME)} must be the name of a single folder, not {name!r}; {where}")
    if (size := len(str(tree.get(NAME)).encode("utf-8", "replace"))) > MAX_NAME_BYTES:
        text = f"{dotted(NAME)} is {size} bytes long, but a run folder name is limited to {MAX_NAME_BYTES}; shorten it"
        report.problem(tree.place(NAME), text)
