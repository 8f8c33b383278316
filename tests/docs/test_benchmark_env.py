"""The benchmark of the environment service counts everything below a service, ends all of it, and checks the work."""

from __future__ import annotations

import importlib
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.table import table

REPOSITORY = Path(__file__).resolve().parents[2]
DAUGHTER_THAT_LEAVES = """\
import http.server, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
os.wait()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY))


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def _side(module: str, *arguments: str) -> Any:
    return _module("side").Side(sys.executable, f"benchmarks.{module}", *arguments)


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = _module("env_services")
    monkeypatch.setattr(module, "_SETTLE", 0.1)
    monkeypatch.setattr(module, "_IDLE", 0.1)
    return module


@pytest.mark.slow
def test_a_service_is_driven_measured_and_ended(services: Any, tmp_path: Path) -> None:
    script = _module("env_load")._counter(3)
    life = services.live(services.Machine(None, tmp_path), services.OURS, script, 2)
    assert {name: len(phase.latencies) for name, phase in life.phases.items()} == {
        "create": 2,
        "step": 6,
        "first evaluate": 2,
        "evaluate": 2,
        "release": 2,
    }
    assert (life.idle_processes, life.left_processes, life.left_files, life.left_running) == (2, 0, 0, [])


HUNGRY = """
import time
from astuner.contracts.environment import Environment, StepResult
from astuner.contracts.types import Task

class Counter(Environment):
    @classmethod
    def tasks(cls, split, params):
        return [Task(task_id="count", env_type="counter")]

    def reset(self, task):
        self.kept = b"x" * (32 << 20)
        return StepResult(observation="count")

    def step(self, action):
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        return StepResult(observation="done")

    def evaluate(self):
        return 1.0
"""


@pytest.mark.slow
def test_what_the_worlds_take_is_counted(services: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 MB and 0.05 s of CPU for each step are the worlds' own, three processes away."""
    (tmp_path / "hungry.py").write_text(HUNGRY)
    monkeypatch.setattr(services, "_COUNTER", tmp_path / "hungry.py")
    life = services.live(services.Machine(None, tmp_path), services.OURS, _module("env_load")._counter(3), 2)
    assert life.phases["step"].cpu >= 2 * 3 * 0.05
    assert life.phases["step"].cpu_each >= 0.05
    assert life.world > 24e6
    assert life.used_world > 24e6
    assert life.left < 24e6


@pytest.mark.slow
def test_services_take_turns_while_all_are_up(services: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    steps = services._Watch.steps
    plan = services._plan
    monkeypatch.setattr(services, "_plan", lambda machine, name, *rest: plan(machine, services.OURS, *rest))
    monkeypatch.setattr(services._Watch, "steps", lambda watch: order.append(watch) or steps(watch))
    script = _module("env_load")._counter(2)
    found = services.side_by_side(services.Machine(None, tmp_path), ("one", "two"), script, 2, 3)
    first, second, *bursts = order
    assert first is not second
    assert bursts == [second, first, first, second, second, first]
    for lives in found.values():
        assert [len(life.phases["step"].latencies) for life in lives] == [4, 4, 4]
        assert len({id(life.phases["step"]) for life in lives}) == 3
        assert {(life.left_processes, *life.left_running) for life in lives} == {(0,)}


@pytest.mark.slow
def test_a_wrong_observation_or_score_stops_the_benchmark(services: Any, tmp_path: Path) -> None:
    script = services.Script(
        services.COUNTER, prepare=(), steps={"step": ("up", "a hundred", 1)}, finish="", evaluations=1
    )
    with pytest.raises(RuntimeError, match=r"'up' was answered with .*'content': '1'"):
        services.live(services.Machine(None, tmp_path), services.OURS, script, 1)


def test_a_process_that_leaves_its_service_is_counted_and_ended(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    argv = [sys.executable, "-c", DAUGHTER_THAT_LEAVES, str(port)]
    plan = {"argv": argv, "cwd": str(tmp_path), "environ": {}, "url": f"http://127.0.0.1:{port}"}
    side = _side("env_server_side", json.dumps(plan))
    try:
        found = side.ask("memory")
        assert found["processes"] == 2
        assert found["bytes"] > 1_000_000
        assert side.ask("all_cpu") > 0
    finally:
        side.close()
    alive = [p for p in Path("/proc").iterdir() if p.name.isdecimal() and _runs(p, str(port))]
    assert not alive


def _runs(process: Path, port: str) -> bool:
    try:
        return DAUGHTER_THAT_LEAVES.encode() + b"\0" + port.encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False


def test_a_service_that_does_not_start_says_why(tmp_path: Path) -> None:
    plan = {
        "argv": [sys.executable, "-c", "raise SystemExit('no such port')"],
        "cwd": str(tmp_path),
        "environ": {},
        "url": "http://127.0.0.1:9",
    }
    with pytest.raises(RuntimeError, match="no such port"):
        _side("env_server_side", json.dumps(plan))


@table(("free_gb", "most"), [(40, 64), (12, 32), (1, 1)])
def test_as_many_worlds_as_fit(free_gb: int, most: int) -> None:
    assert _module("env_load")._most(64, 250e6, free_gb * 1e9) == most


def test_the_reference_gets_our_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_module("peers"), "REPOSITORY", tmp_path)
    peer = _module("env_peer").EnvServicePeer("none", "nothing")
    (peer.box / "training_box" / "environments").mkdir(parents=True)
    copy = peer.with_counter(tmp_path)
    monkeypatch.syspath_prepend(str(copy))
    counter = importlib.import_module("training_box.environments.counter.counter_env").CounterEnv("count", "id")
    assert [counter.step({})["state"][0]["content"] for _ in range(2)] == ["1", "2"]
    assert any("BaseEnv" in str(base) for base in type(counter).__bases__), "the reference looks for that"
    assert not (peer.box / "training_box" / "environments" / "counter").exists()
