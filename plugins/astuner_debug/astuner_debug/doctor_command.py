"""``astuner doctor``: report problems of this machine that would stop a run, each with a command that fixes it.

``astuner doctor RUN`` checks a run folder instead (`run_folder`).  Versions come from package metadata and the
operating system; no package under test is imported.  Plugins add their own checks (`hookspecs.register_diagnoses`).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import typer

from astuner import import_target, missing_modules
from astuner.contracts.commands import command_line, write_json
from astuner.contracts.diagnosis import Finding, fail, ok, skip, unmet, version, warn

if TYPE_CHECKING:
    from astuner import Plugin, PluginManager, Provider


CORE = "astuner-core"
DEBUG = "debug"
"""Name of the backbone that does not train."""
GIB = 2**30


def doctor(
    ctx: typer.Context,
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="Check this run folder instead.")] = None,
    run_dir: Annotated[Path, typer.Option(metavar="DIR", help="Check disk space and write access here.")] = Path(
        "launcher_record"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine and installation, or check which parts of a run folder are intact and whether it can resume.

    Exits with status 1 if something would stop a run.
    """
    if run is not None:
        from astuner_debug.run_folder import of_run

        findings = [*of_run(run)]
    else:
        manager = command_line(ctx).plugins
        aside = _aside(manager)
        own = [*_python(), *_packages(manager, aside), *_plugins(manager), *_room(run_dir)]
        findings = [*own, *_of_plugins(manager, aside)]
    if as_json:
        write_json([asdict(f) for f in findings])
    else:
        width = max(len(f.what) for f in findings)
        for f in findings:
            _echo(f"{f.level:4}  {f.what:{width}}  {f.detail}")
            if f.fix:
                _echo(f"{'':4}  {'':{width}}  type: {f.fix}")
    if any(f.level == "fail" for f in findings):
        raise typer.Exit(1)


def _echo(line: str) -> None:
    """Print a line without control characters: a run folder may come from another user."""
    typer.echo("".join(c if c.isprintable() else "\ufffd" for c in line))


def _python() -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    running = ".".join(map(str, sys.version_info[:3]))
    needed = metadata.metadata(CORE)["Requires-Python"]
    if SpecifierSet(needed).contains(running):
        yield ok(what="python", detail=f"{running} at {sys.prefix}")
    else:
        yield fail(what="python", detail=f"{running}, but {needed} is needed", fix="uv venv --python 3.11")


def _aside(manager: PluginManager) -> dict[str, str]:
    """Return packages that are not meant for this environment, each with the command that installs it elsewhere.

    These are backbones without any installed requirement while another backbone is complete, as after
    ``pip install --no-deps``, and packages that only such backbones need and that cannot run here. If some requirements
    of a backbone are installed, the missing ones are reported as an error.
    """
    lacking: dict[str, Provider] = {}
    is_another_complete = False
    for plugin, name, provider in manager.offers("backbone"):
        missing = missing_modules(provider)
        if missing and len(missing) == len(provider.requires):
            lacking[plugin.dist] = provider
        is_another_complete |= not missing and name != DEBUG
    if not is_another_complete:
        return {}
    aside = {dist: p.install and f"{p.install}, in a separate environment" for dist, p in lacking.items()}
    needed_by: dict[str, list[str]] = {}
    for dist in {plugin.dist for plugin in manager.plugins}:
        for name in _first_party_requirements(dist):
            needed_by.setdefault(name, []).append(dist)
    return aside | {
        plugin.dist: ""
        for plugin in manager.plugins
        if (users := needed_by.get(plugin.dist)) and aside.keys() >= set(users) and _cannot_run(plugin)
    }


def _cannot_run(plugin: Plugin) -> bool:
    """Return whether every provider of the plugin lacks a module here."""
    return all(missing_modules(provider) for offers in plugin.provides.values() for provider in offers.values())


def _first_party_requirements(dist: str) -> set[str]:
    """Return the names of ASTuner packages that a package requires, without extras."""
    from packaging.requirements import InvalidRequirement, Requirement

    names = set()
    for text in (version(dist) and metadata.requires(dist)) or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.name.startswith("astuner-") and requirement.marker is None:
            names.add(requirement.name)
    return names


def _packages(manager: PluginManager, aside: Mapping[str, str]) -> Iterator[Finding]:
    """Check the declared requirements of the core and of every plugin's package."""
    for dist in dict.fromkeys([CORE, *(p.dist for p in manager.plugins)]):
        have = version(dist)
        if have is None:
            continue  # `_plugins` reports a plugin whose metadata cannot be read
        if dist in aside:
            detail = f"{have}, not for this environment: none of its dependencies are installed"
            yield skip(what=dist, detail=detail, fix=aside[dist])
            continue
        problems = list(unmet(dist))
        if not problems:
            yield ok(what=dist, detail=have)
        for requirement, reason in problems:
            yield fail(what=dist, detail=f"needs {requirement}, but {reason}", fix=f"pip install '{requirement}'")


def _plugins(manager: PluginManager) -> Iterator[Finding]:
    for plugin in manager.plugins:
        status = plugin.status.value
        if status in ("broken", "incompatible", "duplicate"):
            detail = f"{plugin.dist} {plugin.version} is {status}: {plugin.reason}"
            fix = f"pip install --upgrade {plugin.dist}  (or: pip uninstall {plugin.dist})"
            yield warn(what=f"plugin {plugin.name}", detail=detail, fix=fix)
    if all(name == DEBUG for _, name, _ in manager.offers("backbone")):
        yield warn(what="backbones", detail="no backbone that trains is installed", fix="pip install astuner-local")
    loaded = [p.name for p in manager.plugins if p.status.value == "loaded"]
    yield ok(what="plugins", detail=", ".join(loaded))


def _room(run_dir: Path) -> Iterator[Finding]:
    memory = psutil.virtual_memory().available
    yield (ok if memory > 2 * GIB else warn)(what="memory", detail=f"{memory / GIB:.1f} GiB free")
    folder = run_dir.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < GIB / 4:
        yield fail(what="disk", detail=f"{free / GIB:.2f} GiB free at {folder}", fix="astuner doctor --run-dir DIR")
    else:
        yield (ok if free > 4 * GIB else warn)(what="disk", detail=f"{free / GIB:.1f} GiB free at {folder}")
    try:
        with tempfile.TemporaryFile(dir=folder):
            yield ok(what="run folder", detail=f"{folder} is writable")
    except OSError as e:
        cannot = f"cannot write to {folder}: {e.strerror}"
        yield fail(what="run folder", detail=cannot, fix="astuner run FILE --run-dir DIR")


def _of_plugins(manager: PluginManager, aside: Mapping[str, str]) -> Iterator[Finding]:
    for plugin, name, provider in manager.offers("diagnosis"):
        if plugin.dist in aside:
            continue
        try:
            yield from import_target(provider.target)()
        except Exception as e:  # third-party code; continue with the other plugins
            detail = f"the diagnosis of {plugin.dist} failed: {type(e).__name__}: {e}"
            yield warn(what=name, detail=detail, fix=f"pip install --upgrade {plugin.dist}")
