"""A Ray cluster on several of `machines`, and who runs where on it, as Ray's own list says."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .machines import Machine, Network, wait_until

PORT = 6379
QUICK = {
    "RAY_enable_metrics_collection": "false",
    "RAY_enable_worker_prestart": "false",
    "RAY_prestart_worker_first_driver": "false",
    # a machine that is gone is missed after some seconds; by itself Ray takes about a minute
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
LIST = """
import json, ray
from ray._private.state import actors
ray.init(address="auto", logging_level="error", log_to_driver=False)
where = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
told = [[a["ActorClassName"], where.get(a["Address"]["NodeID"], ""), a["State"]] for a in actors().values()]
print(json.dumps({"actors": told, "machines": [n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]]}))
"""


class Cluster:
    """Ray on machines; the first is its head and has no GPU."""

    def __init__(self, network: Network, env: Mapping[str, str], own: Sequence[Path], rays: Path, log: Path) -> None:
        """:param own: folders that each machine but the first has for itself.
        :param rays: the folder of Ray's sockets and logs, each machine's own.
        """
        self.env = {name: value for name, value in env.items() if not name.startswith("RAY_ADDRESS")}
        self.env |= QUICK | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
        self._network, self._own, self._rays, self._log = network, own, rays, log
        self.added: list[Machine] = []
        """All machines but the head."""
        self._stack = contextlib.ExitStack()
        self.head = self._machine([rays])
        self.address = f"{self.head.address}:{PORT}"
        self._start(self.head, "--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={rays}", gpus=0)

    def add(self, *, gpus: int, cpus: int = 8) -> Machine:
        """One more machine, once Ray counts it."""
        machine = self._machine([self._rays, *self._own])
        self.added.append(machine)
        self._start(machine, f"--address={self.address}", gpus=gpus, cpus=cpus)
        return machine

    def machines(self) -> set[str]:
        """The addresses of those that work."""
        return set(self._look()["machines"])

    def where(self) -> dict[str, list[str]]:
        """Class of an actor that is alive -> the addresses of the machines where there are such."""
        found: dict[str, list[str]] = {}
        for name, address, state in self._look()["actors"]:
            if state == "ALIVE":
                found.setdefault(name.rpartition(".")[2], []).append(address)
        return found

    def close(self) -> None:
        """End all machines."""
        self._stack.close()

    def _machine(self, own: Sequence[Path]) -> Machine:
        return self._stack.enter_context(self._network.machine(own))

    def _look(self) -> dict[str, list[str]]:
        said = self.head.run([sys.executable, "-c", LIST], {**self.env, "RAY_ADDRESS": self.address})
        found: dict[str, list[str]] = json.loads(said.strip().splitlines()[-1])
        return found

    def _start(self, machine: Machine, *arguments: str, gpus: int, cpus: int = 8) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", *arguments, f"--node-ip-address={machine.address}", "--disable-usage-stats", "--block"]
        command += [f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--object-store-memory={100 * 2**20}"]
        self._stack.enter_context(machine.running(command, self.env, self._log))
        try:
            wait_until(lambda: self._counts(machine), 90, f"Ray on {machine.name} (see {self._log})")
        except TimeoutError as e:
            raise TimeoutError(f"{e}: {self._log.read_text()[-2000:]}") from None

    def _counts(self, machine: Machine) -> bool:
        try:
            return machine.address in self.machines()
        except AssertionError:  # the head is not there yet
            return False


@contextlib.contextmanager
def cluster(env: Mapping[str, str], own: Sequence[Path], log: Path) -> Iterator[Cluster]:
    """A cluster with its head only, until the block ends."""
    with tempfile.TemporaryDirectory(prefix=f"r{os.getpid()}-", dir="/tmp") as rays, Network() as network:
        made = Cluster(network, env, own, Path(rays), log)
        try:
            yield made
        finally:
            made.close()
