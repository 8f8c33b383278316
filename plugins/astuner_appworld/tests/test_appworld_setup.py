"""Bringing AppWorld to a machine: what `astuner env setup` and `doctor` do, and say when something is missing."""

from __future__ import annotations

import json
import stat
import sys
from dataclasses import replace

import pytest

from astuner.contracts.errors import RunError
from astuner_appworld.setup import AppWorldSetup, probe
from astuner_env.environment_setup import EnvironmentSettings
from tests.table import table


def _setup(settings, folder, **options):
    said = []
    return AppWorldSetup().setup(settings, folder, options, said.append), said


def test_setting_up_again_changes_nothing(appworld_settings, root, tmp_path):
    before = (root / "data" / "datasets" / "train.txt").stat()
    kept, said = _setup(appworld_settings, tmp_path)
    assert kept == appworld_settings
    assert said == [f"Data in {root}: dev 4, test_normal 4, train 16"]
    assert (root / "data" / "datasets" / "train.txt").stat() == before


def test_a_root_that_is_there_is_used(appworld_python, root, tmp_path):
    kept, _ = _setup(EnvironmentSettings(python=appworld_python), tmp_path, root=str(root), confinement="require")
    assert kept.environ == {"APPWORLD_ROOT": str(root), "ASTUNER_APPWORLD_CONFINEMENT": "require"}


def test_the_doctor_finds_everything(appworld_settings):
    findings = AppWorldSetup().doctor(appworld_settings)
    assert all(finding.ok and not finding.hint for finding in findings)
    said = "\n".join(finding.what for finding in findings)
    for word in ("Python 3.1", "appworld 0.1.3.post1", "apps unpacked", "train 16", "version 0.1.0", "confinement"):
        assert word in said


def test_the_doctor_says_what_is_missing(appworld_settings, tmp_path):
    nowhere = replace(appworld_settings, environ={})
    assert [f.what for f in AppWorldSetup().doctor(nowhere) if not f.ok] == [
        "APPWORLD_ROOT is not set. Run: astuner env setup appworld root=FOLDER"
    ]
    (finding,) = AppWorldSetup().doctor(EnvironmentSettings())
    assert "needs a separate interpreter" in finding.what
    (finding,) = AppWorldSetup().doctor(EnvironmentSettings(python=str(tmp_path / "python")))
    assert "Could not run" in finding.what
    without = AppWorldSetup().doctor(EnvironmentSettings(python=sys.executable))
    assert without[-1].what == "the package appworld is not installed in its interpreter"
    assert all(finding.hint == "astuner env setup appworld" for finding in without[1:])


@table(
    ("options", "said"),
    [
        ({"synthetic": "yes"}, "synthetic must be true or false"),
        ({"confinement": "maybe"}, "confinement must be auto or require"),
        ({"synthetic": "true", "bundle": "x"}, "synthetic and bundle"),
        ({"root": "/tmp/my_memory/x"}, "'memory' in its path"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options, said, tmp_path):
    with pytest.raises(RunError, match=said):
        _setup(EnvironmentSettings(python=sys.executable), tmp_path, **options)


@pytest.fixture
def quiet_python(tmp_path):
    """An interpreter whose package prints that a download failed, and exits with 0, as the real one does."""
    facts = json.dumps({"python": "3.11", "version": "0.1.3.post1", "unpacked": True, "db_version": "0.1.0"})
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\ncase \"$*\" in *facts) echo '{facts}';; *) echo 'Status code: 403';; esac\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return EnvironmentSettings(python=str(script))


def test_a_download_that_fails_silently_is_an_error(quiet_python, tmp_path):
    with pytest.raises(RunError, match="still contains no data") as refused:
        _setup(quiet_python, tmp_path)
    assert "bundle=FILE" in str(refused.value)
    assert "synthetic=true" in str(refused.value)


def test_a_bundle_that_is_not_there_is_named(quiet_python, tmp_path):
    with pytest.raises(RunError, match=r"nothing\.bundle"):
        _setup(quiet_python, tmp_path, bundle=str(tmp_path / "nothing.bundle"))


def test_a_bundle_is_unpacked_by_the_package(appworld_python, root, tmp_path):
    """A bundle as the package itself packs one, of the synthetic root."""
    import subprocess

    bundle = tmp_path / "data-0.1.0.bundle"
    code = (
        "import sys\n"
        "from appworld.common.constants import PASSWORD, SALT\n"
        "from appworld.common.utils import pack_bundle\n"
        "pack_bundle(bundle_file_path=sys.argv[1], base_directory=sys.argv[2], include_directories=['data'],\n"
        "            password=PASSWORD, salt=SALT)\n"
    )
    done = subprocess.run([appworld_python, "-c", code, str(bundle), str(root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept, said = _setup(EnvironmentSettings(python=appworld_python), tmp_path, bundle=str(bundle))
    assert kept.environ["APPWORLD_ROOT"] == str(tmp_path / "root")
    assert said[-1].endswith("dev 4, test_normal 4, train 16")


def test_a_bundle_of_something_else_is_refused(appworld_python, tmp_path):
    bundle = tmp_path / "wrong.bundle"
    bundle.write_bytes(b"nothing of the kind")
    with pytest.raises(RunError, match="Could not unpack"):
        _setup(EnvironmentSettings(python=appworld_python), tmp_path, bundle=str(bundle))


def test_probing_does_not_import_the_package(appworld_python):
    facts = probe(appworld_python)
    assert facts["version"] == "0.1.3.post1"
    assert facts["unpacked"] is True
    assert facts["db_version"] == "0.1.0"
