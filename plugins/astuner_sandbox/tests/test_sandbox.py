"""The Python sandbox runs what a model writes as Python would, and none of it gets out, stays, or costs too much."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner.contracts.errors import EnvironmentFailed
from astuner.support.processes import process_start_time
from astuner_sandbox import CodeResult, PythonSandbox, SandboxFailed, SandboxLimits, python, shared
from astuner_sandbox.isolation.confine import NotConfined
from astuner_sandbox.isolation.scratch import Root, remove_abandoned
from astuner_sandbox.tool import as_text
from tests.table import table

ATTEMPTS = str(Path(__file__).parent / "isolation")
needs_everything = pytest.mark.needs("confinement")
SMALL = SandboxLimits(cpu_seconds=2, memory_mb=300, file_mb=1, disk_mb=4, files=50, threads=8, output_kb=4, parallel=4)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[PythonSandbox]:
    with PythonSandbox(SMALL) as made:
        yield made


def run(sandbox: PythonSandbox, *lines: str, timeout: float = 30) -> CodeResult:
    return sandbox.run("\n".join(lines), timeout)


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def nothing_is_left(sandbox: PythonSandbox) -> bool:
    """No process and no file of any run."""
    assert sandbox._zygote is not None
    assert sandbox._scratch is not None
    deadline = time.monotonic() + 20  # what is killed takes its time to be gone, on a busy machine
    while (left := children(sandbox._zygote.pid) or os.listdir(sandbox._scratch.path) != [".lock"]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.01)
    return not left


# ---- what a script does ----------------------------------------------------------------------------------------------


@table(
    ("code", "stdout", "returncode"),
    [
        ("print(6 * 7)", "42\n", 0),
        ("", "", 0),
        ("import sys; print('a', end=''); sys.exit(3)", "a", 3),
        ("import sys; sys.exit()", "", 0),
        ("raise SystemExit(True)", "", 1),
        ("if __name__ == '__main__': print('ö→🙂')", "ö→🙂\n", 0),
        ("import os; os.write(1, b'raw'); os._exit(5)", "raw", 5),
        ("import threading; threading.Thread(target=lambda: print('later')).start()", "later\n", 0),
        ("import atexit; atexit.register(print, 'bye'); print('hello')", "hello\nbye\n", 0),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(1))", "A(x=1)\n", 0),
        ("import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)", "A\n", 0),
        ("open('a.txt', 'w').write('kept'); print(open('a.txt').read())", "kept\n", 0),
        ("import tempfile\nwith tempfile.TemporaryFile() as f: print(f.write(b'abc'))", "3\n", 0),
        ("import asyncio; print(asyncio.run(asyncio.sleep(0, 'slept')))", "slept\n", 0),
        ("import sys; print(sys.argv, sys.stdin.read())", "['main.py'] \n", 0),
        ("print(chr(0xd800))", "\\ud800\n", 0),
    ],
)
def test_a_script_runs_as_python_would_run_it(sandbox, code, stdout, returncode) -> None:
    result = sandbox.run(code, 30)
    assert (result.stdout, result.stderr, result.returncode, result.outcome) == (stdout, "", returncode, "finished")
    assert result.seconds > 0


@table(
    ("code", "says"),
    [
        ("x = 1\n1 / 0", 'File "main.py", line 2, in <module>\n    1 / 0'),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit('bye')", "bye\n"),
        ("input('?')", "EOFError"),
        ("\0", "null bytes"),
        ("'\ud800'", "surrogates not allowed"),
        ("def f(): f()\nf()", "RecursionError"),
        ("raise BaseException('base')", "BaseException: base"),
        ("import sys; print('oops', file=sys.stderr); sys.exit(1)", "oops\n"),
        ("assert False", "AssertionError"),
    ],
)
def test_a_failing_script_says_why(sandbox, code, says) -> None:
    result = sandbox.run(code, 30)
    assert (result.returncode, result.outcome) == (1, "finished")
    assert says in result.stderr
    assert "sandbox/child.py" not in result.stderr


@given(st.text())
@settings(max_examples=30)
def test_any_text_is_answered(sandbox, code) -> None:
    assert sandbox.run(code, 30).outcome == "finished"


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=30)
def test_what_is_printed_arrives(sandbox, text) -> None:
    result = sandbox.run(f"print({text!r}, end='')", 30)
    assert result.stdout == text


def test_an_installed_package_can_be_imported(sandbox) -> None:
    pytest.importorskip("numpy")
    with PythonSandbox() as roomy:
        result = roomy.run("import numpy; print(numpy.linalg.det(numpy.eye(3)))", 60)
    assert result.stdout == "1.0\n", result.stderr


# ---- what it cannot reach --------------------------------------------------------------------------------------------


@needs_everything
@table(
    "code",
    [
        "open('{secret}').read()",
        "import os; os.listdir('{folder}')",
        "import pathlib; pathlib.Path('{secret}').write_text('mine')",
        "import os; os.symlink('{secret}', 'link'); open('link').read()",
        "import os; os.link('{secret}', 'link')",
        "import os; os.rename('{secret}', 'mine')",
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True); fd = libc.open(b'{secret}', 0)\n"
        "if fd < 0: raise PermissionError(ctypes.get_errno())",
        "open('/proc/{server}/environ').read()",
        "import os; print(open(f'/proc/{{os.getppid()}}/environ').read())",
        "open('/proc/self/environ').read()",
        "open('/proc/{server}/maps').read()",
        "open('/etc/passwd').read()",
        "import os; os.listdir('/tmp')",
        "import os; os.listdir('{home}')",
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import urllib.request; urllib.request.build_opener().open('http://127.0.0.1:{port}', timeout=5)",
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True); fd = libc.socket(2, 1, 0)\n"
        "if fd < 0: raise PermissionError(ctypes.get_errno())",
        "import subprocess; subprocess.run(['id'])",
        "import os; os.system('id') and 1 / 0",
        "import os; os.fork()",
        "import os; os.posix_spawn('/usr/bin/id', ['id'], {{}})",
        "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill({server}, 9)",
        "import os; os.kill(-1, 9)",
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.ptrace(16, {server}, 0, 0): raise PermissionError(ctypes.get_errno())",
        "import os; os.chown('.', 1, 1)",
        "import os; os.mkfifo('a'); os.mknod('b', 0o20600, 259)",
    ],
)
def test_what_is_out_of_reach(sandbox, tmp_path, unused_tcp_port, code) -> None:
    (tmp_path / "secret").write_text("checkpoint")
    places = {"secret": tmp_path / "secret", "folder": tmp_path, "server": os.getpid(), "port": unused_tcp_port}
    places["home"] = Path.home()
    result = sandbox.run(code.format(**places), 30)
    assert result.returncode != 0, result
    because = ("PermissionError", "Operation not permitted", "Invalid cross-device link", "ZeroDivisionError")
    assert any(reason in result.stderr for reason in because), result
    assert "checkpoint" not in result.stdout + result.stderr
    assert (tmp_path / "secret").read_text() == "checkpoint"
    assert run(sandbox, "print(1)").stdout == "1\n"  # nothing broke


@pytest.fixture
def unused_tcp_port() -> Iterator[int]:
    """A port that somebody does listen on, so that only the sandbox refuses."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_the_environment_of_the_run_is_not_there(monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with PythonSandbox(SMALL) as fresh:
        result = run(fresh, "import os", "print(sorted(os.environ))", "print(os.popen)")
    names = set(eval(result.stdout.splitlines()[0]))
    assert names == {
        "HOME",
        "LANG",
        "PATH",
        "TMPDIR",
        *(f"{n}_NUM_THREADS" for n in ("MKL", "NUMEXPR", "OMP", "OPENBLAS")),
    }


@pytest.mark.slow
@needs_everything
def test_two_runs_never_see_each_other(sandbox) -> None:
    """Neither the one before, nor one at the same time, by file, memory, queue or module."""
    first = run(
        sandbox,
        "import os, builtins, math",
        "open('mine', 'w').write('x'); builtins.left = 1; math.pi = 3; os.environ['LEFT'] = '1'",
        "print(os.getcwd())",
    )
    after = run(
        sandbox,
        "import os, builtins, math",
        "print(os.listdir(), hasattr(builtins, 'left'), math.pi, 'LEFT' in os.environ)",
        f"print(os.path.exists({first.stdout.strip()!r}))",
    )
    assert after.stdout == "[] False 3.141592653589793 False\nFalse\n"

    async def both() -> tuple[CodeResult, CodeResult]:
        waits = "import time; open('secret', 'w').write('x'); time.sleep(3)"
        one = asyncio.create_task(sandbox.run_async(waits, 60))
        assert sandbox._scratch is not None
        while not (secrets := list(sandbox._scratch.path.glob("*/secret"))):
            await asyncio.sleep(0.01)
        folder = secrets[0].parent
        (pid,) = children(sandbox._zygote.pid)
        attempts = [
            f"open('{folder}/secret')",
            f"os.listdir('{folder}')",
            f"os.listdir('{folder.parent}')",
            f"open('{folder}/new', 'w')",
            f"os.kill({pid}, 9)",
            f"open('/proc/{pid}/environ')",
            f"os.remove('{folder}/secret')",
        ]
        code = (
            "import os\nfor attempt in " + repr(attempts) + ":\n    try: exec(attempt); print('got', attempt)\n"
            "    except OSError: pass\nprint('done')"
        )
        other = await sandbox.run_async(code, 30)
        return await one, other

    one, other = asyncio.run(both())
    assert other.stdout == "done\n", other
    assert one.returncode == 0


def test_random_numbers_differ_from_run_to_run(sandbox) -> None:
    assert len({run(sandbox, "import random; print(random.random())").stdout for _ in range(3)}) == 3


# ---- what it may use up ----------------------------------------------------------------------------------------------

FOR_EVER = [
    ["while True: pass"],
    ["import time", "time.sleep(300)"],
    [
        "import signal",
        "for n in (1, 2, 3, 14, 15, 24): signal.signal(n, lambda *_: None)",
        "while True: signal.pause()",
    ],
    ["import os", "os.closerange(0, 100)", "while True: pass"],
    ["import threading, time", "threading.Thread(target=time.sleep, args=(300,)).start()"],
    ["import atexit, time", "atexit.register(time.sleep, 300)"],
    ["while True:", "    try: pass", "    except BaseException: pass"],
    ["9 ** 9 ** 9"],
    ["import re", "re.match(r'(a+)+$', 'a' * 60 + 'b')"],
]


@table("lines", FOR_EVER, ids=lambda lines: lines[-1])
def test_time_is_up_whatever_it_does(sandbox, lines) -> None:
    result = run(sandbox, "print('began')", *lines, timeout=0.5)
    assert (result.stdout, result.returncode, result.outcome) == ("began\n", -1, "timeout")
    assert result.stderr == "TimeoutError: stopped after 0.5 seconds."
    assert nothing_is_left(sandbox)


def test_processor_time_is_counted_over_all_threads(sandbox) -> None:
    result = run(
        sandbox,
        "import hashlib, threading",
        "def f():",
        "    while True: hashlib.sha256(bytes(10**6))",
        "for _ in range(2): threading.Thread(target=f).start()",
        timeout=120,
    )
    assert (result.outcome, result.returncode) == ("cpu", -1)
    assert "2 seconds of processor time" in result.stderr


def test_memory(sandbox) -> None:
    for bomb in (
        "x = bytearray(1 << 32)",
        "x = []\nwhile True: x.append(bytes(10**6))",
        "x = 'a' * 10**10",
        "[0] * 10**10",
    ):
        result = run(sandbox, bomb)
        assert (result.returncode, result.outcome) == (1, "finished")
        assert "MemoryError" in result.stderr
    ctypes_bomb = run(
        sandbox,
        "import ctypes",
        "libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p",
        "print(libc.malloc(ctypes.c_size_t(1 << 32)))",
    )
    assert ctypes_bomb.stdout == "None\n"
    mapped = run(sandbox, "import mmap", "mmap.mmap(-1, 1 << 32)")
    assert mapped.returncode == 1


@table(
    "lines",
    [
        ["while True: print('x' * 100)"],
        ["import sys", "while True: print('x' * 100, file=sys.stderr)"],
        ["import os", "while True: os.write(1, bytes(1 << 16))"],
        ["print('x' * 10**7)"],
        ["import ctypes", "while True: ctypes.CDLL(None).puts(b'x' * 100)"],
    ],
)
def test_output_is_bounded(sandbox, lines) -> None:
    result = run(sandbox, *lines)
    assert (result.outcome, result.returncode) == ("output", -1)
    assert max(len(result.stdout), len(result.stderr)) <= (4 << 10) + 100
    assert result.stderr.endswith("Stopped: it printed more than 4 KiB.")


@table("size", [4096, 4097])
def test_output_up_to_the_limit_is_whole(sandbox, size) -> None:
    result = run(sandbox, f"print('x' * {size}, end='')")
    assert result.outcome == ("finished" if size == 4096 else "output")
    assert result.stdout == "x" * 4096


def test_too_much_output_is_seen_also_when_the_code_has_ended_before_anybody_looks(sandbox, monkeypatch) -> None:
    def look_later(self, pause: float) -> bool:
        self.fork.wait(20)
        return False

    monkeypatch.setattr(python.Watch, "_wait_for_output", look_later)
    result = run(sandbox, "print('x' * 5000)")
    assert (result.outcome, len(result.stdout)) == ("output", 4096)


def test_one_file_is_bounded(sandbox) -> None:
    result = run(sandbox, "f = open('big', 'wb')", "while True: f.write(bytes(10**6))")
    assert result.returncode == 1
    assert "File too large" in result.stderr


@table(
    "lines",
    [
        ["for n in range(10**6):", "    with open(str(n), 'wb') as f: f.write(bytes(900_000))"],
        ["for n in range(10**7): open(str(n), 'w').close()"],
        ["import os", "while True:", "    os.mkdir('deeper')", "    os.chdir('deeper')"],
    ],
)
def test_all_files_together_are_bounded_and_removed(sandbox, lines) -> None:
    result = run(sandbox, *lines, "import time; time.sleep(60)", timeout=60)
    assert (result.outcome, result.returncode) == ("disk", -1)
    assert nothing_is_left(sandbox)


def test_files_that_resist_are_removed(sandbox) -> None:
    result = run(
        sandbox,
        "import os",
        "os.mkdir('locked', 0); os.makedirs('deep/er'); os.umask(0o777); os.mkdir('deep/er/sealed')",
        "open('none', 'w').close()",
        "os.symlink('/', 'root'); os.symlink('nowhere', 'dangling'); os.mkdir(b'\\xff')",
    )
    assert result.returncode == 0, result.stderr
    assert nothing_is_left(sandbox)
    assert os.path.isdir("/usr")


def test_folders_that_their_owner_may_not_enter_are_removed() -> None:
    """Root may enter everything, so somebody else tries."""
    script = """
import os, sys
from pathlib import Path
from astuner_sandbox.isolation.scratch import remove
if os.getuid() == 0:
    os.setuid(12345)
top = Path(sys.argv[1]) / "top"
(top / "a" / "b" / "c").mkdir(parents=True)
(top / "a" / "b" / "c" / "file").touch()
for folder in ("a/b/c", "a/b", "a"):
    (top / folder).chmod(0)
remove(top)
"""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert os.listdir(folder) == []


def test_folders_nested_deeper_than_a_stack_are_removed(sandbox) -> None:
    """Whether the code ends first or is stopped first, for what cannot be looked at."""
    run(sandbox, "import os", "for n in range(3000): os.mkdir('d'); os.chdir('d')")
    assert nothing_is_left(sandbox)
    assert run(sandbox, "print(1)").stdout == "1\n"


def test_threads_are_bounded(sandbox) -> None:
    result = run(
        sandbox,
        "import threading, time",
        "threading.stack_size(1 << 16)",
        "for _ in range(40): threading.Thread(target=time.sleep, args=(60,)).start()",
        timeout=60,
    )
    assert (result.outcome, result.returncode) == ("threads", -1)


@needs_everything
def test_a_fork_bomb_goes_nowhere(sandbox) -> None:
    result = run(
        sandbox,
        "import os",
        "n = 0",
        "for _ in range(10_000):",
        "    try: os.fork(); n += 1",
        "    except OSError: pass",
        "print(n)",
    )
    assert result.stdout == "0\n"
    assert nothing_is_left(sandbox)


@table("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_script_that_kills_itself(sandbox, number) -> None:
    result = run(sandbox, "import os, sys", "print('began')", f"os.kill(os.getpid(), {int(number)})")
    assert (result.stdout, result.returncode, result.outcome) == ("began\n", -number, "killed")


def test_a_crash_of_the_interpreter(sandbox) -> None:
    result = run(sandbox, "import ctypes", "ctypes.string_at(0)")
    assert (result.returncode, result.outcome) == (-signal.SIGSEGV, "killed")


@table("timeout", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(sandbox, timeout) -> None:
    with pytest.raises(ValueError, match="positive number of seconds"):
        sandbox.run("1", timeout)


def test_a_run_may_not_ask_for_more_time_than_the_limit() -> None:
    with PythonSandbox(SandboxLimits(seconds=0.3)) as short:
        assert short.run("import time; time.sleep(60)", 100).outcome == "timeout"
        assert short.run("import time; time.sleep(60)").outcome == "timeout"


@table("name", ["seconds", "memory_mb", "parallel"])
def test_a_limit_of_nothing_is_refused(name) -> None:
    with pytest.raises(ValueError, match=name):
        SandboxLimits(**{name: 0})


# ---- the sandbox itself ----------------------------------------------------------------------------------------------


def test_a_killed_zygote_is_replaced_and_the_run_repeated(sandbox) -> None:
    run(sandbox, "1")
    before = sandbox._zygote.pid
    os.kill(before, signal.SIGKILL)
    assert run(sandbox, "print(1)").stdout == "1\n"
    assert sandbox._zygote.pid != before

    slow = []
    thread = threading.Thread(target=lambda: slow.append(run(sandbox, "import time; time.sleep(1); print('whole')")))
    thread.start()
    time.sleep(0.5)
    os.kill(sandbox._zygote.pid, signal.SIGKILL)
    thread.join()
    assert slow[0].stdout == "whole\n"
    assert nothing_is_left(sandbox)


def test_a_sandbox_that_breaks_again_says_so() -> None:
    class Breaks(PythonSandbox):
        def _options(self, folder):
            os.kill(self._zygote.pid, signal.SIGKILL)
            return super()._options(folder)

    with Breaks(SMALL) as broken, pytest.raises(SandboxFailed, match="failed twice") as caught:
        broken.run("print(1)")
    assert isinstance(caught.value, EnvironmentFailed)  # an infrastructure failure, never a reward


def test_a_sandbox_that_cannot_start_says_why(monkeypatch) -> None:
    monkeypatch.setattr(python.sys, "executable", "/nowhere/python")
    with PythonSandbox() as broken, pytest.raises(SandboxFailed, match="cannot start /nowhere/python"):
        broken.run("print(1)")


def test_a_process_that_ends_before_the_code_begins_says_why() -> None:
    class Odd(PythonSandbox):
        def _options(self, folder):
            return {**super()._options(folder), "confinement": {"nonsense": 1}}

    with Odd(SMALL) as odd, pytest.raises(SandboxFailed, match=r"(?s)ended immediately \(exit code 1\).*'nonsense'"):
        odd.run("print(1)")


def test_what_the_machine_does_not_give_is_the_sandboxs_failure(monkeypatch) -> None:
    with PythonSandbox(SMALL) as fresh:
        monkeypatch.setattr(Root, "new", lambda self: Path("/nowhere/at all").mkdir())
        with pytest.raises(SandboxFailed, match="/nowhere/at all"):
            fresh.run("1")


def test_closing_removes_everything_and_stops_what_runs() -> None:
    made = PythonSandbox(SMALL)
    made.run("1")
    zygote, root, failed = made._zygote.pid, made._scratch.path, []

    def long_run() -> None:
        try:
            made.run("import time; time.sleep(60)")
        except SandboxFailed as e:
            failed.append(str(e))

    thread = threading.Thread(target=long_run)
    thread.start()
    while not children(zygote):
        time.sleep(0.01)
    made.close()
    thread.join()
    made.close()
    assert failed == ["the Python sandbox was closed"]
    assert process_start_time(zygote) is None
    assert not root.exists()
    with pytest.raises(SandboxFailed, match="closed"):
        made.run("1")
    with pytest.raises(SandboxFailed, match="closed"):
        asyncio.run(made.run_async("1"))


def test_many_threads_at_once(sandbox) -> None:
    wrong = []

    def one(n: int) -> None:
        for m in range(5):
            result = run(sandbox, f"print({n}, {m})", timeout=120)
            if result.stdout != f"{n} {m}\n":
                wrong.append(result)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert nothing_is_left(sandbox)


def test_the_event_loop_goes_on_while_code_runs(sandbox) -> None:
    async def both() -> tuple[list[str], int]:
        beats = 0

        async def heart() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1

        heart_beat = asyncio.create_task(heart())
        code = "import time; time.sleep(0.5); print('done')"
        results = await asyncio.gather(*(sandbox.run_async(code, 60) for _ in range(8)))
        heart_beat.cancel()
        return [r.stdout for r in results], beats

    printed, beats = asyncio.run(both())
    assert printed == ["done\n"] * 8
    assert beats > 10  # eight runs, four at once, half a second each: it was not blocked once


def test_cancelling_stops_the_code(sandbox) -> None:
    async def cancelled() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(sandbox.run_async("import time; time.sleep(300)"), 0.5)

    run(sandbox, "1")
    asyncio.run(cancelled())
    assert nothing_is_left(sandbox)


def test_folders_that_a_killed_process_left_behind_are_removed(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = (
        "import os, signal, tempfile\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "from astuner_sandbox import PythonSandbox\n"
        "made = PythonSandbox(); made.run('1'); made._scratch.new().joinpath('left').write_text('x')\n"
        "print(made._scratch.path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    left = Path(done.stdout.strip())
    assert left.is_dir()
    (tmp_path / "astuner-sandbox-stranger").mkdir()  # no lock in it: not ours
    with PythonSandbox() as alive:
        alive.run("1")
        assert not left.exists()
        kept = alive._scratch.path
        remove_abandoned("astuner-sandbox-", tmp_path)
        assert kept.is_dir()
    assert [p.name for p in tmp_path.iterdir()] == ["astuner-sandbox-stranger"]


def test_the_shared_one_is_one_per_process_and_ends_with_it() -> None:
    script = """
import json, os, threading
from astuner_sandbox import shared
found = []
threads = [threading.Thread(target=lambda: found.append(shared())) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
print(len(set(map(id, found))), shared().run("print(42)").stdout.strip(), flush=True)
pid = os.fork()
if pid == 0:
    print(shared() is found[0], shared().run("print(43)").stdout.strip(), flush=True)
    shared().close()
    os._exit(0)
os.waitpid(pid, 0)
print(shared().run("print(44)").stdout.strip(), shared()._zygote.pid, shared()._scratch.path, flush=True)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert (first, second) == ("1 42", "False 43")
    forty_four, pid, root = third.split()
    assert forty_four == "44"
    assert process_start_time(int(pid)) is None
    assert not Path(root).exists()
    assert done.stderr == ""


def test_the_shared_one_is_made_again_when_it_was_closed() -> None:
    one = shared()
    one.close()
    assert shared() is not one
    shared().close()


# ---- where the system lacks something --------------------------------------------------------------------------------


@pytest.fixture
def lame(tmp_path, monkeypatch) -> None:
    """A module that makes a zygote's kernel look as if it had neither Landlock nor seccomp."""
    (tmp_path / "lame.py").write_text(
        f"import sys\nsys.path.insert(0, {ATTEMPTS!r})\n"
        "from attempts import pretend_that_it_is_missing\npretend_that_it_is_missing(['landlock', 'seccomp'])\n"
    )
    real = python.ZygoteSpec

    def lamed(*, preload, **given):
        return real(**given, preload=(*preload, "lame"), path=[str(tmp_path)])

    monkeypatch.setattr(python, "ZygoteSpec", lamed)
    monkeypatch.setattr(python, "_said", set())


def test_what_is_missing_is_said_once_and_the_rest_holds(lame, caplog) -> None:
    with PythonSandbox(SMALL) as weak, PythonSandbox(SMALL) as another:
        for one in (weak, another):
            assert run(one, "print(1)").stdout == "1\n"
            assert set(one.level.lacking) == {"files", "network", "processes", "system calls"}
        assert run(weak, "while True: pass", timeout=0.5).outcome == "timeout"
        assert "MemoryError" in run(weak, "x = bytearray(1 << 32)").stderr
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "cannot fully isolate" in record.getMessage()
    assert "- files: Landlock is not available" in record.getMessage()


def test_what_is_required_is_refused_where_it_is_missing(lame) -> None:
    with PythonSandbox(SMALL, require=True) as strict, pytest.raises(NotConfined, match="Landlock is not available"):
        run(strict, "print(1)")


def test_without_confinement_nothing_is_left_running_either(lame) -> None:
    with PythonSandbox(SMALL) as weak:
        left = run(weak, "import subprocess", "print(subprocess.Popen(['sleep', '300'], start_new_session=True).pid)")
        assert left.returncode == 0, left.stderr
        assert nothing_is_left(weak)
        assert process_start_time(int(left.stdout)) is None


def test_without_confinement_code_that_kills_the_zygote_breaks_only_its_own_run(lame) -> None:
    with PythonSandbox(SMALL) as weak:
        with pytest.raises(SandboxFailed, match="failed twice"):
            run(weak, "import os, time; os.kill(os.getppid(), 9); time.sleep(60)")
        assert run(weak, "print(1)").stdout == "1\n"


@needs_everything
def test_require_is_fulfilled_here() -> None:
    with PythonSandbox(SMALL, require=True) as strict:
        assert run(strict, "print(1)").stdout == "1\n"
        assert strict.level.missing == ()


# ---- AgentScope's tool -----------------------------------------------------------------------------------------------


def test_a_result_as_the_model_reads_it() -> None:
    result = CodeResult(stdout="42\n", stderr="", returncode=0, outcome="finished", seconds=0.1)
    assert as_text(result) == "<returncode>0</returncode><stdout>42\n</stdout><stderr></stderr>"
