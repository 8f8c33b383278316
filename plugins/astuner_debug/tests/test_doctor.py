"""`astuner doctor`: this machine, and what the plugins say of it, whatever becomes of one of them."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
from contextlib import closing
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from astuner import Provider
from astuner.cli import main
from astuner.contracts import diagnosis
from astuner.contracts.diagnosis import Finding, nvidia_smi
from astuner.plugins.loader import Plugin, PluginStatus
from astuner_debug import doctor_command
from astuner_debug.run_folder import of_run
from tests.table import table


def healthy():
    yield Finding(level="ok", what="driver", detail="1.0")
    yield Finding(level="fail", what="engine", detail="not installed", fix="pip install engine")


def broken():
    raise ZeroDivisionError("of mine")


def manager(**targets):
    plugin = SimpleNamespace(dist="astuner-acme")
    offers = [(plugin, name, Provider(target=f"{__name__}:{target}")) for name, target in targets.items()]
    return SimpleNamespace(offers=lambda kind: iter(offers) if kind == "diagnosis" else iter(()))


def test_findings_of_plugins_are_shown_whatever_becomes_of_another():
    found = list(doctor_command._of_plugins(manager(bad="broken", gone="no_such", good="healthy"), {}))
    assert [(f.what, f.level) for f in found] == [
        ("bad", "warn"), ("gone", "warn"), ("driver", "ok"), ("engine", "fail"),
    ]  # fmt: skip
    assert found[0].detail == "the diagnosis of astuner-acme failed: ZeroDivisionError: of mine"
    assert found[0].fix == "pip install --upgrade astuner-acme"
    assert "has no 'no_such'" in found[1].detail


@table(("script", "answer"), [("echo $1", "--query\n"), ("echo no devices; exit 9", None), (None, None)])
def test_nvidia_smi(tmp_path, monkeypatch, script, answer):
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    assert nvidia_smi("--query") == answer


def test_a_driver_that_hangs_is_not_taken_for_none(monkeypatch):
    def hangs(command, **_):
        raise subprocess.TimeoutExpired(command, 20)

    monkeypatch.setattr(diagnosis.shutil, "which", lambda name: name)
    monkeypatch.setattr(diagnosis.subprocess, "run", hangs)
    with pytest.raises(TimeoutError, match="nvidia-smi does not answer"):
        nvidia_smi("--query")


@pytest.fixture
def run_doctor(capsys):
    """Run the command; gives its exit code and stdout."""

    def run(*arguments):
        with pytest.raises(SystemExit) as e:
            main(["doctor", *arguments])
        return SimpleNamespace(code=e.value.code or 0, out=capsys.readouterr().out)

    return run


@pytest.fixture
def plugins_are(monkeypatch):
    def install(*plugins):
        def offers(kind):
            return ((p, name, provider) for p in plugins for name, provider in p.provides.get(kind, {}).items())

        manager = SimpleNamespace(plugins=list(plugins), offers=offers)
        monkeypatch.setattr(doctor_command, "command_line", lambda ctx: SimpleNamespace(plugins=manager))

    return install


def test_doctor_on_this_machine(run_doctor, tmp_path):
    result = run_doctor("--json", "--run-dir", str(tmp_path / "not" / "there"))
    findings = {f["what"]: f for f in json.loads(result.out)}
    assert findings["python"]["level"] == "ok"
    assert findings["astuner-core"]["level"] == "ok"
    assert findings["run folder"]["detail"] == f"{tmp_path} is writable"
    assert not (tmp_path / "not").exists()
    assert result.code == (1 if any(f["level"] == "fail" for f in findings.values()) else 0)


def installed(monkeypatch, **versions):
    real = diagnosis.metadata.version

    def version(name):
        if name not in versions:
            return real(name)
        if versions[name] is None:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(diagnosis.metadata, "version", version)


def test_doctor_names_missing_packages_and_broken_plugins(run_doctor, monkeypatch, plugins_are, tmp_path):
    installed(monkeypatch, pluggy="1.0", **{"astuner-bad": "1.0"})
    monkeypatch.setattr(
        doctor_command.metadata, "requires", lambda dist: ["pluggy>=1.5"] if dist == "astuner-core" else []
    )
    plugins_are(Plugin("bad", "astuner-bad", "1.0", "bad", PluginStatus.BROKEN, "ImportError: no acme"))
    result = run_doctor("--run-dir", str(tmp_path))
    assert result.code == 1
    assert "needs pluggy>=1.5, but 1.0 is installed" in result.out
    assert "is broken: ImportError: no acme" in result.out
    assert "pip uninstall astuner-bad" in result.out


def test_doctor_leaves_aside_what_this_environment_is_not_for(run_doctor, monkeypatch, plugins_are, tmp_path):
    """A backbone of which nothing is here is no fault where another one is whole; where a part of it is, it is one."""
    light = Provider(target="x:X", requires=("no_engine", "no_cluster"), install="pip install astuner-big")
    half = Provider(target="x:X", requires=("json", "no_cluster"))
    whole = Provider(target="x:X", requires=("json",))
    missing = {"astuner-big": ["no-engine==1"]}
    installed(monkeypatch, **{"astuner-big": "1.0", "astuner-small": "1.0", "no-engine": None})
    monkeypatch.setattr(doctor_command.metadata, "requires", lambda dist: missing.get(dist, []))

    def levels(**backbones):
        plugins_are(
            *(
                Plugin(name, f"astuner-{name}", "1.0", name, provides={"backbone": {name: provider}})
                for name, provider in backbones.items()
            )
        )
        result = run_doctor("--json", "--run-dir", str(tmp_path))
        return result.code, {f["what"]: (f["level"], f["fix"]) for f in json.loads(result.out)}["astuner-big"]

    assert levels(big=light, small=whole) == (0, ("skip", "pip install astuner-big, in a separate environment"))
    assert levels(big=half, small=whole) == (1, ("fail", "pip install 'no-engine==1'"))
    assert levels(big=light) == (1, ("fail", "pip install 'no-engine==1'"))


def test_a_package_that_only_such_backbones_need_is_left_aside(run_doctor, monkeypatch, plugins_are, tmp_path):
    big = Provider(target="x:X", requires=("no_engine",), install="pip install astuner-big")
    small = Provider(target="x:X", requires=("json",))
    cluster = Provider(target="x:X", requires=("no_cluster",))
    requires = {"astuner-big": ["no-engine==1", "astuner-shared>=0.1"], "astuner-shared": ["no-cluster==1"]}
    installed(monkeypatch, **dict.fromkeys(("astuner-big", "astuner-small", "astuner-shared"), "1.0"))
    monkeypatch.setattr(doctor_command.metadata, "requires", lambda dist: requires.get(dist, []))

    def level(service=cluster, **more):
        requires.update(more)
        plugins_are(
            Plugin("big", "astuner-big", "1.0", "big", provides={"backbone": {"big": big}}),
            Plugin("small", "astuner-small", "1.0", "small", provides={"backbone": {"small": small}}),
            Plugin("shared", "astuner-shared", "1.0", "shared", provides={"service": {"cluster": service}}),
        )
        findings = json.loads(run_doctor("--json", "--run-dir", str(tmp_path)).out)
        return {f["what"]: f["level"] for f in findings}["astuner-shared"]

    assert level() == "skip"
    assert level(service=small) == "fail"  # a part of it runs here
    assert level(**{"astuner-small": ["astuner-shared>=0.1"]}) == "fail"  # a complete backbone needs it


BROKEN_METADATA = {
    "not UTF-8": b"Name: brittle\nVersion: 1.0\nAuthor: \xff\xfe\n",
    "empty": b"",
    "no version": b"Name: brittle\n",
    "no name": b"Version: 1.0\n",
    "not a version": b"Name: brittle\nVersion: 1.0-unknown-build_7\n",
    "binary": bytes(range(256)),
    "UTF-16": "Name: brittle\nVersion: 1.0\n".encode("utf-16"),
    "a requirement that is none": b"Name: brittle\nVersion: 1.0\nRequires-Dist: >=what?\n",
    "missing": None,
}


@pytest.mark.parametrize("kind", BROKEN_METADATA)
@pytest.mark.parametrize("needs_it", [True, False])
def test_metadata_of_others_may_hold_anything(run_doctor, monkeypatch, tmp_path, kind, needs_it):
    folder = tmp_path / "brittle-1.0.dist-info"
    folder.mkdir()
    if (content := BROKEN_METADATA[kind]) is not None:
        (folder / "METADATA").write_bytes(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    if needs_it:
        real = diagnosis.metadata.requires
        also = ["brittle>=1.0"]
        monkeypatch.setattr(diagnosis.metadata, "requires", lambda dist: also if dist == "astuner-core" else real(dist))
    result = run_doctor("--json", "--run-dir", str(tmp_path))
    core = {f["what"]: f for f in json.loads(result.out)}["astuner-core"]
    is_readable = kind in ("no name", "a requirement that is none")
    assert core["level"] == ("ok" if not needs_it or is_readable else "fail")
    if core["level"] == "fail":
        assert "needs brittle>=1.0" in core["detail"]


def test_doctor_sees_a_run_folder_that_cannot_be_written(run_doctor, monkeypatch, tmp_path):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor_command.tempfile, "TemporaryFile", refuse)
    result = run_doctor("--run-dir", str(tmp_path))
    assert result.code == 1
    assert "--run-dir DIR" in result.out


def run_folder(path):
    (path / "episodes").mkdir(parents=True)
    (path / "resolved.yaml").write_text("astuner:\n  backbone: debug\n  model: {path: tiny}\n")
    (path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2}\n')
    (path / "origin.json").write_text('{"starts": [{"command": "astuner run mine.yaml"}]}')
    with closing(sqlite3.connect(path / "episodes" / "episodes.sqlite")) as database:
        database.execute("create table data (episode_id text, turns blob)")
        database.executemany("insert into data values (?, ?)", [(str(i), bytes(500)) for i in range(40)])
        database.commit()
    return path


def test_what_of_a_run_is_damaged_is_said(tmp_path):
    path = run_folder(tmp_path / "run")
    assert {f.what: f.level for f in of_run(path)} == {
        "metrics.jsonl": "ok", "origin.json": "ok", "episodes/episodes.sqlite": "ok", "resume": "fail",
    }  # fmt: skip
    (model := path / "checkpoints" / "step-000003").mkdir(parents=True)
    *_, model_found, last = of_run(path)
    assert (model_found.what, last.level) == ("checkpoints/step-000003", "fail")
    assert last.fix.endswith(f"astuner.model.path={model}")
    (path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    (path / "origin.json").write_text("{")
    (path / "episodes" / "episodes.sqlite").write_bytes(b"no database, but long enough" * 50)
    (path / "resolved.yaml").write_text("astuner: [")
    found = {f.what: f for f in of_run(path)}
    assert {what: f.level for what, f in found.items()} == {
        "metrics.jsonl": "fail", "origin.json": "warn", "episodes/episodes.sqlite": "fail", "resolved.yaml": "fail",
    }  # fmt: skip
    assert "metrics.jsonl:2: not JSON" in found["metrics.jsonl"].detail
    assert [f.level for f in of_run(tmp_path / "none")] == ["fail"]


def test_a_terminal_obeys_nothing_in_a_folder_of_somebody_else(run_doctor, tmp_path):
    path = run_folder(tmp_path / "run")
    (path / "origin.json").write_text('{"starts": [{"command": "\\u001b]0;owned\\u0007 astuner run it.yaml"}]}')
    os.mkfifo(path / "failures.jsonl")  # reading it would wait for ever
    said = run_doctor(str(path)).out
    assert "astuner run it.yaml" in said
    assert "\x1b" not in said
    (path / "origin.json").unlink()
    os.mkfifo(path / "origin.json")
    assert "failures.jsonl" not in run_doctor(str(path)).out


def test_any_damage_to_a_run_is_a_finding(tmp_path):
    path = run_folder(tmp_path / "run")
    files = [file for file in path.rglob("*") if file.is_file()]
    whole = {file: file.read_bytes() for file in files}
    chance = random.Random(0)
    for _ in range(60):
        for file in chance.sample(files, chance.choice((1, 2))):
            damaged = bytearray(whole[file])
            for _ in range(chance.choice((1, 5, 200))):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            file.write_bytes(damaged[: chance.choice((len(damaged), chance.randrange(len(damaged))))])
        assert list(of_run(path))
        for file, data in whole.items():
            file.write_bytes(data)
