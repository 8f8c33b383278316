"""What is read of a process holds whatever it calls itself, and also when it is gone."""

from __future__ import annotations

import os
import subprocess
import sys

from astuner.isolation import proc


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
