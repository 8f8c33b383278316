"""ASTuner tunes AgentScope agents with reinforcement learning.

The public names stand in ``__init__.pyi``; each is imported when first touched, so ``import astuner`` costs nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
API_VERSION = "0.1"
"""What plugins are written for; one states it as its own requirement, ``astuner-core>=0.1,<0.2``, which is read before
the plugin is imported."""


def public_names(module: str, file: str) -> tuple[dict[str, str], Callable[[str], object]]:
    """The public names of a package and where each is, by the stub beside ``file``; and its ``__getattr__``, which
    imports one when it is first touched.

    That raises `ImportError` where the name is of a package that is not installed; it says how to have it.
    """
    stub = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
    home = {name: place for place, name in re.findall(r"^from ([\w.]+) import (\w+) as", stub, re.MULTILINE)}

    def find(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        package = home[name].partition(".")[0]
        try:
            value = vars(sys.modules[module])[name] = getattr(import_module(home[name]), name)
        except ModuleNotFoundError as e:
            if e.name != package:
                raise
            install = f"pip install {package.replace('_', '-')}"
            raise ImportError(f"{module}.{name} comes with a package of its own: {install}", name=package) from None
        return value

    return home, find


_HOME, _find = public_names(__name__, __file__)

__all__ = ["API_VERSION", "__version__", *sorted(_HOME)]


def __getattr__(name: str) -> object:
    if name not in _HOME and not name.startswith("_") and _Moved.find_spec(f"astuner.{name}") is not None:
        return import_module(f"astuner.{name}")
    return _find(name)


def older_modules() -> Iterator[Any]:
    """What knows the older names of modules: a package that is installed names it by an entry point.

    It is a finder of modules (`importlib.abc.MetaPathFinder`), and its ``find_name(module, name)`` gives what a name in
    a module was before, or None.
    """
    from astuner.contracts.installed import readable

    for entry in readable("astuner.older_modules"):
        yield entry.load()


def older_names(module: str) -> Callable[[str], object]:
    """The ``__getattr__`` of a module some of whose names were others before, as what is in `older_modules` knows."""

    def find(name: str) -> object:
        if not name.startswith("_"):
            for older in older_modules():
                if (found := older.find_name(module, name)) is not None:
                    return found
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find


class _Moved:
    """Asked for a module that nobody finds: it may have had this name before."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> Any:
        if not name.startswith("astuner."):
            return None
        return next((spec for older in older_modules() if (spec := older.find_spec(name, path, target))), None)


sys.meta_path.append(_Moved)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
