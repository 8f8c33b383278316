"""Breakpoints by tag: whether a run stops where ``bp("TAG")`` is, how, and that it does not otherwise."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from astuner import bp, load_config, run
from astuner.cli import main
from astuner.contracts.errors import ConfigError, MissingDependency
from astuner.runs import breakpoints as core
from astuner.testing import FakeBackbone, fake_config
from astuner_debug import breakpoints
from astuner_debug.breakpoints import Breakpoints, Stop
from tests.table import table

from ._dap import Editor

AGENT = """
from astuner import Workflow, WorkflowOutput, bp

class Agent(Workflow):
    async def execute(self, workflow_task, model_tuner):
        secret = 41
        bp("OTHER")
        bp("HERE")
        secret += 1
        await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(reward=float(secret == 42), is_success=secret == 42)
"""
LINE_AFTER = next(number for number, line in enumerate(AGENT.splitlines(), 1) if "secret += 1" in line)
RUN = """
import sys
from contextlib import contextmanager
from astuner.runs import preflight
from astuner.contracts.backbone import Served
from astuner_debug.backbone import DebugBackbone
from astuner.cli import main
from astuner.testing import FakeEngine, make_tokenizer

class Backbone(DebugBackbone):
    def check(self):
        pass

    @contextmanager
    def serve(self, model_path=None):
        tokenizer = make_tokenizer()
        yield Served(engine=FakeEngine(lambda prompt: "4", tokenizer), tokenizer=tokenizer, name="fake")

preflight.make_backbone = lambda config: Backbone(config)
main(["run", "exp.yaml", "--run-dir", "run", *sys.argv[1:]])
"""
EXPERIMENT = """
astuner:
  backbone: debug
  model: {path: .}
  debug: {debug_first_n_tasks: 2, debug_max_parallel: 2}
  rollout: {workflow: "agent.py->Agent", episode_timeout: 0.4}
  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "run.py").write_text(RUN)
    (tmp_path / "exp.yaml").write_text(EXPERIMENT)
    (tmp_path / "tasks.jsonl").write_text('{"main_query": "2 + 2?"}\n{"main_query": "1 + 3?"}\n')
    return tmp_path


@pytest.fixture(autouse=True)
def _nothing_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_stopped", set())


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(Tag, line) of every stop, instead of a debugger."""
    found: list[tuple[str, int]] = []
    monkeypatch.setattr(Breakpoints, "stop", lambda tag, frame: found.append((tag, frame.f_lineno)))
    return found


# ---------------------------------------------------------------------------------------------------- a run that stops


@pytest.mark.slow
def test_on_a_terminal_it_is_pdb_at_the_line_after_and_the_run_goes_on(folder: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "run.py", "--db=HERE|NOWHERE"]
    run = subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = ""
    for words, answer in (("(Pdb) ", "p secret + 1000\n"), ("1041\r\n(Pdb) ", "c\n"), ("Run folder", "")):
        said = _read_until(ours, words, said)
        if words == "(Pdb) ":
            time.sleep(0.6)  # longer than the file's own episode_timeout
        os.write(ours, answer.encode())
    assert run.wait(timeout=60) == 0
    os.close(ours)
    assert f"agent.py({LINE_AFTER})execute()" in said
    assert "-> secret += 1" in said
    assert said.count("(Pdb)") == 2, "once per process"
    assert "breakpoint HERE at" in said
    assert 'breakpoints never reached: bp("NOWHERE")' in said
    assert "rewards [1.0, 1.0]" in said


@pytest.mark.slow
def test_without_a_terminal_a_debugger_attaches_and_stops_at_the_line(folder: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "run.py", "--db", "HERE"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.stdout is not None
    said = []
    with run:
        for line in run.stdout:
            said.append(line)
            if waits := re.search(r"breakpoint HERE at .*agent\.py:\d+ in process \d+ .* 127\.0\.0\.1:(\d+);", line):
                editor = Editor(int(waits[1]))
                editor.attach()
                thread, frame = editor.where()
                assert frame["source"]["path"] == str(folder / "agent.py")
                assert frame["line"] == LINE_AFTER
                assert editor.value("secret", frame) == "41"
                editor.go_on(thread)
                editor.leave()
    text = "".join(said)
    assert run.returncode == 0, text
    assert "rewards [1.0, 1.0]" in text
    assert text.count("waits for a debugger") == 1
    log = (folder / "run.debug" / "run.log").read_text()
    assert "breakpoint HERE at" in log  # also where a person looks who started it in the background


@pytest.mark.slow
@pytest.mark.parametrize("how", ["async", "plain"])
def test_a_run_that_waits_for_a_debugger_is_ended_by_the_first_signal(folder: Path, how: str) -> None:
    plain = AGENT.replace("async def", "def").replace("await model_tuner.chat", "model_tuner.chat_sync")
    (folder / "agent.py").write_text(plain if how == "plain" else AGENT)
    command = [sys.executable, "run.py", "--db", "HERE"]
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if "waits for a debugger" in line:
                run.send_signal(signal.SIGTERM)
                break
        said = run.stderr.read()
    assert run.returncode == 130, said
    assert said.rstrip().endswith("stopped on request")


def test_nobody_has_to_come(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    pydevd: Any = ModuleType("pydevd")
    pydevd._wait_for_attach = lambda cancel: cancel.wait()
    pydevd._is_attached = lambda: False
    monkeypatch.setitem(sys.modules, "pydevd", pydevd)
    monkeypatch.setattr(breakpoints, "_listening", lambda: 4000)
    monkeypatch.setattr(breakpoints, "on_terminal", lambda: False)
    monkeypatch.setattr(breakpoints, "_LONGEST", 0.0)
    with Breakpoints(["A"]).active():
        bp("A")
    assert "no debugger connected to breakpoint A" in capfd.readouterr().err


def _read_until(terminal: int, words: str, said: str) -> str:
    """What the run has written so far, once ``words`` come in what is new."""
    at, deadline = len(said), time.monotonic() + 90
    while words not in said[at:]:
        assert time.monotonic() < deadline, said
        said += os.read(terminal, 4096).decode(errors="replace")
    return said


# -------------------------------------------------------------------------------------------------------------- parts


def test_without_db_nothing_stops(stops: list[tuple[str, int]]) -> None:
    bp("A")
    assert stops == []


def test_a_tag_stops_once_in_a_process_at_the_callers_line_unless_it_says_otherwise(
    stops: list[tuple[str, int]],
) -> None:
    with Breakpoints(["A|C"]).active():
        for _ in range(2):
            bp("A")
            bp("B")
            bp("C", once=False)
        assert os.environ["ASTUNER_DEBUG_TAGS"] == "A|C"  # which Ray's workers are given
    bp("C", once=False)
    line = test_a_tag_stops_once_in_a_process_at_the_callers_line_unless_it_says_otherwise.__code__.co_firstlineno
    assert stops == [("A", line + 5), ("C", line + 7), ("C", line + 7)]


@table("given", [["A|B"], ["A,B"], ["A", "B"], ["A | B", "A"]])
def test_tags_are_written_in_several_ways(given: list[str]) -> None:
    assert Breakpoints(given).tags == ("A", "B")


@table(("given", "says"), [("A||B", "empty tag"), ("A B", "'A B' is not a valid tag"), ("", "empty tag")])
def test_what_is_no_tag_is_refused(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        Breakpoints([given])


def test_to_listen_without_a_tag_is_refused() -> None:
    with pytest.raises(ConfigError, match="add --db TAG"):
        Breakpoints([], listen=True)


def test_limits_are_lifted_and_the_command_line_wins(tmp_path: Path) -> None:
    path = fake_config(tmp_path, "  rollout: {episode_timeout: 5, max_env_worker: 32}").path
    a = load_config(path, [*Breakpoints(["A"]).overrides, "astuner.rollout.max_env_worker=4"]).astuner
    assert (a.rollout.episode_timeout, a.task_judge.judge_timeout, a.env_service.timeout) == (86400, 86400, 86400)
    assert a.rollout.max_env_worker == 4


def test_the_person_is_told_how_a_run_that_stops_differs(tmp_path: Path) -> None:
    said = Breakpoints(["A", "B"]).check(FakeBackbone(fake_config(tmp_path)))
    assert said.startswith("breakpoints: A, B; ")


def test_without_the_package_the_command_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(MissingDependency, match=r"--db needs the part 'debugger'.*astuner-debug.*disabled"):
        run(fake_config(tmp_path).path, debug_tags=["A"], disabled_plugins=["debug"])


def test_a_command_that_lends_has_no_episodes_to_stop(tmp_path: Path) -> None:
    class Lender(FakeBackbone):
        lends = True

    with pytest.raises(ConfigError, match="owns the run"):
        Breakpoints(["A"]).check(Lender(fake_config(tmp_path)))


def test_the_run_says_what_was_never_reached() -> None:
    session, notes = Breakpoints(["A", "B", "C"]), list[str]()
    session.note = notes.append
    session.hear(Stop(tag="B", place="agent.py:3", pid=1, host="there", port=4000))
    session.end()
    assert "breakpoint B at agent.py:3 in process 1 on there waits for a debugger at 127.0.0.1:4000" in notes[0]
    assert "ssh -L 4000:127.0.0.1:4000 there" in notes[0]
    assert 'bp("A"), bp("C")' in notes[1]
    assert 'bp("B")' not in notes[1]


def test_outside_a_run_a_stop_is_said_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    breakpoints._say(Stop(tag="A", place="agent.py:3", pid=1, host="here"))
    assert "breakpoint A at agent.py:3" in capfd.readouterr().err


class Gone(Exception):
    """Ray's word for a cluster that does not answer."""


class Store:
    """Ray's key-value store."""

    def __init__(self) -> None:
        self.values: dict[tuple[bytes, bytes], bytes] = {}

    def _internal_kv_put(self, key: str, value: str, namespace: bytes) -> None:
        self.values[namespace, key.encode()] = value.encode()

    def _internal_kv_get(self, key: bytes, namespace: bytes) -> bytes:
        return self.values[namespace, key]

    def _internal_kv_del(self, key: bytes, namespace: bytes) -> None:
        del self.values[namespace, key]

    def _internal_kv_list(self, prefix: str, namespace: bytes) -> list[bytes]:
        return [key for space, key in self.values if space == namespace and key.startswith(prefix.encode())]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """Where workers and run meet, without Ray (with it, by hand: docs/debugging.md)."""
    kv = Store()
    ray, experimental, errors = (ModuleType(f"ray{name}") for name in ("", ".experimental", ".exceptions"))
    ray.is_initialized = lambda: True  # type: ignore[attr-defined]
    experimental.internal_kv = kv  # type: ignore[attr-defined]
    errors.RayError = Gone  # type: ignore[attr-defined]
    for module in (ray, experimental, errors):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "ray.experimental.internal_kv", kv)
    return kv


def test_what_a_worker_leaves_the_run_hears(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    session, notes = Breakpoints(["A"]), list[str]()
    session.note = notes.append
    stop = Stop(tag="A", place="agent.py:3", pid=1, host="there", port=4000)
    store._internal_kv_put("another run/1", "not ours", namespace=breakpoints.NAMESPACE)
    with session.active(), Breakpoints.hearing_workers():
        monkeypatch.setattr(breakpoints, "_current", None)  # as in a worker
        breakpoints._say(stop)
        monkeypatch.setattr(breakpoints, "_current", session)
    assert notes == [str(stop)]
    assert list(store.values) == [(breakpoints.NAMESPACE, b"another run/1")]
    session.end()
    assert len(notes) == 1, "it was reached"


def test_a_cluster_that_is_gone_is_said_once_and_stops_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(prefix: str, namespace: bytes) -> list[bytes]:
        raise Gone("no answer")

    monkeypatch.setattr(store, "_internal_kv_list", gone)
    session, notes = Breakpoints(["A"]), list[str]()
    session.note = notes.append
    with session.active(), Breakpoints.hearing_workers():
        pass
    assert notes == ["breakpoints in workers are no longer reported: Gone: no answer"]


def test_hearing_needs_no_ray_without_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with Breakpoints.hearing_workers():
        pass


@table("words", ["--conf x.yaml --db=A|B", "run x.yaml --db A|B", "run x.yaml --debug-tags A,B"])
def test_the_command_line_of_the_first_documents(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fake(path: Path, overrides: Any, **options: Any) -> Any:
        asked.update(options)
        raise ConfigError("far enough")

    monkeypatch.setattr("astuner.runs.launch.run", fake)
    with pytest.raises(SystemExit):
        main(words.split())
    assert Breakpoints(asked["debug_tags"]).tags == ("A", "B")
