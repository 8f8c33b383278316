"""`astuner env list`, `setup` and `doctor`, with real interpreters, a real pip and a real wheel."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from astuner import EnvironmentProvider, lock_file
from astuner.contracts.errors import ConfigError, MissingDependency, RunError
from astuner_env import settings, setup
from tests.table import table

from ._cli_kit import astuner, script, write_plugin, write_wheel

VERSION = ".".join(map(str, sys.version_info[:3]))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def see(tmp_path_factory):
    return write_plugin(tmp_path_factory.mktemp("installed"))


# --------------------------------------------------------------------------------------------------- the whole life


@pytest.fixture(scope="module")
def life(tmp_path_factory, see):
    """A person's afternoon with an environment that needs an interpreter of its own: step -> what was shown."""
    folder = tmp_path_factory.mktemp("life")
    home, links, shown = folder / "home", folder / "links", {}
    links.mkdir()

    def run(name, *arguments):
        shown[name] = astuner(
            "env", *arguments, home=home, see=see, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(links), PIP_NO_CACHE_DIR="1"
        )

    run("list before", "list", "--json")
    run("doctor before", "doctor", "far_corridor", "--json")
    run("no wheel", "setup", "far_corridor")
    run("doctor between", "doctor", "far_corridor")
    write_wheel(links)
    run("first", "setup", "far_corridor", "colour=blue")
    run("list after", "list")
    run("doctor after", "doctor", "far_corridor", "--json")
    run("again", "setup", "far_corridor")
    (home / "environments/far_corridor/venv/bin/python").unlink()
    run("doctor broken", "doctor", "far_corridor")
    run("mended", "setup", "far_corridor")
    for module in (home / "environments/far_corridor/venv").rglob("tinyworld*"):
        module.unlink() if module.is_file() else [f.unlink() for f in module.iterdir()] and module.rmdir()
    run("doctor without its package", "doctor")
    shown["home"] = home
    return shown


@pytest.mark.slow
def test_before_it_is_set_up_list_and_doctor_say_what_to_type(life):
    rows = {row["name"]: row for row in json.loads(life["list before"].out)}
    far = rows["far_corridor"]
    assert (far["ready"], far["missing"]) == (False, "astuner env setup far_corridor")
    assert (far["plugin"], far["splits"]) == ("corridor", ["train"])
    assert rows["corridor"]["ready"], rows["corridor"]
    assert rows["frozen_lake"]["plugin"] == "env"
    assert life["doctor before"].code == 1
    found = json.loads(life["doctor before"].out)[0]
    assert (found["ready"], found["findings"][0]["hint"]) == (False, "astuner env setup far_corridor")


@pytest.mark.slow
def test_an_install_that_fails_says_why_and_is_mended_by_the_same_command(life):
    failed = life["no wheel"]
    assert failed.code == 1
    assert "No matching distribution found for tinyworld" in failed.err
    assert failed.err.rstrip().endswith("astuner env setup far_corridor")
    assert "Traceback" not in failed.err
    assert life["doctor between"].code == 1
    assert "is not installed" in life["doctor between"].out
    first = life["first"]
    assert first.code == 0, first.err
    assert "venv (Python" in first.err, "the interpreter that was there is taken"
    assert "Creating a virtual" not in first.err
    assert "Successfully installed tinyworld-1.0" in first.err, "pip's own lines are the progress"
    assert "painting" in first.err
    assert first.out.startswith("far_corridor is ready on ")


def test_a_second_setup_does_nothing_that_is_done(life):
    assert life["again"].code == 0
    assert "Packages: up to date" in life["again"].err
    assert "Collecting" not in life["again"].err


def test_what_was_set_up_is_found_ready(life):
    kept = json.loads((life["home"] / "environments/far_corridor.json").read_text())
    assert Path(kept["python"]).parts[-4:] == ("far_corridor", "venv", "bin", "python")
    assert Path(kept["environ"]["CORRIDOR_PAINT"]).parts[-3:] == ("far_corridor", "data", "paint")
    assert "ready  ·  splits: train  ·  plugin: corridor" in life["list after"].out
    after = life["doctor after"]
    assert after.code == 0, after.out
    it, machine = json.loads(after.out)
    whats = [finding["what"] for finding in it["findings"]]
    assert [what.partition(" ")[0] for what in whats] == ["Python", "has", "has", "painted", "capacity:"]
    assert [finding["ok"] for finding in it["findings"]] == [True] * 5
    assert machine["findings"][0]["what"].startswith("code written by models is ")


def test_an_interpreter_that_broke_is_seen_and_made_again(life):
    assert life["doctor broken"].code == 1
    assert "Could not run" in life["doctor broken"].out
    assert life["mended"].code == 0
    assert "Creating a virtual environment" in life["mended"].err
    assert "Successfully installed tinyworld-1.0" in life["mended"].err


def test_without_a_name_the_doctor_minds_only_what_was_set_up(life):
    shown = life["doctor without its package"]
    assert shown.code == 1
    assert "requires tinyworld>=1.0,<2: not installed" in shown.out
    before_it = shown.out.partition("far_corridor")[0]
    assert "fail" not in before_it, "appworld was never set up, so it is no fault that it is not there"


# ------------------------------------------------------------------------------------------------- finding a Python


def test_an_interpreter_says_what_it_has():
    own = setup.ask_interpreter(sys.executable, ["json", "pytest", "no_such_module"])
    assert (own.version, own.modules) == (VERSION, ("json", "pytest"))
    assert own.lacks(["pytest", "pytest>=1", "./some.whl"]) == []
    assert [what for what, _ in own.lacks(["pytest<1", "no-such-dist==1"])] == ["pytest<1", "no-such-dist==1"]


@table("text", ["exit 127", "echo nonsense", "echo '{}'", "echo broken >&2; exit 1"])
def test_what_is_no_interpreter_is_not_believed(tmp_path, text):
    with pytest.raises(RunError, match="is not a working Python"):
        setup.ask_interpreter(script(tmp_path / "python", text))


def test_stubs_on_the_path_are_passed_over(tmp_path, monkeypatch):
    stub = script(tmp_path / "a" / "python3", "exit 127")
    script(tmp_path / "a" / "python3.11", "exit 127")
    (tmp_path / "b").mkdir()
    real = script(tmp_path / "b" / "python3", f'exec {sys.executable} "$@"')
    monkeypatch.setenv("PATH", os.pathsep.join([str(stub.parent), str(real.parent)]))
    monkeypatch.setattr(sys, "executable", str(stub))
    assert setup.find_interpreter(">=3.9").version == VERSION


@pytest.mark.slow
def test_a_python_that_there_is_not_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"No Python >=3.98 was found .*{VERSION} .*--python PATH"):
        setup.find_interpreter(">=3.98")
    with pytest.raises(ConfigError, match=rf"is Python {VERSION}, but >=3.98"):
        setup.find_interpreter(">=3.98", Path(sys.executable))
    with pytest.raises(ConfigError, match="--python nowhere/python: Could not run nowhere/python"):
        setup.find_interpreter("", Path("nowhere/python"))


# ------------------------------------------------------------------------------------------------------- refusals

LIGHT = EnvironmentProvider(target="x:Y", summary="x", requires=("json",))


def quiet(_: str) -> None: ...


@pytest.mark.slow
def test_an_environment_of_our_own_interpreter_needs_its_modules_only(home):
    assert setup.set_up("light", LIGHT, {}, say=quiet).python == ""
    assert settings.is_saved("light")
    lacking = replace(LIGHT, requires=("no_such_module",), install="pip install such")
    with pytest.raises(MissingDependency, match=r"requires no_such_module.*: pip install such"):
        setup.set_up("lacking", lacking, {}, say=quiet)
    assert not settings.is_saved("lacking")
    found = setup.diagnose("lacking", lacking)
    assert [(f.ok, f.hint) for f in found.findings][1] == (False, "pip install such")
    with pytest.raises(ConfigError, match="Omit --python"):
        setup.set_up("light", LIGHT, {}, python=Path(sys.executable), say=quiet)


@pytest.mark.slow
def test_options_are_those_that_the_plugin_has(home, see, monkeypatch):
    monkeypatch.syspath_prepend(str(see))
    painted = replace(LIGHT, setup="astuner_corridor.painting:CorridorSetup")
    with pytest.raises(ConfigError, match=r"no option 'color'; did you mean colour\?"):
        setup.set_up("light", painted, {"color": "red"}, say=quiet)
    own_python = replace(painted, python=">=3.98")  # of which there is none, so that looking for it would be told
    with pytest.raises(RunError, match="no checks today; colour=white"):
        setup.set_up("light", own_python, {"colour": "unchecked"}, say=quiet)
    with pytest.raises(ConfigError, match="no option 'x'; colour: of the walls"):
        setup.set_up("light", painted, {"x": "red"}, say=quiet)
    with pytest.raises(RunError, match=r"failed in astuner_corridor.painting.CorridorSetup.setup: ZeroDivisionError"):
        setup.set_up("light", painted, {"colour": "plaid"}, say=quiet)
    with pytest.raises(RunError, match="walls need a colour"):
        setup.set_up("light", painted, {"colour": "none"}, say=quiet)
    assert not settings.is_saved("light"), "settings are the last thing that is written"
    said = []
    assert "CORRIDOR_PAINT" in setup.set_up("light", painted, {"colour": "red"}, say=said.append).environ
    assert said == ["painting"]


@pytest.mark.slow
def test_what_is_wrong_with_one_environment_hides_no_other(home):
    settings.save("frozen_lake", settings.EnvironmentSettings()).write_text("{")
    rows = {row["name"]: row for row in json.loads(astuner("env", "list", "--json", home=home).out)}
    assert rows["frozen_lake"]["missing"] == "astuner env doctor frozen_lake"
    assert rows["reasoning_gym"]["ready"]
    shown = astuner("env", "doctor", "--json", home=home)
    found = {it["name"]: it for it in json.loads(shown.out)}
    assert shown.code == 1
    assert found["frozen_lake"]["findings"][0]["hint"] == "astuner env setup frozen_lake"
    assert found["reasoning_gym"]["ready"]
    mended = astuner("env", "setup", "frozen_lake", home=home)
    assert mended.code == 0, "what the doctor says to type helps"
    assert "from scratch" in mended.err
    assert settings.load("frozen_lake") == settings.EnvironmentSettings()
    nameless = setup.diagnose("a b", LIGHT)
    assert (nameless.is_ready, nameless.wanted) == (False, False)


def test_options_are_listed(home, see):
    shown = astuner("env", "setup", "far_corridor", "--options", home=home, see=see)
    assert (shown.code, shown.out, shown.err) == (0, "colour=…  of the walls\n", "")
    assert not home.exists(), "nothing is set up by that"


def test_two_setups_at_once_do_not_meet(home):
    folder = settings.folder_of("light")
    folder.mkdir(parents=True)
    with lock_file(folder / "setup.lock"), pytest.raises(RunError, match="Another `astuner env setup light`"):
        setup.set_up("light", LIGHT, {}, say=quiet)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("setup", "frozen_lak"), "did you mean frozen_lake?"),
        (("doctor", "frozen_lak"), "did you mean frozen_lake?"),
        (("setup", "frozen_lake", "size"), "'size' is not KEY=VALUE"),
        (("setup", "frozen_lake", "size=3"), "no option 'size'; it has no options"),
    ],
)
def test_what_is_asked_wrongly_is_refused(home, arguments, says):
    shown = astuner("env", *arguments, home=home)
    assert (shown.code, shown.out) == (2, "")
    assert says in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.slow
def test_a_plugin_that_is_turned_off_is_not_listed(home, see):
    names = {row["name"] for row in json.loads(astuner("-p", "no:env", "plugins", "--json", home=home, see=see).out)}
    assert "corridor" in names
    shown = astuner("-p", "no:corridor", "env", "list", "--json", home=home, see=see)
    assert "corridor" not in {row["name"] for row in json.loads(shown.out)}
