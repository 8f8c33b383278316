"""`astuner run FILE --with NAME`, as a person types it: a real service, a real tiny model, and Ctrl-C at any time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from astuner.support import processes
from astuner_env.env_service.server import EnvServer

MODEL = Path(__file__).parents[3] / "examples" / "frozen_lake" / "tiny_skater"

WORLD = '''
import os, time
from pathlib import Path
from astuner import Environment, Evaluation, StepResult, Task

class Toy(Environment):
    """Counts what is said; writes down which process it is."""

    @classmethod
    def tasks(cls, split, params):
        if split not in ("train", "dev"):
            raise ValueError(f"no split is called {split!r}; there are train, dev")
        yield from (Task(task_id=f"{split}-{n}") for n in range(3))

    def reset(self, task):
        Path("pid").write_text(str(os.getpid()))
        self.said = 0
        return StepResult(observation=f"Say something about {task.task_id}, {os.environ.get('ASTUNER_ENV_TOKEN')}")

    def step(self, action):
        self.said += 1
        time.sleep(self.params.get("seconds", 0))
        if self.params.get("broken"):
            raise KeyError("no such key")
        return StepResult(observation=f"{self.said}, pid {os.getpid()}", terminated=self.said == 2)

    def evaluate(self):
        return Evaluation(score=self.said / 2, details={"said": self.said})
'''

WORKFLOW = """
from pathlib import Path
from astuner import Workflow, WorkflowOutput

class Mine(Workflow):
    async def execute(self, workflow_task, model_tuner):
        messages, over, seen = list(workflow_task.task.init_messages), False, []
        while not over:
            reply = await model_tuner.chat(messages)
            Path("acting").touch()
            observation, _, over, _ = model_tuner.gym_step(reply.message)
            seen.append(observation)
            messages += [reply.message, {"role": "user", "content": observation}]
        with open("seen", "a") as file:
            file.write("\\n".join([messages[0]["content"], *seen]) + "\\n")
        return WorkflowOutput()
"""

EXPERIMENT = f"""
astuner:
  model:
    path: {MODEL}
  task_reader:
    type: env_service
    env_service:
      env_type: toy
  rollout:
    workflow: mine.py->Mine
    max_response_length_in_one_turn: 8
    compute_madness_checklist: []
  task_judge:
    judge: env_service
"""

STUCK = """
import http.server, sys, time
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers(); self.wfile.write(b"OK")
    def do_POST(self):
        open("asked", "w").close()
        time.sleep(600)
    def log_message(self, *args): pass
open("begun", "w").close()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), H)
if "ready" in sys.argv:
    print(f"Starting server on 127.0.0.1:{server.server_port}")
server.serve_forever()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an experiment; at the end nothing that was started in it may run."""
    for name in ("ASTUNER_ENV_URL", "ASTUNER_ENV_TOKEN", "FROZEN_LAKE_PATH", "FROZEN_LAKE_SCRIPT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the service makes its folders
    for name, text in {"toy.py": WORLD, "mine.py": WORKFLOW, "exp.yaml": EXPERIMENT, "stuck.py": STUCK}.items():
        (tmp_path / name).write_text(text)
    # A shell starts what runs in its background (CI, say) deaf to Ctrl-C, and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield tmp_path
    signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 60  # what loses its parent ends by itself, once the kernel has told it
    while left := left_over(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert processes.recorded_processes() == []


def left_over(folder: Path) -> list[str]:
    """Processes that work in or below ``folder``: the service does, and each instance has a folder of its own there."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                found.append(f"{entry.name}: {(entry / 'cmdline').read_bytes()!r}")
        except OSError:  # ended meanwhile, or somebody else's
            continue
    return found


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "astuner", "run", "exp.yaml", "--backbone", "debug", *arguments]


def wait_for(what: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it never came so far"
        time.sleep(0.05)


def test_an_experiment_with_its_service(here: Path) -> None:
    asked = command("--with", "toy.py->Toy", "astuner.debug.debug_max_parallel=2")
    done = subprocess.run(asked, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "answers at http://127.0.0.1:" in done.stdout
    assert "3 to train on, 3 to validate on" in done.stdout
    assert "rewards [1.0, 1.0]" in done.stdout
    seen = (here / "seen").read_text().splitlines()
    assert sorted(seen)[-2:] == ["Say something about train-0, None", "Say something about train-1, None"]
    pids = {line.rpartition(" ")[2] for line in seen if "pid" in line}
    assert len(pids) == 2  # a process each, and the token of the service in none
    assert not any(processes.process_start_time(int(pid)) for pid in pids)
    rows = [json.loads(line) for path in here.rglob("episodes/debug.jsonl") for line in path.read_text().splitlines()]
    assert [row["query"] for row in rows] == [f"Say something about train-{n}, None" for n in (0, 1)]


@pytest.mark.slow
def test_a_dry_run_lists_the_tasks_and_leaves_nothing(here: Path) -> None:
    asked = command("--with", "toy.py->Toy", "--dry-run")
    done = subprocess.run(asked, cwd=here, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "3 to train on, 3 to validate on" in done.stdout
    assert not (here / "launcher_record").exists()


@pytest.mark.slow
def test_a_split_that_is_not_there_says_which_are(here: Path) -> None:
    asked = command("--with", "toy.py->Toy", "astuner.task_reader.env_service.training_split=tranin")
    done = subprocess.run(asked, cwd=here, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 1
    assert "no split is called 'tranin'; there are train, dev" in done.stderr
    assert "(astuner.task_reader.env_service.training_split, command line)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_world_that_raises_in_every_episode_fails_the_run_and_names_its_line(here: Path) -> None:
    asked = command("--with", "toy.py->Toy", "astuner.env_service.params.broken=true", "astuner.rollout.max_retries=0")
    done = subprocess.run(asked, cwd=here, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 1, done.stderr
    line = WORLD.splitlines().index('            raise KeyError("no such key")') + 1
    raised = f"env_error: KeyError: 'no such key' ({here / 'toy.py'}:{line} in step)"
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("astuner: none of 2 episodes could be scored; the first one: environment_failed: the ")
    assert last.endswith(raised)
    (failures,) = here.rglob("failures.jsonl")
    errors = [json.loads(entry)["error"] for entry in failures.read_text().splitlines()]
    assert len(errors) == 2
    assert all(error.endswith(raised) for error in errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [("toy.py->Tpy", "{here}/toy.py has no 'Tpy'; did you mean Toy?"), ("tyo->Toy", "tyo is neither in {here}")],
)
def test_a_mistake_in_the_name_of_a_world_is_one_line(here: Path, name: str, says: str) -> None:
    done = subprocess.run(command("--with", name), cwd=here, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"astuner: the environment service for {name} did not start: ")
    assert says.format(here=here) in line
    assert Path(line.rpartition(" ")[2].rstrip(")")).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", ["starting", "tasks", "episodes"])
def test_stopped_at_any_time_nothing_is_left(here: Path, phase: str, number: signal.Signals) -> None:
    if phase == "episodes":
        asked, until = command("--with", "toy.py->Toy", "astuner.env_service.params={seconds: 600}"), "acting"
    else:
        # a registered name, for which the person has a script of their own
        asked, until = command("--with", "frozen_lake"), {"starting": "begun", "tasks": "asked"}[phase]
        script = f"{sys.executable} stuck.py {'ready' if phase == 'tasks' else ''}"
        (here / ".env").write_text(f"FROZEN_LAKE_PATH={here}\nFROZEN_LAKE_SCRIPT='{script}'\n")
    process = subprocess.Popen(asked, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(lambda: (here / until).exists(), process)
        assert len(left_over(here)) >= (4 if phase == "episodes" else 2)  # the run, the service, a zygote, an instance
        process.send_signal(number)
        said, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_run_that_is_killed_takes_its_service_along(here: Path) -> None:
    asked = command("--with", "toy.py->Toy", "astuner.env_service.params={seconds: 600}")
    process = subprocess.Popen(asked, cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (here / "acting").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline, "it never came so far"
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    # `here` waits until nothing of it runs, and fails where something goes on


@pytest.mark.slow
def test_a_service_that_is_killed_leaves_no_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    service = EnvServer([f"toy={here / 'toy.py'}->Toy"])
    service.start(log=here / "log")
    deadline = time.monotonic() + 120
    while not service.is_ready():
        assert time.monotonic() < deadline, service.said()
        time.sleep(0.05)
    (recorded,) = processes.recorded_processes()
    os.kill(recorded.pid, signal.SIGKILL)
    assert list(here.glob("astuner-env-*"))
    service.stop()
    assert not list(here.glob("astuner-env-*"))


@pytest.mark.slow
def test_an_impatient_person(here: Path) -> None:
    """A second Ctrl-C, while the run is stopping in order, stops it at once, and still leaves nothing."""
    asked = command("--with", "toy.py->Toy", "astuner.env_service.params={seconds: 600}")
    process = subprocess.Popen(asked, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(lambda: (here / "acting").exists(), process)
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        said, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode in (130, -signal.SIGINT), said  # the last one may find the interpreter at its exit
