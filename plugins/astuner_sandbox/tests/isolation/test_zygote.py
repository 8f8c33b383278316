"""The zygote and its children: what they share, how they end, and that nothing is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from astuner.support.processes import process_start_time
from astuner_sandbox.isolation.channel import Channel
from astuner_sandbox.isolation.zygotes import Fork, Zygote, ZygoteFailed, ZygoteSpec
from tests.table import table

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def spec(main: str = "echo", **settings) -> ZygoteSpec:
    settings = {"python": sys.executable, "path": [str(HERE)], **settings}
    return ZygoteSpec(main=f"children:{main}", **settings)


@pytest.fixture
def zygotes() -> Iterator[list[Zygote]]:
    made: list[Zygote] = []
    yield made
    for zygote in made:
        zygote.close()


@pytest.fixture
def zygote(zygotes) -> Zygote:
    return started(zygotes)


def started(zygotes, main: str = "echo", **settings) -> Zygote:
    zygotes.append(Zygote(spec(main, **settings)))
    zygotes[-1].start(60)
    return zygotes[-1]


def talk(fork: Fork) -> Channel:
    return Channel(fork.socket)


def gone(pid: int) -> bool:
    """Whether a process ends soon."""
    deadline = time.monotonic() + 20
    while process_start_time(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return process_start_time(pid) is None


def test_children_share_what_was_imported_and_nothing_else(zygote) -> None:
    forks = [zygote.fork({"n": n}) for n in range(3)]
    answers = []
    for n, fork in enumerate(forks):
        channel = talk(fork)
        channel.send(f"hello {n}")
        answers.append(channel.recv(20))
        channel.close()
    assert [a["said"] for a in answers] == ["hello 0", "hello 1", "hello 2"]
    assert [a["options"] for a in answers] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert [a["pid"] for a in answers] == [fork.pid for fork in forks]
    assert {a["imported_at"] for a in answers} == {zygote.pid}
    assert {fork.wait(20) for fork in forks} == {"exit code 1"}  # an EOFError that `echo` does not catch


@table(("message", "ended", "code"), [("raise", "exit code 1", 1), ("exit 7", "exit code 7", 7)])
def test_an_end_is_reported_with_what_was_printed(zygote, tmp_path, message, ended, code) -> None:
    log, told = tmp_path / "log", []
    with log.open("ab") as file:
        fork = zygote.fork({}, output=(file.fileno(), file.fileno()), on_exit=told.append)
    channel = talk(fork)
    channel.send("print")
    channel.recv(20)
    channel.send(message)
    assert fork.wait(20) == ended
    assert (fork.returncode, told) == (code, [fork])
    assert fork.cpu_s >= 0
    text = log.read_text()
    assert "printed\n" in text
    assert "and complained" in text
    assert ("LookupError: as it was told to" in text) == (message == "raise")
    channel.close()


def test_output_can_go_to_descriptors(zygote) -> None:
    reading, writing = os.pipe()
    fork = zygote.fork({}, output=(writing, writing))
    os.close(writing)
    channel = talk(fork)
    with os.fdopen(reading) as printed:
        channel.send("print")
        channel.recv(20)
        fork.kill()
        assert printed.read() == "printed\nand complained\n"
    channel.close()


def test_killing_one_leaves_the_others(zygote) -> None:
    one, other = zygote.fork({}), zygote.fork({})
    one.kill()
    assert one.wait(20) == "killed"
    assert one.returncode == -signal.SIGKILL
    one.kill()  # again: nothing happens
    channel = talk(other)
    channel.send("still there?")
    assert channel.recv(20)["said"] == "still there?"
    os.kill(other.pid, signal.SIGKILL)
    assert other.wait(20) == "killed by SIGKILL (out of memory?)"
    channel.close()
    one.socket.close()


def test_what_a_child_sees(zygotes, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    zygote = started(zygotes, "look", environ={"GIVEN": "yes", "LANG": "C.UTF-8"})
    fork = zygote.fork({"names": []})
    seen = talk(fork).recv(20)
    assert (
        {"GIVEN", "LANG"}
        <= set(seen["environ"])
        <= {"GIVEN", "PATH", "LANG", "HOME", "TMPDIR", "ASTUNER_ZYGOTE", "LC_CTYPE"}
    )
    assert seen["session"]
    assert seen["stdin"] == "/dev/null"
    assert len(seen["descriptors"]) == 5  # the three, its socket, and the one that lists them
    fork.socket.close()


def test_a_bare_interpreter_runs_what_it_is_lent_and_sees_nothing_else(zygotes, tmp_path) -> None:
    """An environment with no package at all; what lies beside a lent package is not lent."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (tmp_path / "src" / "lent").mkdir(parents=True)
    (tmp_path / "src" / "lent" / "__init__.py").write_text("")
    (tmp_path / "src" / "lent" / "inner.py").write_text("from lent import __name__")
    (tmp_path / "src" / "beside.py").write_text("")
    (tmp_path / "src" / "single.py").write_text("")
    lent = {"lent": str(tmp_path / "src" / "lent"), "single": str(tmp_path / "src" / "single.py")}
    zygote = started(zygotes, "look", python=str(tmp_path / "venv" / "bin" / "python"), lent=lent)
    names = ["pydantic", "pluggy", "pytest", "beside", "lent.inner", "single", "astuner.contracts.environment"]
    fork = zygote.fork({"names": names})
    seen = talk(fork).recv(20)
    importable = [name for name in names if seen["importable"][name]]
    assert importable == ["lent.inner", "single", "astuner.contracts.environment"]
    fork.socket.close()


def test_the_mechanics_load_the_standard_library_and_themselves_only(zygotes) -> None:
    fork = started(zygotes, "look").fork({"names": []})
    loaded = talk(fork).recv(20)["loaded"]
    ours = {name for name in loaded if name.startswith("astuner")}
    assert ours <= {"astuner", "astuner_sandbox", "astuner_sandbox.isolation"} | {
        f"astuner_sandbox.isolation.{name}" for name in ("channel", "linux", "proc", "start", "zygote_process")
    }
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names <= {
        "astuner",
        "astuner_sandbox",
        "children",
        "__main__",
    } | {name for name in loaded if name.startswith("__editable__") or name in ("_distutils_hack", "sitecustomize")}
    fork.socket.close()


@table("mechanism", [signal.SIGKILL, "close"])
def test_nothing_outlives_the_zygote(zygotes, mechanism) -> None:
    zygote = started(zygotes, "leave_something_running")
    forks = [zygote.fork({}) for _ in range(3)]
    grandchildren = [talk(fork).recv(20) for fork in forks]
    if mechanism == "close":
        zygote.close()
    else:
        os.kill(zygote.pid, mechanism)
    assert all("its zygote is gone" in fork.wait(20) for fork in forks)
    assert all(map(gone, [zygote.pid, *(fork.pid for fork in forks), *grandchildren]))
    assert not zygote.is_alive
    with pytest.raises(ZygoteFailed, match="cannot fork"):
        zygote.fork({})
    for fork in forks:
        fork.socket.close()


def test_nothing_outlives_the_server(tmp_path) -> None:
    """The server is killed without any warning; its zygote, the children and theirs end."""
    script = f"""
import sys, time
from astuner_sandbox.isolation.zygotes import Zygote, ZygoteSpec
from astuner_sandbox.isolation.channel import Channel
zygote = Zygote(ZygoteSpec(python=sys.executable, path=[{str(HERE)!r}], main="children:leave_something_running"))
zygote.start(60)
fork = zygote.fork({{}})
print(zygote.pid, fork.pid, Channel(fork.socket).recv(20), flush=True)
time.sleep(300)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pids = [int(word) for word in server.stdout.readline().split()]
        assert len(pids) == 3
        server.kill()
    assert all(map(gone, pids))


def test_what_an_ended_child_left_running_is_killed(zygotes) -> None:
    zygote = started(zygotes, "leave_something_running")
    fork, other = zygote.fork({}), zygote.fork({})
    left, kept = talk(fork).recv(20), talk(other).recv(20)
    fork.kill()
    assert fork.wait(20)
    assert gone(left)
    assert process_start_time(kept) is not None  # another child's is not touched
    for one in (fork, other):
        one.socket.close()


@table(
    ("settings", "says"),
    [
        ({"python": "/nowhere/python"}, "cannot start /nowhere/python"),
        ({"python": "/bin/false"}, "ended immediately: exit code 1"),
        ({"preload": ["children:not_importable"]}, "RuntimeError: the data is not there"),
        ({"preload": ["no_such_module"]}, "No module named 'no_such_module'"),
        ({"preload": ["children:start_a_thread"]}, r"left threads running \(left over\)"),
        ({"main": "no_such_function"}, "no_such_function"),
        ({"lent": {"thing": "/nowhere"}}, "cannot lend thing from /nowhere"),
    ],
)
def test_what_cannot_start_says_why(settings, says) -> None:
    zygote = Zygote(spec(**settings))
    with pytest.raises(ZygoteFailed, match=says):
        zygote.start(60)
    assert not zygote.is_alive
    zygote.close()


def test_what_takes_too_long_to_start_is_killed() -> None:
    zygote = Zygote(spec(preload=["children:hang"]))
    with pytest.raises(ZygoteFailed, match="was not ready after"):
        zygote.start(0.5)
    assert gone(zygote.pid)


def test_options_that_are_no_json_cost_nothing(zygote) -> None:
    with pytest.raises(TypeError):
        zygote.fork({"bad": object()})
    fork = zygote.fork({})
    channel = talk(fork)
    channel.send("on we go")
    assert channel.recv(20)["said"] == "on we go"
    channel.close()


def test_many_threads_at_once(zygote) -> None:
    wrong: list[object] = []

    def one(n: int) -> None:
        for m in range(5):
            fork = zygote.fork({"n": n, "m": m})
            channel = talk(fork)
            channel.send([n, m])
            answer = channel.recv(60)
            if (answer["said"], answer["options"], answer["pid"]) != ([n, m], {"n": n, "m": m}, fork.pid):
                wrong.append(answer)
            channel.send("exit 7")
            if fork.wait(60) != "exit code 7":
                wrong.append(fork.ended)
            channel.close()

    threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_callback_that_raises_stops_nothing(zygote, caplog) -> None:
    def bad(fork: Fork) -> None:
        raise RuntimeError("a mistake")

    fork = zygote.fork({}, on_exit=bad)
    fork.kill()
    fork.wait(20)
    other = zygote.fork({})
    channel = talk(other)
    channel.send("on we go")
    assert channel.recv(20)["said"] == "on we go"
    assert "a mistake" in caplog.text
    channel.close()
    fork.socket.close()
