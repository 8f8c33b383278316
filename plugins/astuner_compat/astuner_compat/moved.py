"""Where modules of ``astuner`` went when it was cut into rooms and packages; their old names work for one release.

An old name gives the very module that has the new one, with a `DeprecationWarning` that says so: `isinstance` and
patching hold. The core finds this file by its entry point in the group ``astuner.older_modules``, and not before a name
of ``astuner`` is not found.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

import astuner

_TABLES = yaml.safe_load(Path(__file__).with_name("moved.yaml").read_text(encoding="utf-8"))
MOVED: dict[str, str] = _TABLES["moved"]
"""The module's name before -> its name now."""
RENAMED: dict[str, dict[str, str]] = _TABLES["renamed"]
"""Module -> a name in it before -> what it is now."""


def place_now(name: str) -> str | None:
    """What the module ``name`` of before is called now; None where it has not moved."""
    old, rest = name, ""
    while old not in MOVED:
        old, dot, last = old.rpartition(".")
        if not dot:
            return None
        rest = f".{last}{rest}"
    return MOVED[old] + rest


class Finder(MetaPathFinder):
    """Finds modules by the names they had.

    It has to come first once one was found: what is in a package that moved would be found in its folder, and be
    loaded a second time under its old name.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("astuner.") or (now := place_now(name)) is None:
            return None
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        return ModuleSpec(name, _AtItsPlace(name, now))

    def find_name(self, module: str, name: str) -> object:
        """What ``name`` was in ``module`` before; None where nothing was called so."""
        if (now := RENAMED.get(module, {}).get(name)) is None:
            return None
        _warn(f"{module}.{name} is {now.replace(':', '.')} now; the old name goes with the next release")
        home, _, new = now.partition(":")
        return getattr(importlib.import_module(home), new)


FINDER = Finder()


class _AtItsPlace(Loader):
    """Loads nothing: gives the module that is there under its new name."""

    def __init__(self, old: str, now: str) -> None:
        self._old, self._now = old, now
        self._spec: Any = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        package = self._now.partition(".")[0]
        try:
            module = importlib.import_module(self._now)
        except ModuleNotFoundError as e:
            if e.name != package:
                raise
            raise ModuleNotFoundError(
                f"{self._old} is {self._now} now, which comes with a package of its own: "
                f"pip install {package.replace('_', '-')}",
                name=package,
            ) from None
        _warn(f"{self._old} is {self._now} now; the old name goes with the next release")
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has put that of the old name there


_BETWEEN = (__file__, importlib.__file__, str(astuner.__file__))


def _warn(text: str) -> None:
    """At the line that used the old name, however many frames of the import system are between."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename in _BETWEEN or frame.f_code.co_filename.startswith("<frozen ")):
        frame = frame.f_back
    module, seen = frame.f_globals.get("__name__", ""), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, DeprecationWarning, frame.f_code.co_filename, frame.f_lineno, module, seen)
