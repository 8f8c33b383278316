"""A running service and a small client for its tests, and a look at which processes are left."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astuner.contracts.hookspecs import EnvironmentProvider
from astuner_env.environment_setup import EnvironmentSettings
from astuner_env.manager.served import ServedEnvironment
from astuner_env.server import Service, ServiceSettings, running

TOYS = Path(__file__).with_name("toys.py")
LONG = 60.0


def served(name: str, target: str, *, path: Sequence[str] = (), hint: str = "", **more: Any) -> ServedEnvironment:
    """An environment to serve.

    :param more: ``python`` and ``environ`` of its settings, and the fields of its provider.
    """
    own = {key: more.pop(key) for key in ("python", "environ") if key in more}
    provider = EnvironmentProvider(target=target, **{"splits": (), **more})
    return ServedEnvironment(name=name, provider=provider, settings=EnvironmentSettings(**own), path=path, hint=hint)


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def data(self) -> Any:
        """What a successful answer on the older routes holds."""
        assert self.status == 200, (self.status, self.raw)
        assert self.json["success"] is True
        return self.json["data"]

    @property
    def detail(self) -> dict[str, Any]:
        assert self.status >= 400, self.raw
        found = self.json["detail"]
        assert set(found) <= {"code", "message", "reason", "traceback"}
        return found

    @property
    def code(self) -> str:
        return self.detail["code"]


class Client:
    """Requests to one service, each on a connection of its own."""

    def __init__(self, port: int, host: str = "127.0.0.1", token: str = "") -> None:
        self.port, self.host = port, host
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}, timeout: float = LONG
    ) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            connection.request(method, path, body, {**self.headers, **headers})
            response = connection.getresponse()
            return Answer(response.status, dict(response.headers), response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any = None, **fields: Any) -> Answer:
        sent = json.dumps(fields if body is None else body).encode()
        return self.send("POST", path, sent, {"Content-Type": "application/json"})

    def get(self, path: str) -> Answer:
        return self.send("GET", path)

    def delete(self, path: str) -> Answer:
        return self.send("DELETE", path)

    def create(self, instance_id: str, env_type: str = "counter", task_id: str = "train-0", **params: Any) -> Answer:
        return self.post("/create", env_type=env_type, task_id=task_id, instance_id=instance_id, params=params)

    def step(self, instance_id: str, said: str = "", **params: Any) -> Answer:
        action = {"role": "assistant", "content": said}
        return self.post("/step", instance_id=instance_id, messages=action, params=params)

    def evaluate(self, instance_id: str, **params: Any) -> Answer:
        return self.post("/evaluate", instance_id=instance_id, params=params)

    def release(self, instance_id: str) -> Answer:
        return self.post("/release", instance_id=instance_id)

    def metric(self, name: str, **labels: str) -> float:
        """One value of ``/metrics``."""
        for line in self.get("/metrics").raw.decode().splitlines():
            found, _, value = line.rpartition(" ")
            if found.partition("{")[0] == name and all(f'{k}="{v}"' in found for k, v in labels.items()):
                return float(value)
        raise AssertionError(f"no metric {name} {labels}")


class Live(Client):
    """A service on an event loop in a thread of this process; a context manager."""

    def __init__(self, environments: Sequence[ServedEnvironment], **options: Any) -> None:
        self._environments, self._options = environments, options
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="live service")

    async def _run(self) -> None:
        self.loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with running(self._environments, ServiceSettings(**self._options)) as self.service:
                self._ready.set()
                await self._over.wait()
        except BaseException as e:
            self._failure = e
        finally:
            self._ready.set()

    def __enter__(self) -> Live:
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        super().__init__(self.service.port, token=self._options.get("token", ""))
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join(LONG)
        assert not self._thread.is_alive(), "the service does not stop"
        assert self._failure is None, self._failure

    def on_loop(self, function: Callable[[Service], Awaitable[Any] | Any]) -> Any:
        """Call ``function(service)`` on the service's loop."""

        async def call() -> Any:
            found = function(self.service)
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(LONG)

    def pid(self, instance_id: str) -> int:
        return self.on_loop(lambda s: s.manager.instance(instance_id).process.pid)

    @property
    def taken(self) -> int:
        """Slots that are not free."""
        return self.on_loop(lambda s: s.manager.slots.taken)


class Program(Client):
    """``python -m astuner_env serve …`` as a process of its own; a context manager that kills it."""

    def __init__(self, *arguments: str, folder: Path, token: str = "", environ: Mapping[str, str] = {}) -> None:
        self.log = folder / f"service-{time.monotonic_ns()}.log"
        known = {**os.environ, "TMPDIR": str(folder), "ASTUNER_HOME": str(folder / "home"), **environ}
        known.pop("ASTUNER_ENV_TOKEN", None)
        if token:
            known["ASTUNER_ENV_TOKEN"] = token
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "astuner_env", "serve", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                env=known,
                cwd=folder,
            )
        super().__init__(0, token=token)

    def __enter__(self) -> Program:
        self.line = self.process.stdout.readline().decode()
        assert self.line.startswith("Starting server on "), (self.line, self.log.read_text())
        self.port = int(self.line.rpartition(":")[2])
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def signal(self, number: signal.Signals, within: float = 15.0) -> int:
        """Send a signal and wait for its end; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(within)


def processes_with(marker: str) -> set[int]:
    """The living processes whose command or environment has ``marker`` in it, but for this one."""
    found = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            if b") Z " in (folder / "stat").read_bytes():
                continue
            said = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:  # it ended just now
            continue
        if marker.encode() in said:
            found.add(int(folder.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended between opening and reading
        return False


def eventually(what: Callable[[], Any], within: float = 20.0) -> Any:
    """The first true value of ``what()``."""
    deadline = time.monotonic() + within
    while not (found := what()):
        assert time.monotonic() < deadline, f"still not so after {within:g} s: {what}"
        time.sleep(0.02)
    return found


def in_background(function: Callable[[], Any]) -> Callable[[], Any]:
    """Call it in a thread; what is returned waits for its result."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()), daemon=True)
    thread.start()

    def wait() -> Any:
        thread.join(LONG)
        assert result, "there is no result"
        return result[0]

    return wait
