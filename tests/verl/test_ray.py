"""Ray under a run, for real: alone where it should be, gone when it should be, with the person's files where they are
needed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

from astuner import run_service
from astuner.support.processes import process_start_time
from astuner_ray import service as ray_service
from astuner_ray.cluster import private_folder
from astuner_ray.service import RayClusterService, RayService

EXPERIMENT = """
astuner:
  model: {path: tiny}
  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}}}
  rollout: {workflow: "agent.py->Agent"}
"""
AGENT = """
from pathlib import Path
import helper_beside
WORD = helper_beside.WORD + (Path(__file__).parent / "data.txt").read_text()
class Agent: pass
"""
DRIVER = """
import json, os, signal, sys, threading
from pathlib import Path
import ray
from astuner_ray import cluster as ray_cluster
from astuner.config import load_config
from astuner.plugins.user_code import import_user_code

def listening():
    '''The addresses on which processes of this Ray's listen.'''
    import psutil
    me = psutil.Process()
    below = [me, *me.children(recursive=True)]
    found = set()
    for process in below:
        found |= {c.laddr.ip for c in process.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN}
    return sorted(found), [(p.pid, p.name()) for p in below[1:]]

class Looker:
    def word(self, config, shown):
        config = ray_cluster.relocate(config)
        environ = {name: os.environ.get(name) for name in shown}
        agent = import_user_code("agent.py->Agent", config.base_dir)
        node = ray.get_runtime_context().get_node_id()
        return sys.modules[agent.__module__].WORD, str(config.base_dir), environ, node

def main(file, how):
    config = load_config(file)
    with ray_cluster.connected(
        config, env={"VERL_SWITCH": "1", "HF_TOKEN": "secret"}, logical_gpus=2 if how != "joined" else None,
        log=Path("log"),
    ) as cluster:
        looker = ray.remote(Looker).remote()
        word, base, environ, _ = ray.get(looker.word.remote(config, ["VERL_SWITCH", "ASTUNER_DISABLE_PLUGINS"]))
        hosts, processes = listening()
        folders = [str(p) for p in Path("/tmp").glob(f"astuner-ray-{os.getpid()}-*")]
        print(json.dumps(dict(
            cluster=str(cluster), address=cluster.address, own=cluster.own, gpus=cluster.gpus, nodes=len(ray.nodes()),
            word=word, base=base, environ=environ, hosts=hosts, processes=processes, folders=folders,
            runtime_env=str(ray.get_runtime_context().runtime_env),
        )), flush=True)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    assert not ray.is_initialized()

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture
def experiment(tmp_path):
    folder = tmp_path / "my_experiment"
    folder.mkdir()
    (folder / "experiment.yaml").write_text(EXPERIMENT)
    (folder / "agent.py").write_text(AGENT)
    (folder / "helper_beside.py").write_text("WORD = 'hello '")
    (folder / "data.txt").write_text("you")
    (folder / "tasks.jsonl").write_text('{"question": "?"}\n')
    (tmp_path / "driver.py").write_text(DRIVER)
    return folder / "experiment.yaml"


def drive(experiment, how, **variables):
    """Run `DRIVER` in a process of its own: (its exit status, what it saw)."""
    environ = {n: v for n, v in os.environ.items() if not n.startswith("RAY_")} | variables
    command = [sys.executable, "driver.py", str(experiment), how]
    done = subprocess.run(
        command, cwd=experiment.parents[1], env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-4000:]
    return done.returncode, json.loads(lines[-1])


def all_gone(pids, within=30.0):
    deadline = time.monotonic() + within
    while left := [pid for pid in pids if process_start_time(pid) is not None]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.2)
    return []


@pytest.fixture
def service(tmp_path, monkeypatch):
    """A running `RayService` with its variables set, for the length of a test."""
    for name in [n for n in os.environ if n.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))  # where Ray says which cluster runs here
    made = RayService()
    with run_service(made, "ray", "", tmp_path / "ray.log"):
        yield made


def test_a_run_has_a_ray_of_its_own_although_another_one_runs_here(experiment, service):
    code, saw = drive(experiment, "private", ASTUNER_DISABLE_PLUGINS="nobody")
    assert code == 0
    assert saw["own"] is True
    assert saw["address"] != service.address()
    assert (saw["gpus"], saw["nodes"]) == (2, 1)
    assert set(saw["hosts"]) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert saw["hosts"]
    assert saw["word"] == "hello you"
    assert saw["base"] == str(experiment.parent)
    assert saw["environ"] == {"VERL_SWITCH": "1", "ASTUNER_DISABLE_PLUGINS": "nobody"}
    assert "secret" not in saw["runtime_env"]
    assert len(saw["folders"]) == 1
    assert not Path(saw["folders"][0]).exists()
    assert all_gone([pid for pid, _ in saw["processes"]]) == []

    code, saw = drive(experiment, "joined", **service.environ())
    assert code == 0
    assert (saw["own"], saw["address"], saw["word"]) == (False, service.address(), "hello you")
    assert service.is_ready(), "a guest ends nothing"


PLACED = """
import sys
from pathlib import Path
import ray
from astuner.config import load_config
from astuner.contracts.errors import RunError
from astuner_ray.cluster import connected
from verl.single_controller.ray.base import ResourcePoolManager

class Queue:
    def ready(self): return True

def main(file, gpus, counted):  # what VERL does before its first step, with its own pool
    config = load_config(file)
    try:
        with connected(config, gpus=gpus, cpus=counted, logical_gpus=gpus, log=Path("log")):
            queue = [ray.remote(num_cpus=1)(Queue).remote() for _ in range(9)]
            ray.get([one.ready.remote() for one in queue])
            pools = ResourcePoolManager(resource_pool_spec={"all": [gpus]}, mapping={})
            pools.create_resource_pool()
            pools.resource_pool_dict["all"].get_placement_groups()
            print("placed", flush=True)
    except RunError as e:
        print("refused:", e, flush=True)

if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("counted", "expected"),
    [(34, "placed"), (30, "refused: Ray could not place the run's reservation within 30 s (STRICT_PACK: 1 GPU + 3")],
)
def test_what_verl_reserves_is_placed_or_refused(experiment, counted, expected):
    """Of a machine with eight GPUs, as Ray counts them; fewer CPUs, and its queue leaves no room for them."""
    folder = experiment.parents[1]
    (folder / "placed.py").write_text(PLACED)
    environ = {n: v for n, v in os.environ.items() if not n.startswith("RAY_")}
    command = [sys.executable, "placed.py", str(experiment), "8", str(counted)]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert any(line.startswith(expected) for line in done.stdout.splitlines()), done.stdout + done.stderr[-3000:]


def test_nothing_is_left_of_a_run_that_is_killed(experiment):
    code, saw = drive(experiment, "killed")
    assert code == -signal.SIGKILL
    names = [name for _, name in saw["processes"]]
    assert {"raylet", "gcs_server"} <= set(names)
    # Ray's two agents try for a minute to report the raylet's death before they end
    agents = ("ray::Dashboard", "ray::RuntimeEnv")
    assert all_gone([pid for pid, name in saw["processes"] if not name.startswith(agents)]) == []
    assert Path(saw["folders"][0]).exists()
    drive(experiment, "private")
    assert not Path(saw["folders"][0]).exists(), "the next one clears up"


def test_a_service_that_was_started_is_gone_afterwards_also_when_its_run_is_killed(tmp_path, service):
    import psutil

    node = psutil.Process(service._node._process.pid)
    below = [node.pid, *(p.pid for p in node.children(recursive=True))]
    assert len(below) > 3
    service.stop()
    assert all_gone(below, within=5) == []
    assert not service._folder.exists()

    program = """
import os, signal, sys, psutil
from pathlib import Path
from astuner_ray.service import RayService
from astuner import run_service
made = RayService()
with run_service(made, "ray", "", Path(sys.argv[1])):
    node = psutil.Process(made._node._process.pid)
    print(made._folder, node.pid, *(p.pid for p in node.children(recursive=True)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "ray.log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    folder, *pids = done.stdout.split()
    assert done.returncode == -signal.SIGKILL
    assert all_gone([int(pid) for pid in pids]) == []
    private_folder().rmdir()
    assert not Path(folder).exists(), "the next one clears up"


def test_a_cluster_that_runs_already_is_joined_and_left_running(tmp_path, monkeypatch, service):
    monkeypatch.setenv("RAY_ADDRESS", service.address())
    for name, value in service.environ().items():
        monkeypatch.setenv(name, value)
    guest = RayService()
    with run_service(guest, "ray", "", tmp_path / "guest.log"):
        assert guest.environ()["RAY_ADDRESS"] == service.address()
    assert service.is_ready()


def test_the_experiments_files_are_found_on_every_node(experiment, tmp_path, monkeypatch):
    """Two nodes; the experiment's folder is moved away from under the one that is not the run's."""
    for name in [n for n in os.environ if n.startswith("RAY_")]:
        monkeypatch.delenv(name)
    (experiment.parent / "launcher_record").mkdir()
    (experiment.parent / "launcher_record" / "huge").write_bytes(b"0" * 1000)
    program = """
import json, sys, shutil
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import ray
from ray.cluster_utils import Cluster
import os
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
from driver import Looker
from astuner_ray import cluster as ray_cluster
from astuner.config import load_config
two = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
two.add_node(num_cpus=1)
os.environ["RAY_ADDRESS"] = two.address
config = load_config(sys.argv[1])
with ray_cluster.connected(config, log=Path("log")) as cluster:
    home = ray.get_runtime_context().get_node_id()
    (away,) = [n["NodeID"] for n in ray.nodes() if n["NodeID"] != home]
    start = lambda node: ray.remote(Looker).options(scheduling_strategy=On(node, soft=False), num_cpus=1).remote()
    word, base, _, node = ray.get(start(home).word.remote(config, []))
    assert (word, base, node) == ("hello you", str(config.base_dir), home), (word, base, node)
    shutil.move(config.base_dir, sys.argv[3])
    word, base, _, node = ray.get(start(away).word.remote(config, []))
    assert node == away
    print(json.dumps([cluster.nodes, word, base, sorted(p.name for p in Path(base).iterdir())]))
two.shutdown()
"""
    command = [sys.executable, "-c", program, str(experiment), str(tmp_path), str(tmp_path / "elsewhere")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    nodes, word, base, there = json.loads(done.stdout.strip().splitlines()[-1])
    assert (nodes, word) == (2, "hello you")
    assert base != str(experiment.parent)
    assert Path(base).name == "my_experiment"
    assert set(there) - {"__pycache__"} == {
        "agent.py",
        "data.txt",
        "experiment.yaml",
        "helper_beside.py",
        "tasks.jsonl",
    }


def test_a_machine_that_is_not_the_head_lends_itself_until_the_head_ends(tmp_path, monkeypatch):
    """Both on this machine, the second of which is told that the head's address is another's."""
    for name in [n for n in os.environ if n.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_TMPDIR", f"/tmp/r{os.getpid()}")  # short enough for sockets
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # a node notices soon that its head is gone
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("192.0.2.1", 9))  # sends nothing: it only chooses this machine's address
        host = s.getsockname()[0]
    with socket.socket() as s:
        s.bind((host, 0))
        port = s.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    head, lent = RayClusterService(), RayClusterService()
    pids, log = [], tmp_path / "lent.log"
    log.touch()

    def end_the_head_once_it_is_joined():
        while "Ray runtime started" not in log.read_text():
            time.sleep(0.2)
        pids.append(lent._node._process.pid)
        head.stop()

    try:
        with run_service(head, "the head", "", tmp_path / "head.log"):
            assert head.environ() == {"RAY_ADDRESS": f"{host}:{port}"}
            monkeypatch.setattr(ray_service, "is_here", lambda host: False)
            ending = threading.Thread(target=end_the_head_once_it_is_joined, daemon=True)
            ending.start()
            with pytest.raises(SystemExit) as ended, run_service(lent, "the other", "", log):
                pytest.fail("a machine that lends itself runs nothing of its own")
        assert ended.value.code == 0
        ending.join(30)
        assert pids
        assert all_gone(pids) == []
    finally:
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
