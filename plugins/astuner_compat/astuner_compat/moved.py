"""Where modules of ``astuner`` went when it was cut into rooms and packages; their old names work for one release.

An old name gives the very module that has the new one: `isinstance` and patching hold.  What was in one module and is
in several now is a module that gives each name from its place.  Each is told by a `FutureWarning`, which whoever runs
it sees, at the line that uses it.  The core finds this file by its entry point in the group ``astuner.older_modules``,
and not before a name of ``astuner`` is not found.
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
"""The module's name before -> its name now."""
SCATTERED: dict[str, dict[str, str]] = _TABLES["scattered"]
"""A module that is gone -> a name in it -> what it is now."""
ATTRIBUTES: dict[str, dict[str, str]] = _TABLES["attributes"]
"""Class -> an attribute of its objects before -> what it is now."""
RENAMED: dict[str, dict[str, str]] = _TABLES["renamed"]
"""Module -> a name in it before -> what it is now."""
_FIRST_NAME = "astune"
_PARENTS = {name.rpartition(".")[0] for name in (*MOVED, *SCATTERED)}


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
        """What ``name`` was in ``module`` before; None where nothing was called so.

        Of a class: a function that gives what its objects have now.
        """
        if (attribute := ATTRIBUTES.get(module, {}).get(name)) is not None:
            of = module.rpartition(".")[2].lower()
            tell(f"{of}.{name} is {of}.{attribute} now; the old name goes with the next release")
            return attrgetter(attribute)
        if (now := {**RENAMED, **SCATTERED}.get(module, {}).get(name)) is None:
            return None
        tell(f"{module}.{name} is {now.replace(':', '.')} now; the old name goes with the next release")
        home, _, new = now.partition(":")
        return getattr(_import(home, f"{module}.{name}"), new)


FINDER = Finder()


class _AtItsPlace(Loader):
    """Loads nothing: gives the module that is there under its new name."""

    def __init__(self, old: str, now: str) -> None:
        self._old, self._now = old, now
        self._spec: Any = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _import(self._now, self._old)
        if not self._old.startswith(f"{_FIRST_NAME}."):  # whose package has said so
            tell(f"{self._old} is {self._now} now; the old name goes with the next release")
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has put that of the old name there
        if self._old in _PARENTS and not hasattr(module, "__path__"):
            module.__path__ = []  # below the old name there were modules, and importlib looks for no others


class _Scattered(Loader):
    """Makes a module whose names are found when they are asked for."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # a new one

    def exec_module(self, module: ModuleType) -> None:
        name, names = module.__name__, SCATTERED[module.__name__]

        def find(attribute: str) -> object:
            if attribute not in names:
                raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
            return FINDER.find_name(name, attribute)

        module.__dict__.update(__getattr__=find, __all__=list(names))


def _import(now: str, old: str) -> ModuleType:
    """:raises ModuleNotFoundError: the package is not installed; says which one."""
    package = now.partition(".")[0]
    try:
        return importlib.import_module(now)
    except ModuleNotFoundError as e:
        if e.name != package:
            raise
        raise ModuleNotFoundError(
            f"{old} is {now} now, which comes with a package of its own: pip install {package.replace('_', '-')}",
            name=package,
        ) from None


_BETWEEN = {
    *(__file__, importlib.__file__, str(astuner.__file__), str(Path(__file__).parents[1] / "astune/__init__.py")),
    *(str(Path(str(astuner.__file__)).parent.joinpath(*name.split(".")[1:-1])) + ".py" for name in ATTRIBUTES),
}


def tell(text: str) -> None:
    """Warn at the line that used the old name, however many frames of the import system are between."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename in _BETWEEN or frame.f_code.co_filename.startswith("<frozen ")):
        frame = frame.f_back
    module, seen = frame.f_globals.get("__name__", ""), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, FutureWarning, frame.f_code.co_filename, frame.f_lineno, module, seen)
