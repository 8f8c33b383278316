"""From a file and overrides to a `Config`.

    schema defaults  <  the experiment file  <  ``key=value`` overrides  <  ``--backbone``

Every stage works on one `Tree` and writes what is wrong into one `Report`, which raises at the end with everything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from astuner.config.checking import check, what_is_right
from astuner.config.consistency import check_together
from astuner.config.explain import is_section, whole_keys
from astuner.config.implied import imply
from astuner.config.interpolation import interpolate
from astuner.config.loaded import RESOLVED, Config
from astuner.config.reading import read_file, read_overrides
from astuner.config.schema import Astuner, with_packages
from astuner.config.sections import check_roots, check_sections, choose
from astuner.contracts.errors import ConfigError
from astuner.contracts.parts import OlderSpellingsPart
from astuner.contracts.places import Key, Place, Report, Tree, dotted
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager, load_plugins

ROOT = "astuner"
BACKBONE: Key = (ROOT, "backbone")
NAME: Key = (ROOT, "experiment_name")
READ_YAML_NAME = "read_yaml_name"
_DEFAULT_BACKBONE = Astuner.model_fields["backbone"].default


def load_config(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    backbone: str | None = None,
    disabled_plugins: Sequence[str] = (),
    plugins: PluginManager | None = None,
) -> Config:
    """Read, complete and check an experiment file.

    Imports the schemas of the plugins it uses, never the user's code or a backbone; whether the backbone honours
    every key is `astuner.config.capabilities.check_capabilities`.

    :param overrides: ``astuner.rollout.num_repeat=8``; values are YAML.
    :param backbone: wins over ``astuner.backbone``.
    :param disabled_plugins: as for `astuner.plugins.loader.load_plugins`.
    :param plugins: use these instead of the installed ones.
    :raises ConfigError: everything that is wrong, in file order, each with ``file:line:column``.
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
    """As `load_config`, and with mistakes too what is right of it, for those who look for more of them.

    :returns: the experiment without its wrong keys (`Config.wrong`), None where too little is left; and the mistakes.
    :raises ConfigError: the file cannot be read at all.
    """
    manager = plugins if plugins is not None else load_plugins(disabled_plugins)
    path = Path(path)
    report = Report(
        str(path),
        whole_keys=lambda key: whole_keys(key, manager),
        is_section=lambda key: is_section(key, manager),
        older=registry.older_spellings(manager),
        who_adds=lambda key: registry.who_adds(manager, key),
    )
    if type(report.older) is OlderSpellingsPart:
        report.hint = f"; if it is of an older file: pip install {registry.hint_for('part', 'older_spellings')}"
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
        report.problem(place, f"no astuner: section; the keys of an experiment stand below astuner:{report.hint}")
        report.raise_problems()

    report.older.settle(tree, manager, report)
    model = with_packages(manager)
    interpolate(tree, ROOT, report, model, manager)
    implied = imply(tree, report, manager)
    chosen = choose("backbone", str(tree.get(BACKBONE, _DEFAULT_BACKBONE)), BACKBONE, tree, manager, report)
    _experiment_name(tree, path, report)
    sections = check_sections(tree, path.parent, manager, report)
    if chosen is not None:
        for root in {chosen.name, *chosen.spellings} & tree.data.keys():
            interpolate(tree, root, report, model, manager)
        check_roots(tree, chosen, manager, report, sections)
    astuner = check(model, tree, (ROOT,), report, elsewhere=sections.taken)
    check_together(tree, report)
    wrong = report.wrong
    if astuner is None:
        astuner = what_is_right(model, tree, (ROOT,), elsewhere=sections.taken)
    if astuner is None:
        return None, report.told()

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
    """Of a written-out config: the experiment's own file, what was written, and the rest (defaults of that time)."""
    if not file.has((RESOLVED,)):
        return path, file, Tree()
    about, rest = file.get((RESOLVED,)), Tree()
    file.remove((RESOLVED,))
    if not isinstance(about, dict) or not isinstance(about.get("file"), str):
        report.problem(None, f"{RESOLVED}: is written by ASTuner and names the experiment's file; remove it")
        return path, file, rest
    written, implied = set(about.get("written") or ()), set(about.get("implied") or ())
    for key, value in list(file.leaves()):
        if dotted(key) not in written:
            file.remove(key)
            if dotted(key) not in implied:
                rest.put(key, value)
    while empty := [key for key, value in file.leaves() if value == {} and dotted(key) not in written]:
        for key in empty:
            file.remove(key)
    return Path(about["file"]), file, rest


def _experiment_name(tree: Tree, path: Path, report: Report) -> None:
    name = tree.get(NAME)
    if name in (None, READ_YAML_NAME):
        tree.put(NAME, path.stem)
    elif isinstance(name, str) and (name in (".", "..") or not name.strip() or {"/", "\\", "\0"} & set(name)):
        where = "astuner.experiment_dir is the folder it stands in"
        report.problem(tree.place(NAME), f"{dotted(NAME)} names one folder, so it cannot be {name!r}; {where}")
