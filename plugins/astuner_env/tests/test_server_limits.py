"""What a stranger's environment may take, and what it can see of who started it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from astuner import Task
from astuner.contracts.errors import EnvironmentFailed
from astuner_env.env_service import EnvClient, RemoteEnvironment
from astuner_env.manager.capacity import Share, excesses
from tests.table import table

from ._service import TOYS, Live, Program, eventually, is_alive, served

PLANTED = {"OPENAI_API_KEY": "planted-openai-key", "WANDB_API_KEY": "planted-wandb-key", "DB_URL": "planted-db"}
TOKEN = "planted-token-of-the-service"

PROBE = '''
    def describe(self):
        """What of every process that it did not start can be read, and what is in its ancestors' variables."""
        def read(pid, what):
            with contextlib.suppress(OSError):
                return Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace")
        def folder(pid):
            with contextlib.suppress(OSError):
                return os.readlink(f"/proc/{pid}/cwd")
        def memory(pid):
            with contextlib.suppress(OSError):
                os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))
                return True
        ancestors, pid = [], os.getppid()
        while pid > 0:
            ancestors.append(pid)
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        everyone = [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
        os.replace(Path("a").touch() or "a", Path("b").mkdir() or "b/c")  # files stay as they are
        return {
            "ancestors": ancestors,
            "found": [read(pid, "environ") or "" for pid in everyone],
            "open": [pid for pid in everyone if folder(pid) or memory(pid)],
            "own": dict(os.environ),
        }
'''


@pytest.fixture
def probe(tmp_path: Path, needed: Callable[[str], None]) -> Path:
    """A world that looks around."""
    needed("confinement")
    path = tmp_path / "probe.py"
    text = TOYS.read_text().replace(
        '    def describe(self) -> Mapping[str, Any]:\n        return {"goal": GOAL}\n', PROBE
    )
    assert text != TOYS.read_text()
    path.write_text(text)
    return path


def seen(answer: object) -> str:
    return json.dumps(answer)


@table("said", ["eat 220 and wait", "eat 220 in a daemon"])
def test_what_takes_more_memory_than_it_may_is_ended_and_the_others_go_on(toys, tmp_path, said):
    it = served("counter", f"{toys}:Counter", max_memory_mb=150)
    with Live([it], parent=tmp_path) as live:
        live.create("a")
        live.create("b")
        pid = live.pid("a")
        answer = live.step("a", said)
        if answer.status == 200:
            answer = eventually(lambda: (a := live.get("/v1/instances/a")).status != 200 and a)
        assert (answer.status, answer.code, answer.detail["reason"]) == (410, "instance_lost", "memory")
        assert "MB of memory; the limit is 150 (max_memory_mb)" in answer.detail["message"]
        eventually(lambda: not is_alive(pid))
        assert live.step("b").data["info"]["count"] >= 1
        assert live.metric("astuner_env_lost_total", environment="counter", reason="memory") == 1
        assert live.create("a").data["state"], "its slot is free"


def test_what_is_far_too_much_is_refused_at_once(toys, tmp_path):
    it = served("counter", f"{toys}:Counter", max_memory_mb=150)
    with Live([it], parent=tmp_path) as live:
        live.create("a")
        answer = live.step("a", "eat 3000")
        assert (answer.status, answer.code) == (500, "env_error")
        assert "MemoryError: (the limit per process is twice max_memory_mb)" in answer.detail["message"]


def test_sixty_children_end_with_the_instance_that_started_them(toys, tmp_path):
    marker = tmp_path / "children"
    it = served("counter", f"{toys}:Counter", max_processes=8)
    with Live([it], parent=tmp_path) as live:
        live.create("a")
        live.create("b")
        answer = live.step("a", f"fork 60 {marker}")
        if answer.status == 200:
            answer = eventually(lambda: (a := live.get("/v1/instances/a")).status != 200 and a)
        assert (answer.status, answer.detail["reason"]) == (410, "processes")
        assert "the limit is 8 (max_processes)" in answer.detail["message"]
        children = [int(pid) for pid in marker.read_text().split()]
        assert len(children) > 8
        eventually(lambda: not any(map(is_alive, children)))
        assert live.step("b").data["info"]["count"] == 1


def test_an_episode_that_ends_at_a_limit_says_so(toys, tmp_path):
    it = served("counter", f"{toys}:Counter", max_processes=8)
    with Live([it], parent=tmp_path) as live:
        world = RemoteEnvironment(client=EnvClient(live.service.url), env_type="counter")
        world.reset(Task(task_id="train-0"))
        with pytest.raises(
            EnvironmentFailed, match=r"410 instance_lost: .* limit is 8 \(max_processes\).*\(processes\)"
        ):
            world.step({"role": "assistant", "content": f"fork 60 {tmp_path}/children and wait"})


def test_a_daemon_that_an_instance_lets_go_is_ended(toys, tmp_path):
    with Live([served("counter", f"{toys}:Counter")], parent=tmp_path) as live:
        live.create("a")
        assert live.step("a", f"let go {tmp_path}/children").status == 200
        pid = int(eventually(lambda: (tmp_path / "children").exists() and (tmp_path / "children").read_text().strip()))
        eventually(lambda: not is_alive(pid))
        assert live.step("a").status == 200


def test_somebody_who_tidies_temporary_files_up_ends_no_service(toys, tmp_path):
    with Live([served("counter", f"{toys}:Counter")], parent=tmp_path) as live:
        for folder in tmp_path.glob("astuner-env-*"):
            shutil.rmtree(folder)
        assert live.create("a").status == 200
        assert live.step("a").status == 200


def test_the_process_that_lists_the_tasks_has_limits_too(toys, tmp_path):
    world = tmp_path / "world.py"
    world.write_text(toys.read_text().replace('size = params.get("size", 3)', 'cls._misbehave("eat 220 and wait")'))
    with Live([served("counter", f"{world}:Counter", max_memory_mb=150)], parent=tmp_path) as live:
        answer = live.post("/get_env_profile", env_type="counter")
        assert (answer.status, answer.code) == (500, "env_error")
        assert "lists the tasks was ended because it used" in answer.detail["message"]


def test_what_is_shared_with_the_zygote_does_not_count():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        eventually(lambda: excesses({"it": Share(process.pid, None, 0, 9)}))
        ((kind, how),) = excesses({"it": Share(process.pid, None, 0, 9)}).values()
        assert (kind, how.endswith("limit is 0 (max_memory_mb)")) == ("memory", True)
        assert excesses({"it": Share(process.pid, None, 4096, 9)}) == {}
        assert excesses({"it": Share(process.pid, process.pid, 1, 9)}) == {}, "all that it has, it shares with itself"
        assert [kind for kind, _ in excesses({"it": Share(process.pid, None, 4096, 0)}).values()] == ["processes"]
    assert excesses({"gone": Share(process.pid, None, 0, 0)}) == {}


@table(
    ("more", "most"),
    [({}, 1024), ({"memory_mb": 300}, 1200), ({"memory_mb": 300, "max_memory_mb": 400}, 400)],
)
def test_the_default_limit(more, most):
    assert served("w", "a:B", **more).max_memory_mb == most


def test_a_world_sees_no_key_of_its_service_nor_of_who_started_that(probe, tmp_path):
    with Program(f"{probe}->Counter", "--port", "0", folder=tmp_path, token=TOKEN, environ=PLANTED) as program:
        assert b"planted-openai-key" in Path(f"/proc/{program.process.pid}/environ").read_bytes(), (
            "or nothing is tested"
        )
        program.create("a")
        found = program.post("/get_info", instance_id="a").data
    assert program.process.pid in found["ancestors"]
    assert not any(found["found"])
    assert found["open"] == []
    assert "planted" not in seen(found)


RUN = """
import json, os, sys, time
from pathlib import Path
from astuner import Task
from astuner_env.env_service import EnvClient
from astuner_env.env_service.server import EnvServer
server = EnvServer([sys.argv[1] + "->Counter"])
server.start(log=Path("log"))
try:
    while not server.is_ready():
        time.sleep(0.05)
    token = server.environ()["ASTUNER_ENV_TOKEN"]
    os.environ.update(server.environ())
    client = EnvClient(server.address(), token=token)
    client.create("counter", Task(task_id="train-0"), "a", {})
    service = server._process.pid
    print(json.dumps({
        "service": Path(f"/proc/{service}/environ").read_text(),
        "arguments": Path(f"/proc/{service}/cmdline").read_text(),
        "token": token, "pids": [os.getpid(), service], "probe": client.describe("a"),
    }))
finally:
    server.stop()
"""


def test_the_service_beside_a_run_gets_no_key_of_it(probe, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(probe)],
        cwd=tmp_path,
        env={**os.environ, **PLANTED, "ASTUNER_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "PATH=" in found["service"], "or nothing is tested"
    for text in (found["service"], found["arguments"], seen(found["probe"])):
        assert "planted" not in text
        assert found["token"] not in text
    assert set(found["pids"]) <= set(found["probe"]["ancestors"])
    assert not any(found["probe"]["found"])
