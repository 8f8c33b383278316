"""A forked child: it answers, it ends, and it holds nothing of what its parent has open.

In a process of its own, since a process with threads, as pytest's may be, is not to be forked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from astuner.support.processes import process_start_time
from tests.table import table

HEAD = """
import json, os, signal, sys, time
from astuner_sandbox.isolation.confine import Confinement
from astuner_sandbox.isolation.child import ForkedChild

def answers(channel, *args):
    while True:
        asked = channel.recv()
        if asked == "exit":
            sys.exit(3)
        if asked == "hang":
            time.sleep(300)
        if asked == "raise":
            raise LookupError("as it was told to")
        if asked == "files":
            paths = [f"/proc/self/fd/{d}" for d in os.listdir("/proc/self/fd")]
            asked = [os.readlink(path) for path in paths if os.path.lexists(path)]
        channel.send([asked, list(args), os.getpid(), os.getsid(0)])

def told(what, *args, **named):
    try:
        return what(*args, **named)
    except (EOFError, TimeoutError, ValueError) as e:
        return f"{type(e).__name__}: {e}"
"""


def script(code: str) -> tuple[list, str]:
    done = subprocess.run([sys.executable, "-c", HEAD + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_it_answers_until_it_is_killed() -> None:
    (first, second, before, how, after), _ = script("""
child = ForkedChild(answers, "a", 2)
for asked in ("one", "two"):
    print(json.dumps([child.call(asked, 20), child.pid]))
print(json.dumps([child.alive, child.ended, child.level is None]))
print(json.dumps(child.kill()))
print(json.dumps([child.alive, child.ended, child.returncode, child.kill()]))
""")
    (said, args, pid, session), known_as = first
    assert (said, args, pid, session) == ("one", ["a", 2], known_as, known_as)
    assert second[0][0] == "two"
    assert before == [True, None, True]
    assert how == "killed by SIGKILL (out of memory?)"
    assert after == [False, how, -9, how]


@table(
    ("asked", "says"),
    [
        ("exit", "EOFError: the child process has ended: exit code 3"),
        ("raise", "EOFError: the child process has ended: exit code 1"),
        ("hang", "TimeoutError: the other process did not answer in time"),
    ],
)
def test_a_call_that_has_no_answer_says_why(asked, says) -> None:
    (said, alive), stderr = script(f"""
child = ForkedChild(answers)
print(json.dumps(told(child.call, {asked!r}, 0.5 if {asked!r} == "hang" else 20)))
print(json.dumps(child.alive))
child.kill()
""")
    assert (said, alive) == (says, asked == "hang")
    assert ("LookupError: as it was told to" in stderr) == (asked == "raise")


def test_it_has_none_of_its_parents_open_files(tmp_path) -> None:
    (tmp_path / "secret").write_text("x")
    (files,), _ = script(f"""
import socket
opened, ends = open({str(tmp_path / "secret")!r}), socket.socketpair()
child = ForkedChild(answers)
files, _, _, _ = child.call("files", 20)
print(json.dumps([sum("socket:" in f for f in files), {str(tmp_path / "secret")!r} in files]))
child.kill()
""")
    assert files == [1, False]


def test_it_dies_with_its_parent() -> None:
    ((pid,),), _ = script("""
child = ForkedChild(answers)
child.call("up?", 20)
print(json.dumps([child.pid]), flush=True)
os._exit(0)
""")
    deadline = time.monotonic() + 20
    while process_start_time(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_start_time(pid) is None


def test_what_waits_to_be_printed_is_printed_once() -> None:
    lines, _ = script("""
print(json.dumps("once"), end="")
child = ForkedChild(answers)
told(child.call, "exit", 20)
print()
""")
    assert lines == ["once"]
