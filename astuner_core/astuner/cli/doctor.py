"""``astuner doctor``: what would stop a run on this machine, and what to type.

Reads versions from package metadata and asks the operating system; imports no package it reports on.  Plugins add
what their users need (`hookspecs.register_diagnoses`).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import psutil
import typer

from astuner.cli.common import load_plugins
from astuner.contracts.commands import write_json
from astuner.contracts.diagnosis import Finding, unmet
from astuner.plugins import registry

if TYPE_CHECKING:
    from astuner.contracts.hookspecs import Provider
    from astuner.plugins.loader import PluginManager

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

CORE = "astuner-core"
GIB = 2**30


@app.command()
def doctor(
    ctx: typer.Context,
    run_dir: Annotated[Path, typer.Option(metavar="DIR", help="Where runs will be written.")] = Path("launcher_record"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine and what this environment is for; exits with 1 when something would stop a run."""
    manager = load_plugins(ctx)
    aside = _aside(manager)
    own = [*_python(), *_packages(manager, aside), *_plugins(manager), *_room(run_dir)]
    findings = [*own, *_of_plugins(manager, aside)]
    if as_json:
        write_json([asdict(f) for f in findings])
    else:
        width = max(len(f.what) for f in findings)
        for f in findings:
            typer.echo(f"{f.level:4}  {f.what:{width}}  {f.detail}")
            if f.fix:
                typer.echo(f"{'':4}  {'':{width}}  type: {f.fix}")
    if any(f.level == "fail" for f in findings):
        raise typer.Exit(1)


def _python() -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    version = ".".join(map(str, sys.version_info[:3]))
    needed = metadata.metadata(CORE)["Requires-Python"]
    if SpecifierSet(needed).contains(version):
        yield Finding(level="ok", what="python", detail=f"{version} at {sys.prefix}")
    else:
        yield Finding(
            level="fail", what="python", detail=f"{version}, but {needed} is needed", fix="uv venv --python 3.11"
        )


def _aside(manager: PluginManager) -> dict[str, Provider]:
    """Packages whose backbone this environment is not for: nothing that it runs on is here, and another backbone is.

    So it is where one was installed with ``--no-deps``. Where a part of it is here, what is missing is a fault.

    :returns: package -> its backbone.
    """
    lacking: dict[str, Provider] = {}
    whole = False
    for plugin, _, provider in manager.offers("backbone"):
        missing = registry.missing_modules(provider)
        if missing and len(missing) == len(provider.requires):
            lacking[plugin.dist] = provider
        whole |= not missing and plugin.dist != CORE  # the core's own trains nothing
    return lacking if whole else {}


def _packages(manager: PluginManager, aside: Mapping[str, Provider]) -> Iterator[Finding]:
    """The core and every plugin's package: are its declared requirements met?"""
    for dist in dict.fromkeys([CORE, *(p.dist for p in manager.plugins)]):
        if dist in aside:
            detail = f"{metadata.version(dist)}, not for this environment: nothing that it runs on is installed"
            fix = aside[dist].install and f"{aside[dist].install}, in an environment of its own"
            yield Finding(level="skip", what=dist, detail=detail, fix=fix)
            continue
        problems = list(unmet(dist))
        if not problems:
            yield Finding(level="ok", what=dist, detail=metadata.version(dist))
        for requirement, have in problems:
            yield Finding(
                level="fail", what=dist, detail=f"needs {requirement}, but {have}", fix=f"pip install '{requirement}'"
            )


def _plugins(manager: PluginManager) -> Iterator[Finding]:
    for plugin in manager.plugins:
        status = plugin.status.value
        if status in ("broken", "incompatible", "duplicate"):
            yield Finding(
                level="warn",
                what=f"plugin {plugin.name}",
                detail=f"{plugin.dist} {plugin.version} is {status}: {plugin.reason}",
                fix=f"pip install --upgrade {plugin.dist}  (or: pip uninstall {plugin.dist})",
            )
    if all(plugin.dist == CORE for plugin, _, _ in manager.offers("backbone")):
        yield Finding(
            level="warn", what="backbones", detail="none is installed that trains", fix="pip install astuner-local"
        )
    loaded = [p.name for p in manager.plugins if p.status.value == "loaded"]
    yield Finding(level="ok", what="plugins", detail=", ".join(loaded))


def _room(run_dir: Path) -> Iterator[Finding]:
    memory = psutil.virtual_memory().available
    level: Literal["ok", "warn"] = "ok" if memory > 2 * GIB else "warn"
    yield Finding(level=level, what="memory", detail=f"{memory / GIB:.1f} GiB free")
    folder = run_dir.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < GIB / 4:
        yield Finding(
            level="fail",
            what="disk",
            detail=f"{free / GIB:.2f} GiB free at {folder}",
            fix="astuner doctor --run-dir DIR",
        )
    else:
        level = "ok" if free > 4 * GIB else "warn"
        yield Finding(level=level, what="disk", detail=f"{free / GIB:.1f} GiB free at {folder}")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        yield Finding(
            level="fail",
            what="run folder",
            detail=f"cannot write to {folder}: {e.strerror}",
            fix="astuner run FILE --run-dir DIR",
        )
    else:
        yield Finding(level="ok", what="run folder", detail=f"{folder} is writable")


def _of_plugins(manager: PluginManager, aside: Mapping[str, Provider]) -> Iterator[Finding]:
    for plugin, name, provider in manager.offers("diagnosis"):
        if plugin.dist in aside:
            continue
        try:
            yield from registry.import_target(provider.target)()
        except Exception as e:  # a stranger's code; the others are asked all the same
            detail = f"the diagnosis of {plugin.dist} failed: {type(e).__name__}: {e}"
            yield Finding(level="warn", what=name, detail=detail, fix=f"pip install --upgrade {plugin.dist}")
