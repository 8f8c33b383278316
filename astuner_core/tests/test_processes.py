"""Only what is recorded, and still the same process, is ended."""

import json
import os
import signal
import subprocess
import sys

import pytest

from astuner.cli import main
from astuner.contracts.errors import RunError
from astuner.support import processes
from astuner_debug import kill_command


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def start():
    """Start a Python program that says when it is ready; it is gone at the end of the test."""
    started = []

    def start(code="import time; print('ready', flush=True); time.sleep(600)"):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_recorded_process_is_ended_and_forgotten(start, tmp_path, own_home):
    child = start()
    recorded = processes.record_process(child.pid, "a server", tmp_path / "run")
    assert processes.recorded_processes() == [recorded]
    assert recorded.run_dir == str(tmp_path / "run")
    assert kill_command.terminate([recorded]) == [(recorded, "ended")]
    assert child.wait() == -signal.SIGTERM
    assert processes.recorded_processes() == []
    assert list((own_home / "processes").iterdir()) == []


def test_one_that_does_not_listen_is_killed(start):
    child = start(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('ready', flush=True); time.sleep(600)"
    )
    recorded = processes.record_process(child.pid, "stubborn")
    assert kill_command.terminate([recorded], grace=0.2) == [(recorded, "killed")]
    assert child.wait() == -signal.SIGKILL


def test_another_process_with_the_same_pid_is_left_alone(start, own_home):
    child = start()
    recorded = processes.record_process(child.pid, "the one before")
    file = own_home / "processes" / f"{child.pid}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"started": "earlier"}))
    impostor = processes.RecordedProcess(pid=child.pid, started="earlier", what=recorded.what, run_dir="")
    assert kill_command.terminate([impostor]) == [(impostor, "gone")]
    assert child.poll() is None


def test_records_of_finished_processes_are_removed(start, own_home):
    child = start()
    processes.record_process(child.pid, "short")
    child.kill()
    child.wait()
    assert processes.recorded_processes() == []
    assert list((own_home / "processes").iterdir()) == []


def test_a_zombie_counts_as_finished(start):
    child = start()
    recorded = processes.record_process(child.pid, "zombie")
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, but not reaped
    assert not processes.is_same_process(recorded.pid, recorded.started)


def test_the_block_form_forgets_also_after_an_error():
    def block():
        with processes.recorded_process(os.getpid(), "this test"):
            assert [p.what for p in processes.recorded_processes()] == ["this test"]
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        block()
    assert processes.recorded_processes() == []


def test_only_of_one_run_folder(start, tmp_path):
    a, b = start(), start()
    first = processes.record_process(a.pid, "a", tmp_path / "a")
    processes.record_process(b.pid, "b", tmp_path / "b")
    assert processes.recorded_processes(tmp_path / "a") == [first]


def test_what_is_not_running_cannot_be_recorded(start):
    child = start()
    child.kill()
    child.wait()
    with pytest.raises(ProcessLookupError, match="not running"):
        processes.record_process(child.pid, "late")


def test_the_folder_is_private(own_home):
    processes.recorded_processes()
    assert (own_home / "processes").stat().st_mode & 0o777 == 0o700


def test_a_damaged_record_is_named(own_home):
    processes.recorded_processes()
    (own_home / "processes" / "1.json").write_text("{")
    with pytest.raises(RunError, match=r"1\.json is not a valid process record"):
        processes.recorded_processes()


def run(*arguments):
    with pytest.raises(SystemExit) as e:
        main(list(arguments))
    return e.value.code


def test_kill_ends_what_belongs_to_a_run_folder_and_nothing_else(start, tmp_path, capsys):
    mine, other = start(), start()
    processes.record_process(mine.pid, "server", tmp_path / "a")
    processes.record_process(other.pid, "server", tmp_path / "b")
    assert run("kill", "--run-dir", str(tmp_path / "a")) == 0
    assert mine.wait() == -signal.SIGTERM
    assert other.poll() is None
    assert "ended" in capsys.readouterr().out


def test_kill_lists_and_asks_which(start, tmp_path, capsys):
    child = start()
    processes.record_process(child.pid, "server", tmp_path / "a")
    assert run("kill") == 2
    shown = capsys.readouterr()
    assert str(child.pid) in shown.out
    assert "astuner kill --all" in shown.err
    assert run("kill", "--all", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [
        {"pid": child.pid, "what": "server", "run_dir": str(tmp_path / "a"), "outcome": "would end"}
    ]
    assert child.poll() is None
    assert run("kill", "--all") == 0
    assert child.wait() == -signal.SIGTERM


def test_kill_with_nothing_to_end(capsys):
    assert run("kill") == 0
    assert "no process of your runs is running" in capsys.readouterr().out
