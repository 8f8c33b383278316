"""Import the `appworld` package once and undo the side effects of its import.

The import reads the nearest ``.env`` file into ``os.environ``. If the interpreter is inside the project folder, that
file contains the experiment's secrets.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import os
import sys
from pathlib import Path

from astuner_sandbox.isolation.confine import SYSTEM


def load() -> None:
    """Import everything that a world, a shell and an evaluation need, without starting threads; idempotent."""
    before = dict(os.environ)
    os.environ["PYTHON_DOTENV_DISABLED"] = "1"
    try:
        from appworld.apps import build_main_app, get_all_apps
        from appworld.collections.models import ModelCollection  # noqa: F401
        from appworld.common.utils import get_name_to_apis, import_models_module

        for name in get_all_apps():  # modules of the apps, route tables and model code
            import_models_module(name)
            get_name_to_apis(name)
        build_main_app(tuple(sorted(get_all_apps())))
        import _pytest.assertion  # noqa: F401  (both are needed by evaluations)
        import freezegun
        import pytest  # noqa: F401
        from IPython.terminal.embed import InteractiveShellEmbed  # noqa: F401

        # freezegun reads every attribute of every module, which would trigger the lazy imports of `astuner`
        freezegun.configure(extend_ignore_list=["astuner"])
        with freezegun.freeze_time("2023-05-18"):  # all forks share freezegun's cache
            pass
    finally:
        os.environ.clear()
        os.environ.update(before)


def use_root(root: Path) -> None:
    """Point the package at ``root``, in this process."""
    import appworld

    appworld.update_root(str(root))


def lent_sources() -> tuple[str, ...]:
    """Return the folders of the lent packages; if a test fails, the package reads the source of all stack frames."""
    packages = {name.partition(".")[0] for name in sys.modules if name.startswith("astuner")}
    return tuple(sorted(str(path) for name in packages for path in getattr(sys.modules.get(name), "__path__", ())))


def places_to_read() -> tuple[str, ...]:
    """Return the paths of the interpreter, its packages and the time zones."""
    places = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path, *(str(Path(p).resolve()) for p in sys.path if p)}
    return tuple(sorted(place for place in places.union(SYSTEM) if place and Path(place).exists()))
