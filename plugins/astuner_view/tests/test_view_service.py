"""`astuner run … --with logview`: it shows the run that it stands beside, and is gone when that is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astuner import run_service
from astuner.contracts.errors import ConfigError, RunError
from astuner.plugins.loader import load_plugins
from astuner.plugins.registry import resolve
from astuner.support.processes import process_start_time, recorded_processes
from astuner.testing import check_plugin
from astuner_view.service import LogView
from astuner_view.serving import open_socket
from astuner_view.settings import LogViewConfig

from ._runs import add_metrics, make_run


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[LogView]:
    service = LogView(LogViewConfig(port=0))
    service.run_dir = tmp_path / "record" / "exp 1"
    yield service
    service.stop()


def test_the_plugin_does_what_it_says() -> None:
    check_plugin("view")
    assert resolve(load_plugins(), "service", "logview") is LogView


def test_it_shows_the_run_before_there_is_one_and_then_as_it_goes(beside: LogView, tmp_path: Path) -> None:
    with run_service(beside, "logview", "http://elsewhere.invalid", tmp_path / "log"):
        base, _, fragment = beside.address().partition("#")
        assert base.startswith("http://127.0.0.1:")
        (run,) = fetch(f"{base}api/runs")["runs"]
        assert fragment == f"/run/{run['id']}"
        assert (run["name"], run["state"], run["step"]) == ("exp 1", "stopped", 0)
        assert fetch(f"{base}api/runs/{run['id']}")["problems"] == []  # a log that is missing so far is not one
        make_run(tmp_path / "record" / "another")
        made = make_run(tmp_path / "record" / "exp 1")
        add_metrics(made, {"step": 5})
        (run,) = fetch(f"{base}api/runs")["runs"]
        assert run["step"] == 5
        (process,) = recorded_processes(made)
        assert process.what == "log viewer"
    assert process_start_time(process.pid) is None
    assert recorded_processes() == []


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with open_socket("127.0.0.1", 0) as taken:
        service = LogView(LogViewConfig(port=taken.getsockname()[1]))
        service.run_dir = tmp_path
        with pytest.raises(ConfigError, match=r"astuner\.services\.logview\.port=N"):
            service.start()
        service.stop()


def test_without_a_run_there_is_nothing_to_stand_beside() -> None:
    with pytest.raises(RunError, match="use: astuner view"):
        LogView().start()


def test_one_that_ends_at_its_start_says_why(beside: LogView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner_view.service.sys.executable", "/bin/false")
    with pytest.raises(RunError, match="during startup"), run_service(beside, "logview", "", tmp_path / "log"):
        raise AssertionError("it cannot be ready")


@pytest.mark.slow
def test_it_ends_when_whoever_started_it_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom astuner_view.service import LogView\n"
        "from astuner_view.settings import LogViewConfig\n"
        "one = LogView(LogViewConfig(port=0))\none.run_dir = Path(sys.argv[1])\none.start()\n"
        "while not one.is_ready(): time.sleep(0.1)\n"
        "print(one._process.pid, flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        viewer = int(one.stdout.readline())
        assert process_start_time(viewer) is not None
        os.kill(one.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while process_start_time(viewer) is not None:
        assert time.monotonic() < deadline, "the viewer outlived the run"
        time.sleep(0.05)
