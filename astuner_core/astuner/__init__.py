"""Train the model inside an agent with reinforcement learning.

``__init__.pyi`` lists the public names. Each is imported on first use, so ``import astuner`` is cheap.
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
"""Version of the plugin API.

A plugin declares the versions it supports as a requirement, ``astuner-core>=0.1,<0.2``. The loader checks it before it
imports the plugin.
"""


def public_names(module: str, file: str) -> tuple[dict[str, str], Callable[[str], object]]:
    """Return a package's public names and its lazy ``__getattr__``, both read from the stub next to ``file``.

    ``__getattr__`` imports a name on first use. It raises `ImportError` with the install command if the name belongs to
    a package that is not installed.

    :returns: Name -> module that defines it, and the ``__getattr__``.
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
            raise ImportError(f"{module}.{name} needs a separate package: {install}", name=package) from None
        return value

    return home, find


_HOME, _find = public_names(__name__, __file__)

__all__ = ["API_VERSION", "__version__", *sorted(_HOME)]


def __getattr__(name: str) -> object:
    if name not in _HOME and not name.startswith("_") and _Moved.find_spec(f"astuner.{name}") is not None:
        return import_module(f"astuner.{name}")
    return _find(name)


def older_modules() -> Iterator[Any]:
    """Yield the installed finders of legacy module names, from the entry points ``astuner.older_modules``.

    Each is a module finder (`importlib.abc.MetaPathFinder`) with a method ``find_name(module, name)``, which returns
    the object that a legacy name in a module refers to, or None.
    """
    from astuner.contracts.installed import readable

    for entry in readable("astuner.older_modules"):
        yield entry.load()


def older_names(module: str) -> Callable[[str], object]:
    """Return a ``__getattr__`` that resolves legacy names of ``module`` with the finders in `older_modules`."""

    def find(name: str) -> object:
        if not name.startswith("_"):
            for older in older_modules():
                if (found := older.find_name(module, name)) is not None:
                    return found
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find


class _Moved:
    """Module finder for legacy module names, consulted after all other finders."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> Any:
        if not name.startswith("astuner."):
            return None
        return next((spec for older in older_modules() if (spec := older.find_spec(name, path, target))), None)


sys.meta_path.append(_Moved)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
