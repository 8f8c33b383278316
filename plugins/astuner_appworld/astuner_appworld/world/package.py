"""The `appworld` package, imported once, with what its import does to the process undone.

Importing it reads the nearest ``.env`` file into ``os.environ``: the experiment's own keys, when the interpreter lies
in the project.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import os
import sys
from pathlib import Path

from astuner_sandbox.isolation.confine import SYSTEM


def load() -> None:
    """Import everything a world, a shell and an evaluation need; a second call costs nothing. Starts no thread."""
    before = dict(os.environ)
    os.environ["PYTHON_DOTENV_DISABLED"] = "1"
    try:
        from appworld.apps import build_main_app, get_all_apps
        from appworld.collections.models import ModelCollection  # noqa: F401
        from appworld.common.utils import get_name_to_apis, import_models_module

        for name in get_all_apps():  # the apps' modules, the route tables and the code that makes a world
            import_models_module(name)
            get_name_to_apis(name)
        build_main_app(tuple(sorted(get_all_apps())))
        import _pytest.assertion  # noqa: F401  (an evaluation imports both: here it is done once for all)
        import freezegun
        import pytest  # noqa: F401
        from IPython.terminal.embed import InteractiveShellEmbed  # noqa: F401

        # stopping the clocks looks at every attribute of every module, and those of `astuner` are imported when touched
        freezegun.configure(extend_ignore_list=["astuner"])
        with freezegun.freeze_time("2023-05-18"):  # what it finds out about every module is then shared by all forks
            pass
    finally:
        os.environ.clear()
        os.environ.update(before)


def use_root(root: Path) -> None:
    """Point the package at ``root``, in this process."""
    import appworld

    appworld.update_root(str(root))


def lent_sources() -> tuple[str, ...]:
    """Where the borrowed packages lie: the package quotes the source of whatever is on the stack when a test fails."""
    packages = {name.partition(".")[0] for name in sys.modules if name.startswith("astuner")}
    return tuple(sorted(str(path) for name in packages for path in getattr(sys.modules.get(name), "__path__", ())))


def places_to_read() -> tuple[str, ...]:
    """The interpreter, its packages and the time zones: what Python code may need besides its data."""
    places = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path, *(str(Path(p).resolve()) for p in sys.path if p)}
    return tuple(sorted(place for place in places.union(SYSTEM) if place and Path(place).exists()))
