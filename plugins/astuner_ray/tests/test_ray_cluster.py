"""What of Ray's part can be seen without Ray: what travels, what is told to whom, and what a person reads."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from astuner import load_config
from astuner.contracts.errors import ConfigError, MissingDependency, RunError
from astuner.testing import fake_config
from astuner_ray import cluster as ray_cluster
from astuner_ray import service as ray_service
from astuner_ray import worker as ray_worker
from tests.table import table

EXPERIMENT = """
astuner:
  model: {path: tiny}
  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}}}
  rollout: {workflow: "agent.py->Agent"}
  endpoint: {token_env: MY_ENDPOINT_TOKEN}
  agents:
    helper: {model: external, name: gpt, base_url: "https://example.invalid/v1", api_key_env: MY_API_KEY}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my_experiment"
    (folder / "launcher_record" / "run").mkdir(parents=True)
    (folder / "deep" / "__pycache__").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").touch()
    (folder / "launcher_record" / "run" / "weights").touch()
    (folder / "deep" / "helper.py").touch()
    (folder / "deep" / "__pycache__" / "helper.pyc").touch()
    (folder / "nowhere").symlink_to("not/there")
    (folder / "experiment.yaml").write_text(EXPERIMENT)
    return load_config(folder / "experiment.yaml")


def test_the_service_takes_no_options(tmp_path):
    with pytest.raises(ConfigError, match=r"services\.ray: the service 'ray' takes no options"):
        fake_config(tmp_path, "  services: {ray: {port: 1}}")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_it_is_said_what_to_install(config, tmp_path):
    with (
        pytest.raises(MissingDependency, match=r"pip install astuner-verl, .*pip install astuner-trinity"),
        ray_cluster.connected(config, log=tmp_path / "log"),
    ):
        pytest.fail("there is nothing to be connected to")


def test_workers_get_the_variables_that_the_config_names(config, monkeypatch):
    given = {
        "MY_API_KEY": "1", "MY_ENDPOINT_TOKEN": "2", "HF_TOKEN": "3", "ASTUNER_DISABLE_PLUGINS": "4",
        "https_proxy": "5", "NO_PROXY": "6", "SOMEBODY_ELSES_KEY": "7", "SHELF_LIFE": "8", ray_worker.VARIABLE: "9",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = ray_cluster.worker_environ(config)
    assert {name: found.get(name) for name in given} == given | {
        "SOMEBODY_ELSES_KEY": None,
        "SHELF_LIFE": None,
        ray_worker.VARIABLE: None,
    }


def test_a_worker_can_import_what_the_run_can_and_nothing_of_a_persons_shadows_a_package(config, tmp_path, monkeypatch):
    (config.base_dir / "json.py").write_text("raise SystemExit('shadowed')")
    (config.base_dir / "mine_alone.py").write_text("WORD = 'mine'")
    added = tmp_path / "added"
    added.mkdir()
    (added / "theirs_alone.py").write_text("WORD = 'theirs'")
    monkeypatch.syspath_prepend(str(added))
    told = ray_worker.runtime_env(config, {"VERL_PLATFORM": "cpu"})
    assert "working_dir" not in told
    program = (
        "import importlib, sys; from astuner_ray import worker as ray_worker\n"
        f"assert {told['worker_process_setup_hook']!r} == 'astuner_ray.worker.set_up'\n"
        "ray_worker.set_up(); import json, mine_alone, theirs_alone; print(mine_alone.WORD, theirs_alone.WORD)"
    )
    environ = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"} | told["env_vars"]
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout == "mine theirs\n", done.stderr


def test_the_experiments_folder_travels_under_its_own_name_without_what_stays_behind(config, tmp_path):
    with ray_worker.files_for_other_nodes(config) as files:
        told = ray_worker.runtime_env(config, {}, files, home="node")
        assert told["working_dir"] == str(files)
        inside = json.loads(told["env_vars"][ray_worker.VARIABLE])
        assert (inside["home"], inside["folder"]) == ("node", "my_experiment")
        found = sorted(str(path.relative_to(files)) for path in files.rglob("*") if path.is_file())
        assert found == ["my_experiment/deep/helper.py", "my_experiment/experiment.yaml"]
    assert not files.exists()


def test_too_large_a_folder_does_not_travel(config, monkeypatch):
    monkeypatch.setattr(ray_worker, "LIMIT", 2**20)
    (config.base_dir / "deep" / "weights.bin").write_bytes(b"0" * (2**20 + 1))
    with (
        pytest.raises(RunError, match=r"larger than 1 MiB, .*; largest files: deep/weights\.bin \(1 MiB\)"),
        ray_worker.files_for_other_nodes(config),
    ):
        pytest.fail("it must not travel")


def test_outside_of_a_worker_nothing_is_moved(config):
    assert ray_cluster.relocate(config) is config


def test_rays_folder_is_short_enough_for_a_socket_and_the_next_one_clears_up(tmp_path, monkeypatch):
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(ray_cluster.tempfile, "gettempdir", lambda: str(long))
    folder = ray_cluster.private_folder()
    assert len(str(folder)) <= 40
    folder.rmdir()

    short = Path(f"/tmp/r{os.getpid()}")
    short.mkdir()
    monkeypatch.setattr(ray_cluster.tempfile, "gettempdir", lambda: str(short))
    over = subprocess.Popen([sys.executable, "-c", ""])
    over.wait()
    kept = ray_cluster.private_folder()
    left, theirs = short / f"astuner-ray-{over.pid}-abc", short / "astuner-ray-notes"
    left.mkdir()
    theirs.mkdir()
    again = ray_cluster.private_folder()
    assert sorted(short.iterdir()) == sorted([kept, theirs, again])
    for path in (kept, theirs, again, short):
        path.rmdir()


def test_the_object_store_leaves_memory_to_others():
    assert 2**28 <= ray_cluster.object_store_bytes() <= 16 * 2**30


@table(
    ("given", "has"),
    [
        ({}, {"RAY_AUTH_MODE": "token"}),
        ({"RAY_AUTH_TOKEN": "mine"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "mine"}),
        ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": None, "RAY_AUTH_TOKEN": None}),
        ({"RAY_AUTH_TOKEN_PATH": "/a/file"}, {"RAY_AUTH_MODE": None, "RAY_AUTH_TOKEN": None}),
    ],
)
def test_a_private_ray_has_a_token_unless_the_person_says_otherwise(monkeypatch, given, has):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = ray_cluster.private_variables()
    assert {name: found.get(name) for name in has} == has
    if not given:
        assert len(found["RAY_AUTH_TOKEN"]) == 64
        assert found == ray_cluster.private_variables()


@table(("host", "port"), [("", "6379"), ("10.0.0.1", ""), ("10.0.0.1", "x"), ("10.0.0.1", "80"), ("10.0.0.1", "70000")])
def test_a_cluster_of_several_machines_needs_to_know_its_head(monkeypatch, host, port):
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=10\.0\.0\.1 MASTER_PORT=6379"):
        ray_service.RayClusterService().start()


@table(("host", "here"), [("127.0.0.1", True), ("192.0.2.77", False), ("no.such.host.invalid", False)])
def test_whether_an_address_is_this_machines(host, here):
    assert ray_service.is_here(host) is here
    assert ray_service.is_here(ray_service.socket.gethostname())


def test_an_address_where_nothing_answers_is_an_error_before_anything_is_started(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(RunError, match="unset RAY_ADDRESS"):
        ray_service.RayService().start()


def test_a_ray_that_is_too_slow_to_start_is_an_error_that_says_what_to_do(tmp_path):
    """Ray raises a plain `Exception` then (``ray/_private/node.py``)."""
    with (
        pytest.raises(
            RunError, match=r"could not be started: .*timed out during startup; .*run the command again; see .*log"
        ),
        ray_cluster._explained("Ray could not be started", tmp_path / "run.log", ray_cluster._SLOW),
    ):
        raise Exception("The current node timed out during startup")


def test_the_seeds_spelling_means_these_services():
    from astuner.cli import normalise
    from astuner.plugins.loader import load_plugins
    from astuner.plugins.registry import find_provider

    words = normalise(["--conf", "x.yaml", "--with-ray", "--with-ray-cluster"])
    assert words == ["run", "x.yaml", "--with", "ray", "--with", "ray-cluster"]
    found = [find_provider(load_plugins(), "service", name).target for name in (words[3], words[5])]
    assert found == ["astuner_ray.service:RayService", "astuner_ray.service:RayClusterService"]


def test_a_cluster_with_too_few_says_what_to_type():
    cluster = ray_cluster.Cluster(address="host:6379", nodes=2, cpus=32, gpus=16, own=False)
    cluster.require(gpus=16, cpus=32)
    with pytest.raises(RunError, match=r"needs 17 GPUs, .*Ray cluster at host:6379: 2 nodes, .*n_gpus_per_node"):
        cluster.require(gpus=17, cpus=32)
    with pytest.raises(RunError, match=r"needs 58 CPUs, .* 32 CPUs, .*ray start --head --num-cpus=58"):
        cluster.require(gpus=16, cpus=58)


def test_what_others_hold_is_waited_for_and_then_refused(monkeypatch):
    monkeypatch.setattr(ray_cluster.time, "sleep", lambda seconds: None)
    cluster = ray_cluster.Cluster(address="host:6379", nodes=1, cpus=32, gpus=8, own=False)
    free = iter([{"CPU": 32.0}, {"CPU": 32.0, "GPU": 8.0}])
    given_back = SimpleNamespace(available_resources=lambda: next(free))
    ray_cluster._wait_until_free(given_back, cluster, gpus=8, cpus=32)
    assert list(free) == []
    monkeypatch.setattr(ray_cluster, "FREE_TIMEOUT", -1.0)
    held = SimpleNamespace(available_resources=lambda: {"CPU": 3.0, "GPU": 1.0})
    with pytest.raises(RunError, match=r"1 GPUs and 3 CPUs are free .*ray status"):
        ray_cluster._wait_until_free(held, cluster, gpus=8, cpus=32)
