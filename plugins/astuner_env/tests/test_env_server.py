"""Services beside a run: started before it, waited for until they answer, gone after it, whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astuner import Provider, run_services
from astuner.contracts.errors import ConfigError, RunError, UnknownName
from astuner.plugins.loader import Plugin, PluginStatus
from astuner.runs import services
from astuner.support import processes
from astuner.testing import fake_config
from astuner_env.env_service.server import EnvServer, own_script
from tests.table import table

from ._env_standin import stand_in

SERVER = """
import http.server, os, signal, subprocess, sys, time
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers(); self.wfile.write(b"OK")
    def log_message(self, *args): pass
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("pids", "a").write(f"{os.getpid()} {child.pid}\\n")
open("environ", "w").write("\\n".join(f"{k}={v}" for k, v in os.environ.items()))
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), H, bind_and_activate=False)
server.server_bind()
print(f"Starting server on 0.0.0.0:{server.server_port}")   # as the reference: before it listens
time.sleep(0.5)
open("listens", "w").write(str(time.time()))
server.server_activate()
if os.environ.get("STUBBORN"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
server.serve_forever()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a service of the person's own, and nothing said about it yet."""
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    for name in ("LAKE_PATH", "LAKE_SCRIPT", "LAKE_ACTIVATION", "ASTUNER_ENV_URL", "ASTUNER_ENV_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "service"
    folder.mkdir()
    (folder / "serve.py").write_text(SERVER)
    return folder


class Manager:
    """What `load_plugins` gives: the environments ``lake`` and ``pond``, and the service ``tracker``."""

    plugins = (Plugin("toys", "astuner-toys", "1.0", "astuner_toys.plugin", PluginStatus.LOADED, "", None, {}),)

    def offers(self, kind: str) -> Iterator[tuple[Plugin, str, Provider]]:
        names = {"environment": ("lake", "pond"), "service": ("tracker",)}
        for name in names.get(kind, ()):
            yield self.plugins[0], name, Provider(target="json:loads", requires=("json",))
        if kind == "part":
            yield self.plugins[0], "environments", Provider(target="astuner_env.part:Environments")


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every experiment of this file has these."""
    here, make = sys.modules[__name__], fake_config
    monkeypatch.setattr(here, "fake_config", lambda *how: replace(make(*how), plugins=Manager()))


def by_hand(folder: Path, script: str = "", **more: str) -> None:
    lines = {"LAKE_PATH": str(folder), "LAKE_SCRIPT": script or f"{sys.executable} serve.py", **more}
    Path(".env").write_text("".join(f"{name}='{value}'\n" for name, value in lines.items()))


def pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def is_running(pid: int) -> bool:
    return processes.process_start_time(pid) is not None


def gone(folder: Path) -> bool:
    deadline = time.monotonic() + 20  # what is killed takes its time to be gone, on a busy machine
    while (left := any(map(is_running, pids(folder)))) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not left


# ------------------------------------------------------------------------------------ a script of the person's own


@pytest.mark.usefixtures("plugins")
def test_it_runs_for_as_long_as_the_block_and_is_waited_for(place: Path) -> None:
    by_hand(place, LAKE_ACTIVATION="export ACTIVATED=yes", LAKE_EXTRA="1")
    config = fake_config(place)
    with run_services(config, ["lake"]) as lines:
        assert time.time() >= float((place / "listens").read_text())  # the line alone was not believed
        url = os.environ["ASTUNER_ENV_URL"]
        assert url.startswith("http://127.0.0.1:")
        assert "ASTUNER_ENV_TOKEN" not in os.environ  # it has none
        assert url in lines[0]
        assert all(map(is_running, pids(place)))
        assert [p.pid for p in processes.recorded_processes(config.run_dir)] == [os.getpgid(pids(place)[0])]
        said = (place / "environ").read_text().splitlines()
        assert {"ACTIVATED=yes", "LAKE_EXTRA=1", "PYTHONUNBUFFERED=1"} <= set(said)
    assert gone(place)
    assert "ASTUNER_ENV_URL" not in os.environ
    assert processes.recorded_processes() == []


@pytest.mark.usefixtures("plugins")
def test_one_that_does_not_stop_is_made_to(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EnvServer, "grace", 0.3)
    monkeypatch.setenv("STUBBORN", "1")
    by_hand(place)
    with pytest.raises(KeyError), run_services(fake_config(place), ["lake"]):
        raise KeyError
    assert gone(place)


@pytest.mark.usefixtures("plugins")
def test_one_that_ends_at_its_start_says_why(place: Path) -> None:
    by_hand(place, "echo Starting server on 127.0.0.1:1; echo no data here; exit 3")
    with (
        pytest.raises(RunError, match=r"during startup; end of .*\.log:\nStarting .*\nno data here"),
        run_services(fake_config(place), ["lake"]),
    ):
        raise AssertionError("it did not answer")


@pytest.mark.usefixtures("plugins")
def test_one_that_never_answers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "START_TIMEOUT", 1.0)
    by_hand(place, "echo $$ >> pids; echo Starting server on 127.0.0.1:1; exec sleep 600")
    with pytest.raises(RunError, match="did not answer within 1 s; see "), run_services(fake_config(place), ["lake"]):
        raise AssertionError("it did not answer")
    assert gone(place)


def test_a_failed_activation_starts_nothing(place: Path) -> None:
    by_hand(place, "touch started", LAKE_ACTIVATION="false")
    script = own_script("lake")
    assert script is not None
    assert subprocess.run(["bash", "-c", script.command], cwd=script.folder, check=False).returncode == 1
    assert not (place / "started").exists()


def test_what_is_exported_wins_over_the_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand(place, "one")
    monkeypatch.setenv("LAKE_SCRIPT", "another")
    found = own_script("lake")
    assert found is not None
    assert (found.command, found.folder) == ("another", place.resolve())


@pytest.mark.parametrize(
    ("folder", "command"),
    [("env", "python3 -m env.env_service"), ("env_service", "python3 -m env_service.env_service")],
)
def test_a_known_services_program_needs_no_script(place: Path, folder: str, command: str) -> None:
    (place / folder).mkdir()
    (place / folder / "env_service.py").touch()
    Path(".env").write_text(f"LAKE_PATH={place}\n")
    found = own_script("lake")
    assert found is not None
    assert found.command == command


def test_half_of_what_is_needed(place: Path) -> None:
    assert own_script("lake") is None
    Path(".env").write_text(f"LAKE_PATH={place}\n")
    with pytest.raises(ConfigError, match="LAKE_SCRIPT='python3 -m"):
        own_script("lake")
    Path(".env").write_text("LAKE_PATH=/no/such/folder\n")
    with pytest.raises(ConfigError, match="does not exist"):
        own_script("lake")


# ------------------------------------------------------------------------------------------------------- the address


@pytest.mark.usefixtures("plugins")
def test_an_address_where_something_answers_already_is_left_alone(place: Path) -> None:
    by_hand(place)
    with stand_in() as other:
        config = fake_config(place, f"  env_service:\n    url: {other.url}\n")
        with pytest.raises(RunError, match=r"service already answers at"), run_services(config, ["lake"]):
            raise AssertionError("not ours")
    assert not (place / "pids").exists()


@table("url", ["http://example.org:8080", "https://127.0.0.1:8080"])
def test_it_cannot_be_started_elsewhere(place: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner_env.env_service.client.EnvClient.is_up", lambda self: False)
    with pytest.raises(ConfigError, match="which is not on this machine"):
        EnvServer(["frozen_lake"]).start(url=url)


# --------------------------------------------------------------------------------------------------- what --with means

MADE: list[Tracker] = []


class Tracker(services.Service):
    def start(self, *, url: str = "", log: Path | None = None) -> None:
        MADE.append(self)
        self.asked, self.stopped = 0, 0

    def is_ready(self) -> bool:
        self.asked += 1
        return self.asked > 2

    def stop(self) -> None:
        self.stopped += 1

    def environ(self) -> Mapping[str, str]:
        return {"TRACKER": "here"}

    def address(self) -> str:
        return "there"


@pytest.mark.usefixtures("plugins")
def test_a_registered_service(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = fake_config(place)
    monkeypatch.setattr("astuner.plugins.registry.resolve", lambda manager, kind, name, base_dir=None: Tracker)
    monkeypatch.setenv("TRACKER", "before")
    with run_services(config, ["tracker", "tracker"]) as lines:
        assert os.environ["TRACKER"] == "here"
        assert lines[0].startswith("tracker answers at there")
        assert MADE[-1].stopped == 0
    assert os.environ["TRACKER"] == "before"
    assert (len(MADE), MADE[-1].asked, MADE[-1].stopped) == (1, 3, 1)
    with run_services(config, ["tracker"], dry_run=True):
        assert len(MADE) == 2
    monkeypatch.setattr(Tracker, "is_planned_with", False)
    with run_services(config, ["tracker"], dry_run=True) as lines:
        assert (len(MADE), lines) == (2, ())


@pytest.mark.usefixtures("plugins")
def test_environments_share_one_server(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(EnvServer, "start", lambda self, **options: started.append(self))
    monkeypatch.setattr(EnvServer, "is_ready", lambda self: True)
    with run_services(fake_config(place), ["lake", "maze.py->Maze", "pond", "lake"]):
        assert [server.names for server in started] == [("lake", "maze.py->Maze", "pond")]


@pytest.mark.usefixtures("plugins")
def test_a_script_of_ones_own_serves_one(place: Path) -> None:
    by_hand(place)
    with (
        pytest.raises(ConfigError, match="cannot also serve pond"),
        run_services(fake_config(place), ["lake", "pond"]),
    ):
        raise AssertionError("started")


@pytest.mark.usefixtures("plugins")
@table(
    ("name", "says"),
    [
        ("laek", "no service or environment is called 'laek'; did you mean lake"),
        ("traker", "did you mean tracker"),
        ("x", "; installed: lake, pond, tracker"),
        ("appworld", "pip install astuner-appworld"),
        ("reasoning_gym", "pip install astuner-env"),
    ],
)
def test_an_unknown_name(name: str, says: str) -> None:
    with pytest.raises(UnknownName, match=says):
        services.check(Manager(), [name])
    services.check(Manager(), ["lake", "tracker", "x.py->X"])


def test_logs_are_private_and_few(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "KEPT_LOGS", 3)
    made = [services.log_file("the service (a, b)") for _ in range(6)]
    assert made[-1].stat().st_mode & 0o077 == 0
    assert made[-1].exists()
    assert len(list(made[-1].parent.iterdir())) <= 4
