"""What `astuner env setup` keeps: whole or not at all, this user's only, and never at another path."""

import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.contracts.errors import ConfigError, RunError
from astuner_env import settings
from astuner_env.environment_setup import EnvironmentSettings
from tests.table import table


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_what_is_saved_is_loaded_and_nobody_else_may_read_it(home):
    assert settings.load("maze") == EnvironmentSettings()
    assert not settings.is_saved("maze")
    kept = EnvironmentSettings(python="/opt/py/bin/python", environ={"MAZE_ROOT": "/data/maße"})
    file = settings.save("maze", kept)
    assert file == home / "environments" / "maze.json"
    assert settings.load("maze") == kept
    assert settings.is_saved("maze")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    settings.save("maze", EnvironmentSettings(python="/other"))
    assert settings.load("maze").python == "/other"
    assert [p.name for p in file.parent.iterdir()] == ["maze.json"], "temporary files are left"


def test_a_failed_write_leaves_the_old_settings(monkeypatch):
    settings.save("maze", EnvironmentSettings(python="/old"))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunError, match="No space left on device"):
        settings.save("maze", EnvironmentSettings(python="/new"))
    assert settings.load("maze").python == "/old"


@table("name", ["", ".", "..", "../x", "a/b", "/etc/passwd", ".x", "-x", "a b", "x\n", "ü", "x.json"])
def test_a_name_that_could_be_another_path_is_refused(name):
    for use in (
        settings.load,
        settings.folder_of,
        settings.is_saved,
        lambda n: settings.save(n, EnvironmentSettings()),
    ):
        with pytest.raises(ConfigError, match="not a valid environment name"):
            use(name)


@given(st.text(max_size=140))
def test_a_name_is_refused_or_stays_inside(name):
    try:
        file, folder = settings.file_of(name), settings.folder_of(name)
    except ConfigError:
        return
    assert file.parent == folder.parent == folder.resolve().parent
    assert file != folder


@table("text", ["", "{", "[]", '{"python": 3}', '{"environ": []}', '{"environ": {"A": 1}}', '{"pyhton": ""}', "\xff"])
def test_settings_that_are_none_are_refused_with_what_to_type(text):
    file = settings.save("maze", EnvironmentSettings())
    file.write_text(text, encoding="latin-1")
    with pytest.raises(RunError, match=r"Run: astuner env setup maze"):
        settings.load("maze")


def test_settings_that_others_could_have_written_are_not_used():
    file = settings.save("maze", EnvironmentSettings(python="/bin/true"))
    file.chmod(0o622)
    with pytest.raises(RunError, match="other users can write it"):
        settings.load("maze")
    file.chmod(0o644)
    assert settings.load("maze").python == "/bin/true"


def test_the_file_is_plain(home):
    settings.save("maze", EnvironmentSettings(environ={"A": "b"}))
    assert json.loads((home / "environments" / "maze.json").read_text()) == {"python": "", "environ": {"A": "b"}}
