"""Listing and help stay cheap, with every plugin installed: asserted on what is imported, since times flake."""

import json
import subprocess
import sys

import pytest

from astuner.plugins.loader import PluginStatus, load_plugins
from astuner_testing.plugins import HEAVY

HEAVY_TO_LIST = {*HEAVY, "omegaconf", "yaml", "tokenizers", "jinja2", "peft", "huggingface_hub"}
HEAVY_FOR_HELP = {*HEAVY_TO_LIST, "pydantic"}  # typer itself imports it to read the arguments of a command

CODE = """
import json, sys
arguments = json.loads(sys.argv[1])
if arguments is None:
    import astuner
else:
    from astuner.cli import main
    try:
        main(arguments)
    except SystemExit as e:
        assert not e.code, e.code
print("\\n" + json.dumps(sorted(sys.modules)))
"""


def imported_by(arguments):
    command = [sys.executable, "-c", CODE, json.dumps(arguments)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    return set(json.loads(shown.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [None, ["--help"], ["plugins"], ["plugins", "--json"], ["run", "--help"], ["kill"]],
    ids=lambda a: " ".join(a or ["import astuner"]),
)
def test_nothing_heavy_is_imported(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path))
    heavy = HEAVY_FOR_HELP if arguments in (None, ["--help"]) else HEAVY_TO_LIST
    assert sorted({m.partition(".")[0] for m in imported_by(arguments)} & heavy) == []


def test_no_target_is_imported_to_list_it():
    found = imported_by(["plugins", "-v"])
    targets = {
        provider.target.partition(":")[0]
        for plugin in load_plugins().plugins
        for offered in plugin.provides.values()
        for provider in offered.values()
    }
    assert targets
    assert found & targets == set()


def test_all_our_plugins_took_part():
    status = {p.dist: p.status for p in load_plugins().plugins}
    assert {"astuner-core", "astuner-local", "astuner-math"} <= set(status)
    assert {p for p, s in status.items() if s is not PluginStatus.LOADED} == set()


@pytest.mark.slow
def test_a_heavy_import_would_be_seen():
    assert "json" in imported_by(["--version"])
    assert "yaml" in imported_by(["config", "schema"])
