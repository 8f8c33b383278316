"""The service as a program: how it starts, what it says, and that it leaves nothing behind, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from astuner.contracts.errors import AstunerError, ConfigError, PluginError
from astuner_env.__main__ import main
from astuner_env.manager.served import find_environments, snake_case
from astuner_env.server import Lines, ServiceSettings, serve
from astuner_sandbox.isolation.scratch import Root
from tests.table import table

from ._service import TOYS, Live, Program, eventually, in_background, processes_with, served

TOKEN = "a-token-of-sixteen-or-more"


@pytest.fixture
def mine(tmp_path):
    """Toys whose path marks this test's processes."""
    path = tmp_path / "toys.py"
    path.write_text(TOYS.read_text())
    return path


@pytest.fixture
def quiet():
    """Undo what a program does to the process's logging."""
    loggers = [logging.getLogger(name) for name in ("astuner_env", "astuner_sandbox")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, was in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level, logger.propagate = was


def run(*arguments, folder, **environ):
    return subprocess.run(
        [sys.executable, "-m", "astuner_env", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "ASTUNER_HOME": str(folder), **environ},
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda n: n.name)
def test_a_signal_stops_everything_also_what_hangs(mine, tmp_path, number):
    with Program(f"{mine}->Counter", "--port", "0", folder=tmp_path) as program:
        for name in "ab":
            program.create(name)
        hung = in_background(lambda: program.step("a", "hang"))
        eventually(lambda: program.get("/v1/instances/a").json["is_busy"])
        assert program.signal(number) == 0
        assert not processes_with(str(mine))
        answer = hung()
        assert (answer.status, answer.detail["reason"]) == (410, "stopped")
        assert not list(tmp_path.glob("astuner-env-*"))


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_no_process_and_its_folder_goes_with_the_next_one(mine, tmp_path):
    with Program(f"{mine}->Counter", "--port", "0", folder=tmp_path) as program:
        for name in "ab":
            program.create(name)
        program.step("b", "daemon")
        dying = in_background(lambda: program.post("/step", instance_id="a", messages={"content": "wait 0.2"}))
        eventually(lambda: len(processes_with(str(mine))) >= 5)
        dying()
        program.signal(signal.SIGKILL)
        eventually(lambda: not processes_with(str(mine)))
    (left,) = tmp_path.glob("astuner-env-*")
    with Program(f"{mine}->Counter", "--port", "0", folder=tmp_path) as program:
        assert not left.exists()
        assert len(list(tmp_path.glob("astuner-env-*"))) == 1


@pytest.mark.slow
def test_folders_nested_deeper_than_a_stack_stop_no_release_and_no_next_service(mine, tmp_path):
    with Program(f"{mine}->Counter", "--port", "0", folder=tmp_path) as program:
        program.create("a")
        assert program.step("a", "nest").data["observation"] == "1"
        assert program.release("a").data is None
        assert len(list(tmp_path.glob("astuner-env-*/*/i-*"))) == 0
        program.create("b")
        program.step("b", "nest")
        program.signal(signal.SIGKILL)
        eventually(lambda: not processes_with(str(mine)))
    (left,) = tmp_path.glob("astuner-env-*")
    with Program(f"{mine}->Counter", "--port", "0", folder=tmp_path) as program:
        assert not left.exists()
        program.create("c")


@pytest.mark.slow
def test_json_logs_are_json_and_have_no_secrets(mine, tmp_path):
    arguments = [f"{mine}->Counter", "--port", "0", "--log-json", "--debug", "--max-instances", "3"]
    with Program(*arguments, folder=tmp_path, token=TOKEN) as program:
        instance_id = "0123456789abcdef-who-knows-it-can-use-it"
        program.create(instance_id)
        program.step(instance_id, "raise")
        program.step(instance_id, "print")
        program.step(instance_id, "exit")
        program.send("GET", f"/v1/info?token={TOKEN}", None, {"Authorization": f"Bearer {TOKEN} "})
        program.send("POST", f"/{TOKEN}", b"{}", {"Content-Length": "x", "Authorization": f"Bearer {TOKEN}"})
        program.signal(signal.SIGTERM)
        said = program.log.read_text()
    lines = [json.loads(line) for line in said.splitlines()]
    assert all({"time", "level", "logger", "event"} <= set(line) for line in lines)
    events = {line["event"]: line for line in lines}
    assert events["listening"]["max_instances"] == 3
    assert events["instance created"]["environment"] == "counter"
    assert "the world is broken" in events["environment raised"]["error"]
    assert "on the standard error" in events["instance crashed"]["said"]
    assert events["instance ended"]["reason"] == "crashed"
    assert any(line["event"] == "answered" and line["path"] == "/step" and line["status"] == 500 for line in lines)
    assert TOKEN not in said
    assert instance_id not in said


@pytest.mark.slow
def test_the_log_says_how_the_number_of_instances_came_about(mine, tmp_path):
    with Program(f"{mine}->Counter", "--port", "0", folder=tmp_path) as program:
        said = program.log.read_text()
        assert "the smaller of 16 x" in said
        assert "256 MB each" in program.get("/v1/info").json["capacity"]


def test_lines_hide_what_they_are_told_to():
    record = logging.makeLogRecord({"msg": "a %s b", "args": ("hidden",), "levelname": "INFO", "more": "hidden\ntwo"})
    assert Lines(as_json=False, secrets=["hidden", ""]).format(record).endswith("info a *** b\n***\ntwo")
    assert json.loads(Lines(as_json=True, secrets=["hidden"]).format(record))["more"] == "***\ntwo"


@pytest.mark.slow
def test_a_port_that_is_taken_is_no_success(mine, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run(f"{mine}->Counter", "--port", str(taken.getsockname()[1]), folder=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "port 0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no_such_thing"], "'no_such_thing'"),
        (["no/such.py->World"], "file not found"),
        (["toys.py->World"], "has no 'World'"),
        (["toys.py->Counter", "other=toys.py->Counter", "toys.py->Counter"], "'counter' is used twice"),
        (["a/b=toys.py->Counter"], "'a/b' is not a valid"),
        (["toys.py->Counter", "--host", "0.0.0.0"], "openssl rand -hex 16"),
        (["toys.py->Counter", "--max-instances", "0"], "Invalid value for '--max-instances'"),
        (["toys.py->Counter", "--port", "70000"], "Invalid value for '--port'"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_sentence(mine, tmp_path, arguments, says, monkeypatch, capsys, quiet):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code in (1, 2)
    said = capsys.readouterr()
    assert says in said.err
    assert said.out == ""
    assert "Traceback (most" not in said.err.partition("could not import")[0]
    assert not processes_with(str(mine))


def test_names_for_code():
    assert [e.name for e in find_environments([f"{TOYS}->Counter", f"a.b-c={TOYS}:Counter"])] == ["counter", "a.b-c"]
    assert [snake_case(n) for n in ("TextMaze", "HTTPMaze", "Maze2D", "maze")] == [
        "text_maze",
        "http_maze",
        "maze2_d",
        "maze",
    ]
    with pytest.raises(ConfigError, match=r"maze=path/to/maze\.py"):
        find_environments(["maze=nothing"])
    with pytest.raises(PluginError):
        find_environments(["frozen_lak"])


def test_the_server_imports_no_environment(mine, tmp_path):
    text = mine.read_text().replace(
        "GOAL = 5", "GOAL = 5\nopen(__file__ + '.imported', 'a').write(f'{os.getpid()}\\n')"
    )
    mine.write_text(text)
    before = set(sys.modules)
    with Live([served("counter", f"{mine}:Counter")], parent=tmp_path) as live:
        live.create("a")
        live.step("a")
        live.post("/get_env_profile")
        zygote = live.on_loop(lambda s: s.manager.zygotes()["counter"])
    assert Path(f"{mine}.imported").read_text() == f"{zygote}\n", "once, and in the zygote"
    new = set(sys.modules) - before
    assert not any("toys" in name or name.startswith(("astuner_env.worlds", "astuner_env.worker")) for name in new)


def test_an_instance_sees_none_of_the_servers_secrets(mine, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "very-secret")
    mine.write_text(mine.read_text().replace('return {"goal": GOAL}', "return dict(os.environ)"))
    it = served("counter", f"{mine}:Counter", environ={"GIVEN": "yes"})
    with Live([it], parent=tmp_path, token=TOKEN) as live:
        folder = live.create("a").data["info"]["folder"]
        seen = live.post("/get_info", instance_id="a").data
    assert seen["GIVEN"] == "yes"
    assert seen["HOME"] == seen["TMPDIR"] == folder
    assert "OPENAI_API_KEY" not in seen
    assert TOKEN not in seen.values()


@table(
    ("options", "says"),
    [
        ({}, "No environment to serve"),
        ({"max_instances": 0}, "must be more than 0"),
        ({"idle_ttl": 0.0}, "must be more than 0"),
        ({"port": 70000}, "0 to 65535"),
    ],
)
def test_serve_refuses_what_makes_no_sense(quiet, counter, options, says):
    with pytest.raises(ConfigError, match=says):
        asyncio.run(serve([counter] if options else [], ServiceSettings(**options)))


def own_root(parent):
    return contextlib.closing(Root("astuner-env-", parent))


def test_a_root_is_nobody_elses_and_goes_away(tmp_path):
    with own_root(tmp_path) as one:
        assert one.path.stat().st_mode & 0o777 == 0o700
        folder = one.new()
        assert folder.is_relative_to(one.path)
        (folder / "file").write_text("x")
        with own_root(tmp_path) as two:
            assert one.path.exists(), "it is in use"
            assert two.path != one.path
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_root_of_ours_is_left_alone(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/.lock").write_text("")
    (tmp_path / "astuner-env-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "astuner-env-no-lock").mkdir()
    (tmp_path / "astuner-env-dead").mkdir()
    (tmp_path / "astuner-env-dead/.lock").write_text("")
    with own_root(tmp_path):
        left = {p.name for p in tmp_path.iterdir()}
    assert {"elsewhere", "astuner-env-link", "astuner-env-no-lock"} <= left
    assert "astuner-env-dead" not in left
    assert (tmp_path / "elsewhere/.lock").exists()


def test_errors_of_ours_are_of_one_family():
    with pytest.raises(AstunerError):
        served("..", "x:Y")


def test_an_interpreter_that_has_nothing_of_ours_runs_an_environment(mine, tmp_path):
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare/bin/python")
    assert subprocess.run([python, "-c", "import astuner"], capture_output=True, cwd=tmp_path).returncode == 1
    mine.write_text(mine.read_text().replace('return {"goal": GOAL}', "return {'python': sys.executable}"))
    with Live([served("counter", f"{mine}:Counter", python=python)], parent=tmp_path) as live:
        assert live.post("/get_env_profile").data == ["train-0", "train-1", "train-2"]
        live.create("a")
        assert live.step("a").data["info"]["count"] == 1
        assert live.post("/get_info", instance_id="a").data == {"python": python}


def test_packages_are_lent_to_an_interpreter_that_lacks_them(mine, tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False)
    package = tmp_path / "elsewhere/lent_worlds"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "world.py").write_text(mine.read_text())
    monkeypatch.syspath_prepend(package.parent)
    python = str(tmp_path / "bare/bin/python")
    it = served("w", "lent_worlds.world:Counter", python=python, lent=("lent_worlds",))
    with Live([it], parent=tmp_path) as live:
        assert live.create("a", "w").data["state"]


@pytest.mark.slow
def test_a_signal_while_an_environment_is_still_being_imported_stops_that_too(mine, tmp_path):
    mine.write_text("import time, pathlib\npathlib.Path(__file__ + '.begun').touch()\ntime.sleep(600)\n")
    program = Program(f"{mine}->Counter", "--port", "0", folder=tmp_path)
    try:
        eventually(Path(f"{mine}.begun").exists)
        assert program.signal(signal.SIGTERM) == 0
        assert program.process.stdout.read() == b"", "it never listened"
    finally:
        program.__exit__()
    eventually(lambda: not processes_with(str(mine)))
    assert not list(tmp_path.glob("astuner-env-*"))
