"""Start the services that `env_load` compares, each in a separate folder, and measure them."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.env_peer import ENV_SERVICE
from benchmarks.side import REPOSITORY, Side

OURS, THEIRS = "ASTuner", "EnvService"
APPWORLD, COUNTER = "appworld", "counter"
_SETTLE = 4.0
"""Seconds to wait after a release before measuring what it left."""
_IDLE = 3.0
"""Seconds over which the CPU time of an idle service is measured."""
_COUNTER = Path(__file__).with_name("env_counter.py")
_SYNTHETIC = REPOSITORY / "plugins" / "astuner_appworld" / "astuner_appworld" / "synthetic"


@dataclass(frozen=True)
class Phase:
    """Cost of a number of operations."""

    wall: float
    cpu: float
    """CPU seconds of the service and its worlds."""
    latencies: Sequence[float]
    load: float
    """Load average of the machine at the end, including the benchmark itself."""

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.wall

    @property
    def cpu_each(self) -> float:
        """Return the CPU seconds of one operation."""
        return self.cpu / len(self.latencies)


@dataclass
class Life:
    """Measurements of one service, from its start until it stops."""

    instances: int
    start: float = 0.0
    """Seconds until it answers."""
    first: float = 0.0
    """Seconds until the first world is ready."""
    idle: float = 0.0
    """Bytes after the first world was released."""
    idle_processes: int = 0
    idle_cpu: float = 0.0
    """Share of a core that the idle service uses."""
    alone: dict[str, Phase] = field(default_factory=dict)
    """Cost of a single world without others."""
    phases: dict[str, Phase] = field(default_factory=dict)
    world: float = 0.0
    """Bytes that each world adds after all were created."""
    used_world: float = 0.0
    """The same after all steps and evaluations."""
    left: float = 0.0
    """Additional bytes after all worlds were released."""
    left_processes: int = 0
    left_files: int = 0
    """Bytes that the worlds left on disk."""
    stop: float = 0.0
    """Seconds from SIGTERM to the end of its last process."""
    left_running: Sequence[str] = ()
    """Processes that had to be killed."""


@dataclass(frozen=True)
class Script:
    """Actions of the agents in their worlds."""

    env_type: str
    prepare: Sequence[str]
    steps: Mapping[str, tuple[str, str, int]]
    """Name -> (message, required text in the observation, number of steps)."""
    finish: str
    """The last step."""
    evaluations: int
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of ASTuner's instances; the reference has no such limit."""
    of_task: str = ""
    """Prefix of the IDs of the tasks to use."""


@dataclass(frozen=True)
class Machine:
    """Interpreter and data that both services use."""

    python: Path | None
    """Interpreter with AppWorld, or None."""
    data: Path
    """Folder with AppWorld's ``data``."""

    @classmethod
    def make(cls, folder: Path) -> Machine:
        """Create a data root of synthetic people; both sides use the reference's interpreter if it exists."""
        ours = REPOSITORY / ".venv-appworld" / "bin" / "python"
        python = ENV_SERVICE.python or (ours if ours.exists() else None)
        if python is not None:
            subprocess.run(
                [str(python), str(_SYNTHETIC), str(folder)],
                env={**os.environ, "APPWORLD_CACHE": str(ENV_SERVICE.cache)},
                stdout=subprocess.DEVNULL,
                check=True,
            )
        return cls(python, folder / "data")


def live(machine: Machine, name: str, script: Script, instances: int) -> Life:
    """Start the service ``name``, run the script with ``instances`` concurrent agents, and stop it."""
    with _up(machine, name, script, instances) as watch:
        watch.open()
        watch.life.phases |= watch.steps()
        watch.close()
    return watch.life


def side_by_side(
    machine: Machine, names: Sequence[str], script: Script, instances: int, bursts: int
) -> dict[str, list[Life]]:
    """Run all services with their agents and let them take turns, one burst each, so that load affects them equally.

    :returns: One life per burst for every service; all its entries share the service's measurements.
    """
    found: dict[str, list[dict[str, Phase]]] = {name: [] for name in names}
    with ExitStack() as up:
        watches = {name: up.enter_context(_up(machine, name, script, instances)) for name in names}
        for watch in watches.values():
            watch.open()
        for number in range(bursts):
            for name in names[:: 1 if number % 2 else -1]:
                found[name].append(watches[name].steps())
        for watch in watches.values():
            watch.close()
    lives = {name: watch.life for name, watch in watches.items()}
    return {n: [replace(lives[n], phases={**lives[n].phases, **burst}) for burst in found[n]] for n in names}


@contextmanager
def _up(machine: Machine, name: str, script: Script, instances: int) -> Iterator[_Watch]:
    """Start the service ``name`` and stop it at the end of the block."""
    life = Life(instances)
    with tempfile.TemporaryDirectory(prefix="el-") as folder:  # short: Ray's sockets lie below it
        plan, token, files = _plan(machine, name, script.env_type, Path(folder))
        with _side("env_server_side", json.dumps(plan)) as server:
            params = json.dumps(script.params if name == OURS else {})
            with _side("env_client_side", plan["url"], token, script.env_type, params) as client:
                yield _Watch(life, script, server, client, files)
            stopped = server.ask("stop")
        life.start, life.stop, life.left_running = server.started["seconds"], stopped["seconds"], stopped["left"]


class _Watch:
    """Controller of the clients and the server's side: `open`, any number of `steps`, `close`."""

    def __init__(self, life: Life, script: Script, server: Side, client: Side, files: Path) -> None:
        self.life, self._script, self._server, self._client, self._files = life, script, server, client, files
        self._bytes_on_disk = 0

    def open(self) -> None:
        """Measure one world alone, then create all worlds."""
        life = self.life
        tasks = [task for task in self._client.ask("tasks") if task.startswith(self._script.of_task)]
        life.first = self._phase("create", instances=1, tasks=tasks).wall
        life.alone = self.steps()
        self._client.ask("release")
        self._bytes_on_disk = self._idle()
        life.phases["create"] = self._phase("create", instances=life.instances, tasks=tasks)
        life.world = (self._memory()["bytes"] - life.idle) / life.instances

    def close(self) -> None:
        """Release all worlds and measure what they leave."""
        life = self.life
        life.used_world = (self._memory()["bytes"] - life.idle) / life.instances
        life.phases["release"] = self._phase("release")
        time.sleep(_SETTLE)
        after = self._memory()
        life.left, life.left_processes = after["bytes"] - life.idle, after["processes"] - life.idle_processes
        life.left_files = _size(self._files) - self._bytes_on_disk

    def steps(self) -> dict[str, Phase]:
        """Run all steps and the evaluation in all worlds."""
        found, script = {}, self._script
        for says in script.prepare:
            self._client.ask("step", times=1, says=says, heard="")
        for name, (says, heard, times) in script.steps.items():
            found[name] = self._phase("step", times=times, says=says, heard=heard)
        if script.finish:
            found["finish"] = self._phase("step", times=1, says=script.finish, heard="")
        found["first evaluate"] = self._phase("evaluate", times=1)
        found["evaluate"] = self._phase("evaluate", times=script.evaluations)
        return found

    def _idle(self) -> int:
        """Record memory and CPU of the service without worlds, and return its bytes on disk."""
        time.sleep(_SETTLE)
        began, cpu = time.perf_counter(), self._server.ask("all_cpu")
        time.sleep(_IDLE)
        self.life.idle_cpu = (self._server.ask("all_cpu") - cpu) / (time.perf_counter() - began)
        found = self._memory()
        self.life.idle, self.life.idle_processes = found["bytes"], found["processes"]
        return _size(self._files)

    def _phase(self, command: str, **options: Any) -> Phase:
        cpu = self._server.ask("all_cpu")
        found = self._client.ask(command, **options)
        return Phase(found["wall"], self._server.ask("all_cpu") - cpu, found["latencies"], os.getloadavg()[0])

    def _memory(self) -> Any:
        return self._server.ask("memory")


def _plan(machine: Machine, name: str, env_type: str, folder: Path) -> tuple[dict[str, Any], str, Path]:
    """Return the start plan of the service, its token, and the folder that its worlds write to."""
    port, worlds = _free_port(), folder / "w"
    worlds.mkdir()
    environ = {"TMPDIR": str(worlds)}
    plan = {"url": f"http://127.0.0.1:{port}", "cwd": str(folder), "environ": environ}
    if name == OURS:
        token = secrets.token_hex(16)
        _keep_settings(machine, folder / "home" / "environments")
        environ |= {"ASTUNER_HOME": str(folder / "home"), "ASTUNER_ENV_TOKEN": token}
        counter = f"{COUNTER}={_COUNTER}->Counter"
        what = [APPWORLD if env_type == APPWORLD else counter]
        serve = [sys.executable, "-m", "astuner_env", "serve", *what]
        return {**plan, "argv": [*serve, "--port", str(port), "--max-instances", "128"]}, token, worlds
    box = ENV_SERVICE.with_counter(folder) if env_type == COUNTER else ENV_SERVICE.box
    (folder / "root").mkdir()
    (folder / "root" / "data").symlink_to(machine.data)
    environ |= {
        "APPWORLD_ROOT": str(folder / "root"),
        "APPWORLD_CACHE": str(ENV_SERVICE.cache),
        "PYTHONPATH": str(box),
        "RAY_TMPDIR": str(folder / "ray"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what makes Ray stay on 127.0.0.1
    }
    (folder / "ray").mkdir()
    (folder / "root" / "experiments").mkdir()
    serve = [str(ENV_SERVICE.python), "-m", "training_box.env_service", "--env", env_type]
    argv = [*serve, "--portal", "127.0.0.1", "--port", str(port)]
    return {**plan, "cwd": str(box), "argv": argv}, "", folder / "root" / "experiments"


def _keep_settings(machine: Machine, folder: Path) -> None:
    """Write the file that ``astuner env setup`` would have written."""
    folder.mkdir(mode=0o700, parents=True)
    settings = {"python": str(machine.python), "environ": {"APPWORLD_ROOT": str(machine.data.parent)}}
    file = folder / f"{APPWORLD}.json"
    file.touch(mode=0o600)
    file.write_text(json.dumps(settings), encoding="utf-8")


@contextmanager
def _side(module: str, *arguments: str) -> Iterator[Side]:
    side = Side(sys.executable, f"benchmarks.{module}", *arguments)
    try:
        yield side
    finally:
        side.close()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _size(folder: Path) -> int:
    """Return the bytes on disk of all files below a folder."""
    done = subprocess.run(["du", "-s", "-B1", str(folder)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def available() -> int:
    """Return the bytes of memory available to new processes."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
