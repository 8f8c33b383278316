"""`astuner env serve` and `astuner env try`, as a person runs them: real services, pipes and a terminal."""

import codecs
import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from astuner import run_service
from astuner.contracts.service import Service
from astuner_env.cli import ended_by_signals
from tests.table import table

from ._cli_kit import WORLD, astuner, environ, write_plugin

DEADLINE = 120.0
"""Seconds after which something is broken; nothing is measured."""


@pytest.fixture(scope="module")
def see(tmp_path_factory):
    return write_plugin(tmp_path_factory.mktemp("installed"))


@contextlib.contextmanager
def started(*arguments, **options):
    """The command in the background, in a session of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "astuner", "env", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def ready(process):
    """The URL that a service says it listens at."""
    said = []
    for line in process.stdout:
        said.append(line)
        if found := re.fullmatch(r"Starting server on (127\.0\.0\.1:\d+)\n", line):
            return f"http://{found[1]}"
    raise AssertionError(f"{''.join(said)}{process.stderr.read()}")


def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def left_over(folder):
    """Processes whose variables or working folder name ``folder``, and what they left in it."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (proc / "environ").read_bytes() or str(folder) in os.readlink(proc / "cwd"):
                found.append((proc.name, (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
    return found + [str(path) for path in folder.glob("astuner-env-*")]


def gone(folder):
    """Wait until nothing is left; a process that was told to end may need a moment."""
    deadline = time.monotonic() + DEADLINE
    while left_over(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left_over(folder) == []


@pytest.fixture(scope="module")
def service(tmp_path_factory, see):
    """A service with the corridor, for tests that play in it."""
    folder = tmp_path_factory.mktemp("service")
    variables = environ(folder / "home", see, TMPDIR=str(folder))
    with started("serve", "corridor", "--port", "0", env=variables) as process:
        yield ready(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0
    assert gone(folder)


@pytest.fixture
def tried(service, see, tmp_path):
    """`astuner env try corridor …` against that service."""

    def run(*arguments, stdin=""):
        return astuner("env", "try", "corridor", *arguments, "--url", service, home=tmp_path, see=see, stdin=stdin)

    return run


# ------------------------------------------------------------------------------------------------------------ serve


@pytest.mark.slow
def test_the_line_is_printed_when_it_answers_and_ctrl_c_leaves_nothing(tmp_path, see):
    variables = environ(tmp_path / "home", see, TMPDIR=str(tmp_path))
    with started("serve", "--port", "0", "--log-json", "--max-instances", "3", env=variables) as process:
        url = ready(process)
        assert get(f"{url}/healthz") == "OK"
        info = json.loads(get(f"{url}/v1/info"))
        assert "corridor" in info["environments"], "without a name, all that are ready are served"
        assert not {"far_corridor", "appworld"} & set(info["environments"]), "and none that is not set up"
        assert info["max_instances"] == 3
        assert left_over(tmp_path), "or the check below checks nothing"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert all(json.loads(line) for line in err.splitlines()), "logs are JSON, and there is no traceback"
    assert out == ""
    assert gone(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "variables", "says"),
    [
        (("corridor", "--host", "0.0.0.0"), {}, "ASTUNER_ENV_TOKEN"),
        (("corridor", "--host", "0.0.0.0"), {"ASTUNER_ENV_TOKEN": "short"}, "openssl rand -hex 16"),
        (("corridr",), {}, "did you mean corridor?"),
        (("appworld",), {}, "astuner env setup appworld"),
        (("nowhere.py->Maze",), {}, "nowhere.py"),
        (("corridor", "corridor"), {}, "The name 'corridor' is used twice"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(tmp_path, see, arguments, variables, says):
    shown = astuner("env", "serve", *arguments, "--port", "0", home=tmp_path / "home", see=see, **variables)
    assert (shown.code, shown.out) == (2, "")
    assert says in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.slow
def test_a_port_that_is_taken_is_said(service, tmp_path, see):
    port = service.rpartition(":")[2]
    shown = astuner("env", "serve", "corridor", "--port", port, home=tmp_path, see=see)
    assert (shown.code, shown.out) == (2, "")
    assert "port 0 for a free" in shown.err


# -------------------------------------------------------------------------------------------------------------- try


@pytest.mark.slow
def test_a_pipe_plays_to_the_end(tried):
    shown = tried("length-2", stdin="left\nright\nright\nright\n")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith("task length-2\n\n[system] Say right or left.\nYou are at 0 of 2.\n")
    assert "> left\nYou are at -1 of 2.\n" in shown.out
    assert shown.out.rstrip().endswith('terminated after 4 steps, reward 1; score 1, success  {"at": 2}')


@pytest.mark.slow
def test_every_event_is_one_line_of_json(tried):
    shown = tried("--json", "--split", "validation", "--param", "start=3", stdin=":describe\nright\n:quit\n")
    events = [json.loads(line) for line in shown.out.splitlines()]
    assert [event["event"] for event in events] == ["start", "description", "step", "end"]
    assert (events[0]["task_id"], events[0]["observation"]) == ("length-12", "You are at 3 of 12.")
    assert events[2]["info"]["said"] == "right"
    assert (events[-1]["reason"], events[-1]["evaluation"]["details"]) == ("quit", {"at": 4})


@pytest.mark.slow
def test_tasks_are_listed(tried):
    assert tried("--list").out.split() == ["length-2", "length-3", "length-4"]
    assert tried("--list", "--split", "validation").out.split() == ["length-12", "length-13", "length-14"]
    assert json.loads(tried("--list", "--json").out) == ["length-2", "length-3", "length-4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "says"),
    [
        (("length-x",), "", 1, "there is no task 'length-x'"),
        (("--split", "test"), "", 1, "there are train and validation"),
        (("--param", "start"), "", 2, "--param 'start' is not KEY=VALUE"),
        ((), "boom\n", 1, "the corridor fell in"),
        ((), ":sing\n", 2, ":sing"),
    ],
)
def test_what_does_not_work_is_said_with_an_exit_code(tried, arguments, stdin, code, says):
    shown = tried(*arguments, stdin=stdin)
    assert shown.code == code, shown.err
    assert says in shown.err
    assert "Traceback" not in shown.err
    assert "score" not in shown.out, "no evaluation is made up"


@pytest.mark.slow
def test_a_service_that_is_not_there_is_said(tmp_path, see):
    shown = astuner("env", "try", "corridor", "length-2", "--url", "http://127.0.0.1:9", home=tmp_path, see=see)
    assert shown.code == 1
    assert "127.0.0.1:9" in shown.err
    assert "Start it: astuner env serve corridor, or leave out --url" in shown.err


@pytest.mark.slow
def test_a_service_of_its_own_is_started_and_ended(tmp_path, see):
    shown = astuner(
        "env", "try", "corridor", home=tmp_path / "home", see=see, stdin="right\nright\n", TMPDIR=str(tmp_path)
    )
    assert (shown.code, shown.err) == (0, "")
    assert "score 1, success" in shown.out
    assert gone(tmp_path)
    assert not list(tmp_path.glob("home/logs/*")), "a log is kept where something failed"


@pytest.mark.slow
def test_code_in_a_file_is_played_without_a_plugin(tmp_path):
    (tmp_path / "world.py").write_text(WORLD)
    shown = astuner(
        "env", "try", "world.py->Corridor", "length-1", "--json", home=tmp_path / "home", stdin="right\n", cwd=tmp_path
    )
    assert (shown.code, shown.err) == (0, "")
    assert json.loads(shown.out.splitlines()[-1])["evaluation"]["success"] is True


@pytest.mark.slow
def test_a_world_that_raises_is_shown_with_its_line_and_the_log_of_its_service(tmp_path):
    world = tmp_path / "world.py"
    world.write_text(WORLD)
    shown = astuner("env", "try", "world.py->Corridor", home=tmp_path / "home", stdin="boom\n", cwd=tmp_path)
    assert shown.code == 1
    line = WORLD.splitlines().index('            raise RuntimeError("the corridor fell in")') + 1
    assert f"RuntimeError: the corridor fell in ({world}:{line} in step). Log of the service: " in shown.err
    log = Path(shown.err.strip().rpartition(" ")[2]).read_text()
    assert 'raise RuntimeError("the corridor fell in")' in log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("world.py->Coridor", "{folder}/world.py has no 'Coridor'; did you mean Corridor?"),
        ("broken.py->Corridor", "{folder}/broken.py:2: importing '{folder}/broken.py:Corridor' failed: SyntaxError"),
    ],
)
def test_code_that_cannot_be_imported_is_said_in_one_line(tmp_path, code, says):
    (tmp_path / "world.py").write_text(WORLD)
    (tmp_path / "broken.py").write_text("import os\nclass Corridor(:\n")
    shown = astuner("env", "try", code, home=tmp_path / "home", cwd=tmp_path)
    assert (shown.code, shown.out) == (1, "")
    (line,) = shown.err.strip().splitlines()
    assert says.format(folder=tmp_path) in line
    assert Path(line.rpartition(" ")[2].rstrip(")")).is_file()


class Terminal:
    """What a person sees and types."""

    def __init__(self, descriptor):
        self.descriptor = descriptor
        self.seen = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")()  # a character may come in two parts

    def wait_for(self, text):
        deadline = time.monotonic() + DEADLINE
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.descriptor], [], [], 1.0)[0]:
                try:
                    more = os.read(self.descriptor, 65536)
                except OSError:  # the other end is closed
                    more = b""
                assert more, self.seen
                self.seen += self.decoder.decode(more).replace("\r\n", "\n")

    def type(self, text):
        self.seen = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")()  # a character may come in two parts
        os.write(self.descriptor, text.encode())


@contextlib.contextmanager
def at_a_terminal(folder, see, *arguments):
    mine, theirs = pty.openpty()
    variables = environ(folder / "home", see, TMPDIR=str(folder), TERM="dumb")
    process = subprocess.Popen(
        [sys.executable, "-m", "astuner", "env", "try", *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs, env=variables, start_new_session=True,
        preexec_fn=lambda: _take_terminal(theirs),
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Terminal(mine), process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(mine)


def _take_terminal(descriptor):
    import fcntl
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)  # so that Ctrl-C typed there is a signal


@pytest.mark.slow
def test_a_person_plays_at_a_terminal(tmp_path, see):
    with at_a_terminal(tmp_path, see, "corridor", "length-2") as (terminal, process):
        terminal.wait_for("You are at 0 of 2.\n> ")
        assert ":help" not in terminal.seen.partition("task length-2")[2]
        terminal.type(":sing\n")
        terminal.wait_for(":sing")
        terminal.wait_for("> ")
        terminal.type(":block\nright\n")
        terminal.wait_for("… ")
        terminal.type("\n")
        terminal.wait_for("You are at 1 of 2.\n> ")
        terminal.type("right\n")
        terminal.wait_for("terminated after 2 steps, reward 1; score 1, success")
        assert process.wait(DEADLINE) == 0
    assert gone(tmp_path)


def test_a_signal_that_python_has_not_handled_yet_wakes_up_what_waits():
    before = signal.getsignal(signal.SIGTERM)

    @ended_by_signals()
    def wait():
        hit = lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # noqa: E731
        threading.Timer(0.3, hit).start()  # a thread that Python handles no signal in: the main one waits on
        threading.Event().wait(DEADLINE)

    with pytest.raises(SystemExit) as ended:
        wait()
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@table("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_service_is_started_or_stopped_does_not_tear_that_apart(tmp_path, ending):
    done = []

    class Told(Service):
        def start(self, **_):
            signal.raise_signal(ending)
            done.append("started")

        def is_ready(self):
            done.append("asked")  # never: the signal counts first
            return True

        def stop(self):
            signal.raise_signal(ending)
            done.append("stopped")

    with pytest.raises((KeyboardInterrupt, SystemExit)), ended_by_signals(), run_service(Told(), "it", "", tmp_path):
        done.append("in the block")
    assert done == ["started", "stopped"]


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code"), [("\x04", 0), ("\x03", 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_however_it_ends_its_service_ends_too(tmp_path, see, ending, code):
    with at_a_terminal(tmp_path, see, "corridor", "length-2") as (terminal, process):
        terminal.wait_for("You are at 0 of 2.\n> ")
        assert left_over(tmp_path)
        if isinstance(ending, str):
            terminal.type(ending)
        else:
            process.send_signal(ending)
        assert process.wait(DEADLINE) == code
        if ending == "\x04":
            terminal.wait_for("input ended after 0 steps")
    assert gone(tmp_path)
