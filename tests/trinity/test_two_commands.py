"""`trinity.mode: explore` and `train`: one run as two commands on one Ray cluster, here on this machine's loopback."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from astuner.config import load_config
from astuner.contracts.errors import RunError
from astuner_ray.cluster import ADDRESS_VARIABLE, connected, object_store_bytes, private_folder, private_variables
from astuner_ray.node import RayNode, answers
from astuner_trinity.lending import compare, fingerprints
from astuner_trinity.stages import gpus_here

from ..fsdp.runs import MATH_AGENT, PLAIN, running

pytestmark = pytest.mark.timeout(1800)

SMALL = (
    *PLAIN,
    "astuner.data.train_batch_size=2",
    "astuner.rollout.num_repeat=4",
    "astuner.trainer_common.total_steps=3",
    "astuner.trainer_common.test_freq=3",
    "astuner.trainer_common.optim.lr=8.0e-3",
    "trinity.synchronizer.sync_timeout=500",
)
EXPLORE, TRAIN = "trinity.mode=explore", "trinity.mode=train"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray head that no command of a run started; on loopback, with a token, and two GPUs on paper."""
    folder, variables = private_folder(), private_variables()
    arguments = [
        *("--head", "--disable-usage-stats", "--include-dashboard=false", "--num-cpus=20", "--num-gpus=2"),
        *("--port=0", f"--ray-client-server-port={_free_port()}", "--dashboard-agent-listen-port=0"),
        *("--min-worker-port=0", "--max-worker-port=0"),
        *(f"--object-store-memory={object_store_bytes()}", f"--temp-dir={folder}"),
    ]
    with contextlib.ExitStack() as stack:
        node = RayNode(arguments, what="the head", log=tmp_path / "head.log", variables=variables)
        stack.callback(node.stop)
        address = _started(node, folder / "ray_current_cluster")
        while not answers(address, variables):
            node.check()
        for name, value in {**variables, ADDRESS_VARIABLE: address}.items():
            monkeypatch.setenv(name, value)
        yield address


@pytest.mark.engines
def test_one_command_rolls_out_and_the_other_lends_it_a_trainer(cluster: str, tmp_path: Path, tiny_model: Path) -> None:
    import torch
    from safetensors.torch import load_file

    folder = tmp_path / "run"  # both print into the file beside it
    with running("trinity", MATH_AGENT, folder, TRAIN, *SMALL) as lender:
        lender.until(lambda: "waiting for the command with trinity.mode=explore" in lender.said())
        assert not folder.exists(), "the run folder is the other command's"
        with running("trinity", MATH_AGENT, folder, "--no-resume", EXPLORE, *SMALL) as run:
            assert run.ends() == 0, run.said()
        assert lender.ends() == 0, lender.said()
    assert "the trainer is on" in run.said()
    assert "3 steps are trained" in lender.said()
    assert sorted(run.steps()) == [1, 2, 3]
    assert set(run.validations()) == {0, 3}
    assert {row["staleness/max"] for row in run.steps().values()} == {0}, "the engines had the lent trainer's weights"
    assert max(row["kl/mismatch_max"] for row in run.steps().values()) < 1e-4
    (trained,) = (folder / "checkpoints").glob("step-*/model.safetensors")
    before, after = load_file(tiny_model / "model.safetensors"), load_file(trained)
    assert any(not torch.equal(before[name].float(), after[name].float()) for name in before), "the weights moved"


@pytest.mark.engines
def test_a_trainer_that_is_asked_to_stop_leaves_a_run_that_can_be_continued(cluster: str, tmp_path: Path) -> None:
    more = (*SMALL, *(f"astuner.trainer_common.{key}" for key in ("total_steps=200", "val_before_train=false")))
    folder = tmp_path / "run"
    with running("trinity", MATH_AGENT, folder, "--no-resume", EXPLORE, *more) as run:
        run.until(lambda: "waiting for the command with trinity.mode=train" in run.said())
        with running("trinity", MATH_AGENT, folder, TRAIN, *more) as lender:
            run.until(lambda: max(run.steps(), default=0) >= 2)
            assert lender.interrupted() == 130, lender.said()
        assert run.ends() == 1, run.said()
    assert "the trainer was withdrawn" in run.said()
    assert run.resumable_at() == max(run.steps())


def test_a_lent_trainer_asks_ray_for_gpus_of_its_own_machine(cluster: str, tmp_path: Path) -> None:
    import ray

    class Trainer:
        def asked(self) -> list[dict[str, float]]:
            from trinity.trainer.verl import trainer

            with gpus_here():
                pools = trainer.ResourcePoolManager(resource_pool_spec={"pool": [2]}, mapping={})
                pools.create_resource_pool()
            (group,) = pools.resource_pool_dict["pool"].get_placement_groups()  # returns when Ray has found them
            return list(group.bundle_specs)

    config = load_config(MATH_AGENT, backbone="trinity")
    with connected(config, log=tmp_path / "log", set_up="astuner_trinity_cpu.hooks.setup"):
        trainer = ray.remote(Trainer).options(num_cpus=0).remote()
        bundles = ray.get(trainer.asked.remote(), timeout=300)
    assert [(b["GPU"], b["node:127.0.0.1"]) for b in bundles] == [(1, 1e-4)] * 2


def test_a_lender_gives_up_and_says_what_it_waited_for(cluster: str, tmp_path: Path) -> None:
    with running(
        "trinity", MATH_AGENT, tmp_path / "run", TRAIN, *SMALL, "trinity.synchronizer.sync_timeout=2"
    ) as lender:
        assert lender.ends() == 1, lender.said()
    assert "trinity.synchronizer.sync_timeout" in lender.said()
    assert f"trinity.mode=explore and RAY_ADDRESS={cluster}" in lender.said()


@pytest.mark.parametrize("mode", [EXPLORE, TRAIN])
def test_a_private_ray_is_refused(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    with running("trinity", MATH_AGENT, tmp_path / "run", mode, *SMALL) as alone:
        assert alone.ends() == 1, alone.said()
    assert "ray start --head" in alone.said()


def test_what_two_commands_tell_trinity_is_compared_and_secrets_are_not_shown() -> None:
    theirs = fingerprints({"model": {"path": "a"}, "monitor": {"api_key": "hidden"}})
    assert "hidden" not in str(theirs)
    compare(theirs, theirs)
    for mine in ({"model": {"path": "b"}, "monitor": {"api_key": "hidden"}}, {"monitor": {"api_key": "hidden"}}):
        with pytest.raises(RunError, match=r"Trinity's model\.path differs"):
            compare(fingerprints(mine), theirs)


def _started(node: RayNode, says: Path, tries: int = 4) -> str:
    """The address that it writes; started over where Ray does not keep its own 30 s, as on a busy machine."""
    node.start()
    while not (text := says.read_text().strip() if says.is_file() else ""):
        try:
            node.check()
        except RunError:
            if not tries:
                raise
            return _started(node, says, tries - 1)
        time.sleep(0.2)
    return text


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
