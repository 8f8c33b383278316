"""``--with ray`` and ``--with ray-cluster``: provide the Ray cluster that a run trains on.

`RayService` joins the cluster in ``RAY_ADDRESS`` or this user's cluster on this machine, and otherwise starts one on
loopback.  `RayClusterService` handles the same command on several machines: the machine with the address in
``MASTER_ADDR`` is the head and performs the run; other machines lend their resources until the head ends.

Invariant: only nodes that were started here are stopped.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astuner.contracts.errors import ConfigError, RunError
from astuner.contracts.service import Service
from astuner_ray.cluster import ADDRESS_VARIABLE, object_store_bytes, private_folder, private_variables
from astuner_ray.node import RayNode, answers, listens

JOIN_TIMEOUT = 600.0
"""Seconds that a machine waits for the head."""
_HEAD = ("--head", "--disable-usage-stats", "--include-dashboard=false")
_COUNTED_CPUS = 64
"""Least number of CPUs that a single-machine cluster declares: Ray only counts them to place processes, and a run with
eight GPUs needs 34."""
_WITH_TOKEN = {"RAY_AUTH_MODE": "token"}


class _NodeService(Service):
    """Service that may start a Ray node on this machine."""

    is_planned_with = False

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._node: RayNode | None = None
        self._address = ""

    def stop(self) -> None:
        node, self._node = self._node, None
        if node is not None:
            node.stop()

    def environ(self) -> Mapping[str, str]:
        return {ADDRESS_VARIABLE: self._address}

    def address(self) -> str:
        return self._address


class RayService(_NodeService):
    """Ray cluster on this machine."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._folder: Path | None = None
        self._variables: dict[str, str] = {}

    def start(self, *, url: str = "", log: Path | None = None) -> None:
        """Find a cluster or start one.

        :raises RunError: ``RAY_ADDRESS`` is set, but no cluster answers there.
        """
        if named := os.environ.get(ADDRESS_VARIABLE, ""):
            self._address = named
            if not self._is_joined():
                raise RunError(
                    f"no Ray cluster answers at {ADDRESS_VARIABLE}={named}, or it requires a different token "
                    f"(RAY_AUTH_TOKEN). Start one with: ray start --head, or: unset {ADDRESS_VARIABLE}"
                )
            return
        self._address = _written(_rays_folder())
        if self._is_joined():
            return
        self._address, self._folder, self._variables = "", private_folder(), private_variables()
        self._node = RayNode(
            [
                *_HEAD, f"--num-cpus={max(os.cpu_count() or 1, _COUNTED_CPUS)}",
                "--port=0", f"--ray-client-server-port={_free_port()}",
                "--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0",
                f"--object-store-memory={object_store_bytes()}", f"--temp-dir={self._folder}",
            ],
            what="Ray", log=log, variables=self._variables,
        )  # fmt: skip
        self._node.start()

    def is_ready(self) -> bool:
        """Return whether the cluster answers.

        :raises RunError: The node has ended.
        """
        if self._node is None:
            return True
        self._node.check()
        self._address = _written(self._folder) if self._folder else ""
        return answers(self._address, self._variables)

    def stop(self) -> None:
        super().stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def environ(self) -> Mapping[str, str]:
        return {**super().environ(), **self._variables}

    def _is_joined(self) -> bool:
        if answers(self._address):
            return True
        if "RAY_AUTH_MODE" not in os.environ and answers(self._address, _WITH_TOKEN):
            self._variables = dict(_WITH_TOKEN)
        return bool(self._variables)


class RayClusterService(_NodeService):
    """Ray cluster of several machines that run the same command."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._is_head = False

    def start(self, *, url: str = "", log: Path | None = None) -> None:
        """Start the head; on other machines, `is_ready` joins once the head answers.

        :raises ConfigError: MASTER_ADDR or MASTER_PORT is missing or invalid.
        """
        host, port = _master()
        self._address = f"{host}:{port}"
        self._is_head = is_here(host)
        if self._is_head:
            arguments = [*_HEAD, f"--node-ip-address={host}", f"--port={port}"]
            what = f"Ray's head at {self._address}"
        else:
            arguments = [f"--address={self._address}", "--disable-usage-stats"]
            what = f"this machine's part of the Ray cluster at {self._address}"
        self._node = RayNode(arguments, what=what, log=log)
        if self._is_head:
            self._node.start()

    def is_ready(self) -> bool:
        """Return whether the head answers.  On other machines, block until the head ends.

        :raises SystemExit: On other machines, once the head has ended.
        :raises RunError: This machine's node has ended by itself, or the head did not answer in time.
        """
        if self._node is None:
            return False
        if self._is_head:
            self._node.check()
            return answers(self._address)
        deadline = time.monotonic() + JOIN_TIMEOUT
        while not answers(self._address):
            if time.monotonic() > deadline:
                raise RunError(
                    f"no Ray cluster answers at {self._address} after {JOIN_TIMEOUT:g} s. Run the same command there, "
                    f"open the port, and use the same RAY_AUTH_MODE and RAY_AUTH_TOKEN on all machines"
                )
            time.sleep(2.0)
        self._node.start()
        print(f"this machine lends its resources to the run at {self._address} until that run ends", file=sys.stderr)
        while self._node.is_running:
            time.sleep(1.0)
        if listens(self._address):
            self._node.check()
        raise SystemExit(0)


def is_here(host: str) -> bool:
    """Return whether ``host`` is a name or address of this machine."""
    if host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.bind((host, 0))  # fails for addresses of other machines
    except OSError:
        return False
    return True


def _master() -> tuple[str, int]:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit() or not 1024 <= int(port) <= 65535:
        raise ConfigError(
            f"--with ray-cluster: MASTER_ADDR is {host!r} and MASTER_PORT is {port!r}. Set both on all machines to the "
            "first machine's address and a free port from 1024, e.g. MASTER_ADDR=10.0.0.1 MASTER_PORT=6379"
        )
    return host, int(port)


def _rays_folder() -> Path:
    """Return the folder where ``ray start`` records the cluster of this machine."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray")


def _written(folder: Path) -> str:
    """Return the address that this user's ``ray start`` recorded, or an empty string."""
    file = folder / "ray_current_cluster"
    if not file.is_file() or file.stat().st_uid != os.getuid():
        return ""
    return file.read_text(encoding="utf-8").strip()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
