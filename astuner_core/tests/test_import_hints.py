"""An import that fails names the installed package that lacks the name, with its version."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from astuner.contracts.errors import PluginError
from astuner.contracts.types import StopReason
from astuner.plugins.import_hints import distribution_of, import_hint
from astuner.plugins.user_code import import_user_code
from astuner.rollout.endings import blame
from tests.table import table

NOTE = "is installed; the file may be written for another version)"
OTHER_NAME = "an_import_name"


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages: a distribution under another name, a namespace, egg-info, an editable one."""
    site, project = tmp_path / "site", tmp_path / "project"
    install(site, "other-name", "3.1.4", {f"{OTHER_NAME}/__init__.py": "def present(): ...\n"})
    install(site, "part-of-a-space", "0.5", {"a_space/part/__init__.py": ""})
    install(site, "imports-wrongly", "1", {"imports_wrongly.py": "from an_import_name import gone\n"})
    install(site, "asks-itself", "2", {"asks_itself/__init__.py": "from asks_itself.inner import gone\n",
                                       "asks_itself/inner.py": ""})  # fmt: skip
    write(site / "an_egg.py", "")
    write(site / "An_Egg-7.0.egg-info" / "PKG-INFO", "Metadata-Version: 1.0\nName: An-Egg\nVersion: 7.0\n")
    write(site / "An_Egg-7.0.egg-info" / "top_level.txt", "an_egg\n")
    write(project / "src" / "editable_one" / "__init__.py", "")
    install(site, "editable-one", "9.9", {})
    origin = f'{{"url": "{project.as_uri()}", "dir_info": {{"editable": true}}}}'
    write(site / "editable_one-9.9.dist-info" / "direct_url.json", origin)
    write(site / "broken-1.dist-info" / "RECORD", "")  # without METADATA
    monkeypatch.syspath_prepend(str(project / "src"))
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)
    distribution_of.cache_clear()
    yield project
    for name in set(sys.modules) - before:
        del sys.modules[name]


def install(site: Path, name: str, version: str, files: dict[str, str]) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    write(info / "RECORD", "".join(f"{path},sha256=x,1\n" for path in files))
    for path, text in files.items():
        write(site / path, text)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


PYDANTIC = f"pydantic {importlib.metadata.version('pydantic')} {NOTE}"


@table(
    ("code", "end"),
    [
        ("from pydantic import BaseModelOfOld", f"({PYDANTIC}"),
        ("from pydantic import BaseModl", f"; did you mean BaseModel? ({PYDANTIC}"),
        ("import pydantic.no_such_part", f"({PYDANTIC}"),
        ("import pydantic.no_such_part.deeper", f"({PYDANTIC}"),
        ("import pydantic\npydantic.no_such_name", f"({PYDANTIC}"),
        (f"from {OTHER_NAME} import gone", f" (other-name 3.1.4 {NOTE}"),
        (f"from {OTHER_NAME} import presnt", f"; did you mean present? (other-name 3.1.4 {NOTE}"),
        ("import imports_wrongly", f" (other-name 3.1.4 {NOTE}"),
        ("from an_egg import gone", f" (An-Egg 7.0 {NOTE}"),
        ("from editable_one import gone", f" (editable-one 9.9 {NOTE}"),
        ("from a_space.part import gone", f" (part-of-a-space 0.5 {NOTE}"),
        ("from a_space import gone", "(unknown location)"),
        ("import a_space.gone", "; is a_space.gone installed in this environment?"),
        ("import not_there_at_all.part", "; is not_there_at_all installed in this environment?"),
        ("from json import gone", "json/__init__.py)"),
        ("from json import lods", "; did you mean loads?"),
        ("import json.gone", "No module named 'json.gone'"),
        ("from my_own import gone", "my_own.py)"),
        ("import my_own.gone", "'my_own' is not a package"),
        ("import asks_itself", "asks_itself/inner.py)"),
        ("import in_a_circle", "in_a_circle.py)"),
        ("raise ImportError('no GPU here')", "no GPU here"),
        ("raise ImportError", "ImportError"),
    ],
)
def test_a_file_whose_import_fails_names_the_package_and_its_version(
    code: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "mine" / "my_own.py", "")
    write(tmp_path / "mine" / "in_a_circle.py", "from in_a_circle import later\n")
    file = write(tmp_path / "mine" / "workflow.py", f"{code}\n")
    with pytest.raises(PluginError) as raised:
        import_user_code(f"{file}->Flow")
    assert str(raised.value).startswith(f"{file}:")
    assert str(raised.value).endswith(end), str(raised.value)


def test_an_import_within_a_workflow_that_fails_names_the_version_too() -> None:
    with pytest.raises(ImportError) as raised:
        from pydantic import BaseModelOfOld  # noqa: F401
    reason, message = blame(raised.value, None)
    assert reason is StopReason.WORKFLOW_FAILED
    assert message.endswith(f"({PYDANTIC}")
    assert "test_import_hints.py" in message


class Hostile(ImportError):
    @property
    def name(self) -> str:  # type: ignore[override]
        raise KeyboardInterrupt


@table(
    "error",
    [Hostile("x"), ValueError("x"), ImportError("cannot import name 'x' from 'y'"), ImportError(name="no.such.module"),
     ModuleNotFoundError("x", name=""), ImportError("cannot import name 'x' from 'sys'", name="sys")],
)  # fmt: skip
def test_what_an_error_does_not_tell_is_not_guessed(error: BaseException) -> None:
    assert import_hint(error) == ""


def test_a_file_belongs_to_the_distribution_that_lists_it_or_whose_project_it_is_in(installed: Path) -> None:
    editable = installed / "src" / "editable_one" / "__init__.py"
    assert distribution_of(str(editable)) == "editable-one 9.9"
    assert distribution_of(str(installed.parent / "site" / OTHER_NAME / "__init__.py")) == "other-name 3.1.4"
    assert distribution_of(str(installed.parent / "site" / OTHER_NAME / "unlisted.py")) == ""
    assert distribution_of("") == ""
