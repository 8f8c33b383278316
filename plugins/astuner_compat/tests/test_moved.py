"""Modules that were somewhere else before: their old names give the same module, and say where it is now."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import astuner
from astuner.plugins import loader
from astuner.plugins.registry import import_target, resolve
from astuner_compat.moved import MOVED, RENAMED, place_now
from tests.table import table

CORE = Path(astuner.__file__).parent


def python(code: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A process of its own, in which nothing is imported yet."""
    command = [sys.executable, "-W", "error", "-W", "always::FutureWarning:__main__", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=check)


@table("old", MOVED)
def test_nothing_has_an_old_name_of_its_own(old: str):
    """Else it would be found under it or not, by the order of imports."""
    path = CORE.joinpath(*old.split(".")[1:])
    assert not path.with_suffix(".py").exists()
    assert not (path / "__init__.py").exists()


@table(
    "code",
    [
        "import astuner.errors; astuner.errors.ConfigError",
        "from astuner.errors import ConfigError",
        "from astuner import errors",
        "import astuner; astuner.errors.ConfigError",
        "import astuner.chat.agentscope1",
    ],
)
def test_every_way_to_import_it_works_and_names_the_new_place(code: str):
    (said,) = [line for line in python(code).stderr.splitlines() if "FutureWarning" in line]
    assert said.startswith("<string>:1: ")
    assert " to astuner.contracts.errors;" in said or " to astuner_agentscope.agentscope1;" in said


def test_what_is_in_a_package_that_moved_is_not_loaded_twice():
    python(
        "import warnings; warnings.simplefilter('ignore')\n"
        "import astuner.helper_models.reply as old, astuner_helpers.reply as new\n"
        "assert old is new\n"
        "import astuner.endpoint, astuner.endpoint.errors as old, astuner_gateway.endpoint.errors as new\n"
        "assert old is new"
    )


def test_patching_the_old_name_patches_the_new_one(monkeypatch: pytest.MonkeyPatch):
    sys.modules.pop("astuner.judge", None)
    with pytest.warns(FutureWarning, match=r"astuner\.contracts\.judge"):
        old = importlib.import_module("astuner.judge")
    monkeypatch.setattr(old, "GroupJudge", 1)
    assert import_target("astuner.contracts.judge:GroupJudge") == 1


def test_without_the_package_it_says_which_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "astuner_sandbox"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "astuner.sandbox", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Without("astuner_sandbox"), *sys.meta_path])
    expected = "astuner.sandbox was renamed to astuner_sandbox, .*: pip install astuner-sandbox$"
    with pytest.raises(ModuleNotFoundError, match=expected):
        importlib.import_module("astuner.sandbox")


class Without:
    """As if a package were not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_name_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'astuner\.error'"):
        importlib.import_module("astuner.error")
    assert not hasattr(astuner, "error")
    assert place_now("astuner.testing") is None


def test_a_file_that_names_the_old_place_still_finds_it():
    from astuner_helpers.weighted import weighted

    manager = loader.load_plugins()
    sys.modules.pop("astuner.builtin.weighted", None)
    with pytest.warns(FutureWarning, match=r"astuner_helpers\.weighted"):
        assert resolve(manager, "judge", "astuner.builtin.weighted->weighted") is weighted


def test_what_was_in_the_module_of_plugins_is_still_there():
    import astuner.plugins

    assert astuner.plugins.PluginManager is loader.PluginManager
    assert astuner.plugins.load_plugins is loader.load_plugins


def test_without_this_package_an_old_name_is_not_found():
    code = "import astuner; astuner.older_modules = lambda: iter(()); import astuner.errors"
    said = python(code, check=False).stderr
    assert "ModuleNotFoundError: No module named 'astuner.errors'" in said


def test_to_import_astuner_loads_none_of_it():
    assert "moved" not in python("import sys, astuner, astuner.contracts.types; print(*sys.modules)").stdout


@table("module, names", RENAMED.items())
def test_an_old_name_in_a_module_is_what_has_the_new_one(module: str, names: dict[str, str]):
    home = importlib.import_module(module)
    for old, now in names.items():
        with pytest.warns(FutureWarning, match=f"{module}.{old} was renamed to {now.replace(':', '.')};"):
            assert getattr(home, old) is import_target(now)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        home.nothing  # noqa: B018
