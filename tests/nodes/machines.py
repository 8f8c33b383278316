"""Machines made of namespaces: each has a network, an address, a name, processes and folders of its own.

A `Network` is a bridge in a network namespace; a `Machine` hangs on it by a pair of virtual cables.  Neither touches
the network of the machine that this runs on, and no right is needed but that to user namespaces.  What listens on one
machine's 127.0.0.1 is not reached from another, a folder that is a machine's own is empty on all others, and a machine
that loses its power takes all of its processes with it without a goodbye.  Linux only.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

_SUBNET = "10.77.0"
_ALL = ("--user", "--preserve-credentials", "--net", "--mount", "--uts")


def why_not() -> str:
    """Why there are none here; empty where they can be made."""
    try:
        with Network() as network, network.machine():
            return ""
    except (OSError, subprocess.SubprocessError, TimeoutError) as e:
        return f"no machines can be made of namespaces here: {e} {getattr(e, 'stderr', '') or ''}"


class Network:
    """What machines hang on; they end with it, and it with whoever made it, be it by SIGKILL."""

    def __init__(self) -> None:
        command = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", "echo; exec cat"]
        self._switch = _Holder(command)
        self._made = 0

    def __enter__(self) -> Network:
        try:
            self.run("ip link add br0 type bridge && ip link set br0 up")
        except BaseException:
            self._switch.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._switch.end()

    def run(self, script: str) -> None:
        """Run a shell script beside the bridge."""
        enter = ["nsenter", "-t", str(self._switch.pid), *_ALL[:4]]
        subprocess.run([*enter, "sh", "-ec", script], check=True, capture_output=True, text=True, timeout=30)

    @contextlib.contextmanager
    def machine(self, own: Sequence[Path] = ()) -> Iterator[Machine]:
        """One more machine, until the block ends.

        :param own: folders of this machine's own: they exist, and are empty there, whatever others have in them.
        """
        self._made += 1
        number = self._made
        machine = Machine(self, self._switch.pid, number, own)
        try:
            machine.plug_in()
            yield machine
        finally:
            machine.lose_power()


class Machine:
    """One of them; made by `Network.machine`."""

    def __init__(self, network: Network, switch: int, number: int, own: Sequence[Path]) -> None:
        self.address = f"{_SUBNET}.{number}"
        self.name = f"machine{number}"
        self._network, self._cable = network, f"cable{number}"
        hosts = "".join(f"{_SUBNET}.{n} machine{n}\n" for n in range(1, 30))
        mounts = "".join(f"mkdir -p '{folder}'; mount -t tmpfs none '{folder}'; " for folder in own)
        script = (
            f"hostname {self.name}; {mounts} mount -t tmpfs none /mnt; "
            f"printf '127.0.0.1 localhost\\n{hosts}' > /mnt/hosts; mount --bind /mnt/hosts /etc/hosts; "
            ": > /mnt/none; mount --bind /mnt/none /etc/resolv.conf; "  # nobody waits for a name server
            "ip link set lo up; echo; exec cat"
        )
        enter = ["nsenter", "-t", str(switch), *_ALL[:4]]
        new = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._unshare = _Holder([*enter, *new, "sh", "-ec", script])
        (first,) = psutil.Process(self._unshare.pid).children()
        self._first = first

    def plug_in(self) -> None:
        """Connect it to the network."""
        self._network.run(
            f"ip link add {self._cable} type veth peer name eth0 netns {self._first.pid}; "
            f"ip link set {self._cable} master br0 up"
        )
        self.run(["sh", "-ec", f"ip addr add {self.address}/24 dev eth0; ip link set eth0 up"])

    def command(self, command: Sequence[str]) -> list[str]:
        """What to start here so that ``command`` runs there."""
        return ["nsenter", "-t", str(self._first.pid), *_ALL, "--pid", "--", *command]

    @contextlib.contextmanager
    def running(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[None]:
        """Have ``command`` run there until the block ends; what it says is appended to ``log``."""
        with log.open("ab") as out:
            process = subprocess.Popen(self.command(command), env=env, stdout=out, stderr=out)
        try:
            yield
        finally:
            process.kill()
            process.wait()

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 120) -> str:
        """Run ``command`` there to its end; what it printed on its standard output."""
        done = subprocess.run(
            self.command(command), env=env, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def lose_power(self) -> None:
        """It is gone: first from the network, so that nobody hears of its end, then all of its processes."""
        with contextlib.suppress(subprocess.CalledProcessError):  # gone before
            self._network.run(f"ip link del {self._cable}")
        with contextlib.suppress(psutil.NoSuchProcess):
            self._first.kill()  # the first process of a namespace takes the others along
        self._unshare.end()


class _Holder:
    """A process that keeps namespaces alive until its standard input closes."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            said = self._process.communicate()[1]
            raise OSError(f"{' '.join(command[:6])} … ended: {said.strip()}")

    def end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, ValueError):  # ended before
            self._process.communicate(timeout=5)
        self._process.kill()
        self._process.wait(5)


def wait_until(happened: object, seconds: float, what: str) -> object:
    """Wait until the function ``happened`` says something true, and return it.

    :raises TimeoutError: it did not within ``seconds``.
    """
    assert callable(happened)
    end = time.monotonic() + seconds
    while not (found := happened()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.3)
    return found
