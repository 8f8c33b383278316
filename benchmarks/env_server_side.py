"""Start a service and measure memory, processes and CPU of all its processes until they have ended.

This process is a subreaper: all processes of the service stay its descendants, even if their parent exits, so none is
missed when they are counted and none remains at the end.  Standard library only.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.side import obey, quiet

_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")
_START_WITHIN, _STOP_WITHIN = 300.0, 20.0
"""Seconds."""


def start(plan: Mapping[str, Any]) -> tuple[subprocess.Popen[bytes], float]:
    """Start the service and return it with the seconds until it answered.

    :param plan: ``argv``, ``environ``, ``cwd`` and ``url``.
    :raises RuntimeError: The service exited or did not answer in time.
    """
    began = time.perf_counter()
    environ = {**os.environ, **plan["environ"]}
    service = subprocess.Popen(plan["argv"], cwd=plan["cwd"], env=environ, stdin=subprocess.DEVNULL)
    while not _answers(plan["url"]):
        if service.poll() is not None or time.perf_counter() - began > _START_WITHIN:
            raise RuntimeError(f"{plan['argv']} did not start")
        time.sleep(0.05)
    return service, time.perf_counter() - began


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def stat_of(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the third on, see proc(5).

    :raises OSError: The process does not exist.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def descendants() -> dict[int, list[str]]:
    """Return all descendants of this process, including zombies, with their `stat_of`."""
    found, children = {}, defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = stat_of(int(entry.name))
            except OSError:
                continue
            found[int(entry.name)] = fields
            children[int(fields[1])].append(int(entry.name))
    below, waiting = [], [os.getpid()]
    while waiting:
        own = children[waiting.pop()]
        below += own
        waiting += own
    return {pid: found[pid] for pid in below}


def pss(pid: int) -> int:
    """Return PSS in bytes: private memory plus a share of shared memory, or 0 if the process does not exist.

    :raises PermissionError: The process cannot be inspected; run as root.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024


def cpu() -> float:
    """Return the CPU seconds of all descendants of this process, running or ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = ended.ru_utime + ended.ru_stime
    for pid, fields in descendants().items():
        user, system, user_of_children, system_of_children = (int(ticks) / _TICKS for ticks in fields[11:15])
        try:
            own = time.clock_gettime((~pid << 3) | 2)  # its CPU clock, see clock_getcpuclockid(3): finer than ticks
        except OSError:  # it has just ended
            own = user + system
        seconds += own + user_of_children + system_of_children
    return seconds


def _end_all() -> list[str]:
    """Kill all descendants of this process and return their programs."""
    killed: list[str] = []
    while alive := [pid for pid, fields in descendants().items() if fields[0] not in "ZX"]:
        for pid in alive:
            try:
                killed.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                os.kill(pid, signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError):
                continue
        _reap()
        time.sleep(0.05)
    _reap()
    return killed


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


async def serve(plan: Mapping[str, Any]) -> None:
    service, seconds = start(plan)

    async def memory(asked: Any) -> Any:
        """Return PSS and the number of processes."""
        alive = [pid for pid, fields in descendants().items() if fields[0] not in "ZX"]
        return {"bytes": sum(map(pss, alive)), "processes": len(alive)}

    async def cpu_of_all(asked: Any) -> float:
        return cpu()

    async def stop(asked: Any) -> Any:
        """Ask the service to stop, wait, and kill the remaining processes."""
        began = time.perf_counter()
        service.terminate()
        while time.perf_counter() - began < _STOP_WITHIN:
            service.poll()
            if not any(fields[0] not in "ZX" for fields in descendants().values()):
                break
            await asyncio.sleep(0.05)
        return {"seconds": time.perf_counter() - began, "left": _end_all()}

    try:
        await obey({"seconds": seconds}, {"memory": memory, "all_cpu": cpu_of_all, "stop": stop})
    finally:
        _end_all()


if __name__ == "__main__":
    quiet()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        asyncio.run(serve(json.loads(sys.argv[1])))
    finally:
        _end_all()
