"""Explain why an import failed: a similar name, or an installed package of another version.

Only error paths call this module. It reads package metadata, imports nothing, and never raises.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import itertools
import json
import os
import re
import sys
import traceback
from contextlib import suppress
from types import ModuleType
from urllib.parse import urlsplit
from urllib.request import url2pathname

from astuner.contracts.errors import safe_text

TYPO = 0.8
"""Minimum `difflib` similarity of a suggested name. Renamed classes, such as `ReActAgent` and `RealtimeAgent`, are less
similar."""


def import_hint(error: BaseException) -> str:
    """Return the end of a message about a name or a module that does not exist, or an empty string.

    If the missing name belongs to an installed package, the hint names the package's version, because the code may have
    been written for a different one. The standard library, namespace packages and user modules have no version.
    """
    module: object = None
    missing: str | None = ""
    if type(error) is ModuleNotFoundError and error.name:
        package, path = _nearest_package(error.name)
        if package is None or _file_of(package) is None:
            return f"; is {path} installed in this environment?"
        module, missing = package, path.rpartition(".")[2]
    elif type(error) is ImportError and error.name:
        module = sys.modules.get(error.name)
        matches = re.match(r"cannot import name '(\w+)' from '", safe_text(error))  # not: from partially initialized
        missing = matches[1] if matches else ""
    elif type(error) is AttributeError:
        module, missing = error.obj, error.name
    if not isinstance(module, ModuleType) or not missing:
        return ""
    return _similar_name(missing, module) + _version_note(module, error)


def _nearest_package(name: str) -> tuple[ModuleType | None, str]:
    """Return the imported package that lacks a part of the module ``name``, if any, and the name up to that part."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:depth]))
        if isinstance(module, ModuleType):
            return module, ".".join(parts[: depth + 1])
    return None, parts[0]


def _similar_name(missing: str, module: ModuleType) -> str:
    with suppress(Exception):  # a module may define its own __dir__
        names = [name for name in dir(module) if not name.startswith("_")]
        return "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(missing, names, 1, TYPO))
    return ""


def _version_note(module: ModuleType, error: BaseException) -> str:
    installed = distribution_of(_file_of(module) or "")
    if not installed or distribution_of(_asking_file(error)) == installed:  # a package's own import
        return ""
    return f" ({installed} is installed; the file may be written for another version)"


def _asking_file(error: BaseException) -> str:
    """Return the file with the import or the attribute that failed."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    if isinstance(error, AttributeError):  # a module's own __getattr__ may have raised it
        frames = list(itertools.takewhile(lambda frame: frame.name != "__getattr__", frames))
    return frames[-1].filename if frames else ""


def _file_of(module: ModuleType) -> str | None:
    file = vars(module).get("__file__")  # getattr could run a module's own __getattr__
    return file if isinstance(file, str) else None


@functools.cache
def distribution_of(file: str) -> str:
    """Return ``NAME VERSION`` of the installed distribution that contains a file, or an empty string.

    `importlib.metadata.packages_distributions` has the same answer for modules. It parses the files of all
    distributions, which takes seconds; this searches their text.
    """
    projects: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        with suppress(Exception):  # any installed distribution may be broken
            if _lists(distribution, file):
                return f"{distribution.name} {distribution.version}"
            if file.startswith(project := _editable_project(distribution) or "\0"):
                projects[project] = distribution
    with suppress(Exception):
        innermost = projects[max(projects, key=len)]  # ValueError without any
        return f"{innermost.name} {innermost.version}"
    return ""


def _lists(distribution: importlib.metadata.Distribution, file: str) -> bool:
    """Return whether a distribution installed a file."""
    root = os.path.join(str(distribution.locate_file("")), "")
    if not file.startswith(root):
        return False
    relative = file[len(root) :].replace(os.sep, "/")
    if (record := distribution.read_text("RECORD")) is not None:
        return f"\n{relative}," in f"\n{record}"
    modules = (distribution.read_text("top_level.txt") or "").split()  # egg-info, as in a system's own packages
    return relative.split("/")[0].removesuffix(".py") in modules


def _editable_project(distribution: importlib.metadata.Distribution) -> str | None:
    """Return the folder of an editable installation, with a separator at its end."""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return os.path.join(url2pathname(urlsplit(origin["url"]).path), "")
