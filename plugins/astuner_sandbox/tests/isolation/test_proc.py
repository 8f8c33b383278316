"""What is read of a process holds whatever it calls itself, and also when it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from astuner_sandbox.isolation import proc


def test_a_process_with_a_confusing_name() -> None:
    script = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"a) S 1 (b", 0, 0, 0)  # PR_SET_NAME
print(flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        child.stdout.readline()
        assert (proc.PROC / str(child.pid) / "comm").read_text() == "a) S 1 (b\n"
        assert proc.number(child.pid, proc.PARENT) == os.getpid()
        assert proc.number(child.pid, proc.SESSION) == child.pid
        assert proc.number(child.pid, proc.THREADS) == 1
        assert child.pid in proc.processes()
        child.stdin.close()
        child.wait()
        assert proc.fields(child.pid) == ()
        assert proc.number(child.pid, proc.PARENT) == -1
        assert child.pid not in proc.processes()


MARK = "an-unguessable-mark"
MARKED = {"PATH": os.environ["PATH"], proc.MARK: MARK}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_what_is_in_the_midst_of_its_exec_is_found_too(monkeypatch) -> None:
    """Such a process has no environment for some milliseconds: here it is held there for a few looks."""
    with subprocess.Popen(["sleep", "300"], env=MARKED) as child:
        environ, read, seen = proc.PROC / str(child.pid) / "environ", Path.read_bytes, []

        def read_bytes(path: Path) -> bytes:
            if path == environ and len(seen) < 3:
                seen.append(path)
                return b""
            return read(path)

        monkeypatch.setattr(Path, "read_bytes", read_bytes)
        assert proc.kill_marked(MARK, set()) == [child.pid]
        assert child.wait(20) == -signal.SIGKILL
    assert len(seen) == 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_what_was_forked_since_the_processes_were_listed_is_found_too(monkeypatch) -> None:
    with subprocess.Popen(["sleep", "300"], env=MARKED) as one, subprocess.Popen(["sleep", "300"], env=MARKED) as other:
        looks = iter([[one.pid], [one.pid, other.pid], [one.pid, other.pid]])
        monkeypatch.setattr(proc, "processes", lambda: next(looks))
        assert proc.kill_marked(MARK, set()) == [one.pid, other.pid]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_processes_that_never_show_an_environment_end_the_looking() -> None:
    with subprocess.Popen(["sleep", "300"], env={}) as bare:
        started = time.monotonic()
        assert proc.kill_marked(MARK, set()) == []
        assert time.monotonic() - started < 10
        bare.kill()
