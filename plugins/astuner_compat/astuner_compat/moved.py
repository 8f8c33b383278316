"""Import modules of ``astuner`` by their older names, for one release.

An older name refers to the same module object as the current name, so `isinstance` and patching work. A module that was
split gets a stand-in that finds each name at its current place. Each use emits a `FutureWarning`, visible by default,
at
the using line. The core finds this module by its entry point in the group ``astuner.older_modules``, and only when a
name in ``astuner`` is not found.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

import astuner

_TABLES = yaml.safe_load(Path(__file__).with_name("moved.yaml").read_text(encoding="utf-8"))
MOVED: dict[str, str] = _TABLES["moved"]
"""Older module name -> current name."""
SCATTERED: dict[str, dict[str, str]] = _TABLES["scattered"]
"""Removed module -> name in it -> current place."""
ATTRIBUTES: dict[str, dict[str, str]] = _TABLES["attributes"]
"""Class -> older attribute of its objects -> current attribute."""
RENAMED: dict[str, dict[str, str]] = _TABLES["renamed"]
"""Module -> older name in it -> current place."""
_FIRST_NAME = "astune"
_PARENTS = {name.rpartition(".")[0] for name in (*MOVED, *SCATTERED)}


def place_now(name: str) -> str | None:
    """Return the current name of a module, or None if it has not moved."""
    old, rest = name, ""
    while old not in MOVED:
        old, dot, last = old.rpartition(".")
        if not dot:
            return None
        rest = f".{last}{rest}"
    return MOVED[old] + rest


class Finder(MetaPathFinder):
    """Finds modules by older names.

    Once it has found one, it must be first in ``sys.meta_path``. Otherwise submodules of a moved package would be found
    in its folder and loaded a second time under their older names.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if not rest or package not in ("astuner", _FIRST_NAME):
            return None
        if package == _FIRST_NAME:
            loader: Loader = _AtItsPlace(name, f"astuner.{rest}")
        elif name in SCATTERED:
            loader = _Scattered()
        elif (now := place_now(name)) is not None:
            loader = _AtItsPlace(name, now)
        else:
            return None
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        return ModuleSpec(name, loader, is_package=name in _PARENTS)

    def find_name(self, module: str, name: str) -> object:
        """Return the object of an older name in a module, or None if there was none.

        For a class, return a function that reads the current attribute of its objects.
        """
        if (attribute := ATTRIBUTES.get(module, {}).get(name)) is not None:
            of = module.rpartition(".")[2].lower()
            tell(f"{of}.{name} was renamed to {of}.{attribute}; the old name will be removed in the next release")
            return attrgetter(attribute)
        if (now := {**RENAMED, **SCATTERED}.get(module, {}).get(name)) is None:
            return None
        tell(
            f"{module}.{name} was renamed to {now.replace(':', '.')}; the old name will be removed in the next release"
        )
        home, _, new = now.partition(":")
        return getattr(_import(home, f"{module}.{name}"), new)


FINDER = Finder()


class _AtItsPlace(Loader):
    """Loader that returns the existing module of the current name."""

    def __init__(self, old: str, now: str) -> None:
        self._old, self._now = old, now
        self._spec: Any = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _import(self._now, self._old)
        if not self._old.startswith(f"{_FIRST_NAME}."):  # its package has already warned
            tell(f"{self._old} was renamed to {self._now}; the old name will be removed in the next release")
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has set the older name's
        if self._old in _PARENTS and not hasattr(module, "__path__"):
            module.__path__ = []  # it had submodules under the older name; importlib requires a path


class _Scattered(Loader):
    """Creates a module whose names are found on access."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # use a new module

    def exec_module(self, module: ModuleType) -> None:
        name, names = module.__name__, SCATTERED[module.__name__]

        def find(attribute: str) -> object:
            if attribute not in names:
                raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
            return FINDER.find_name(name, attribute)

        module.__dict__.update(__getattr__=find, __all__=list(names))


def _import(now: str, old: str) -> ModuleType:
    """Import the module of a current name.

    :raises ModuleNotFoundError: Its package is not installed; the message names it.
    """
    package = now.partition(".")[0]
    try:
        return importlib.import_module(now)
    except ModuleNotFoundError as e:
        if e.name != package:
            raise
        raise ModuleNotFoundError(
            f"{old} was renamed to {now}, which is in a separate package: pip install {package.replace('_', '-')}",
            name=package,
        ) from None


_BETWEEN = {
    *(__file__, importlib.__file__, str(astuner.__file__), str(Path(__file__).parents[1] / "astune/__init__.py")),
    *(str(Path(str(astuner.__file__)).parent.joinpath(*name.split(".")[1:-1])) + ".py" for name in ATTRIBUTES),
}


def tell(text: str) -> None:
    """Warn at the line that used the older name, skipping frames of the import system."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename in _BETWEEN or frame.f_code.co_filename.startswith("<frozen ")):
        frame = frame.f_back
    module, seen = frame.f_globals.get("__name__", ""), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, FutureWarning, frame.f_code.co_filename, frame.f_lineno, module, seen)
