"""A run of VERL on a cluster of several machines, some of which lack files, join late, or lose their power."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ..fsdp.runs import ROOT, Run, running
from .cluster import Cluster, cluster
from .machines import wait_until, why_not

pytestmark = pytest.mark.timeout(1500)

EXAMPLE = ROOT / "examples" / "frozen_lake"
TOKEN = "0123456789abcdef"
SEPARATE = (
    "verl.trainer.v1.trainer_mode=separate_async",
    "verl.actor_rollout_ref.rollout.nnodes=1",
    "verl.actor_rollout_ref.rollout.n_gpus_per_node=1",
    "verl.actor_rollout_ref.hybrid_engine=false",
    "verl.actor_rollout_ref.rollout.agent.num_workers=3",
    "astuner.trainer_common.n_gpus_per_node=1",
    "astuner.data.train_batch_size=2",
    "astuner.data.max_validation_tasks=4",
    "astuner.rollout.num_repeat=4",
    "astuner.trainer_common.val_before_train=false",
    "astuner.trainer_common.test_freq=1000",
    "astuner.trainer_common.save_freq=3",
    "astuner.trainer_common.total_steps=500",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an experiment in ``own``, which only the first machine has, and with a disk, ``shared``."""
    place = tmp_path_factory.mktemp("nodes")
    shutil.copytree(EXAMPLE, place / "own" / "frozen_lake")
    (place / "shared").mkdir()
    return place


@pytest.fixture(scope="module")
def three(place: Path, cpu_env: Mapping[str, str]) -> Iterator[Cluster]:
    """A head without a GPU, and two machines with one each."""
    if reason := why_not():
        pytest.skip(reason)
    env = {**os.environ, **cpu_env, "ASTUNER_ENV_TOKEN": TOKEN}
    with cluster(env, [place / "own"], place / "ray.log") as made:
        made.add(gpus=1)
        made.add(gpus=1)
        yield made


@pytest.fixture(scope="module")
def lakes(three: Cluster, place: Path) -> Iterator[str]:
    """The address of an environment service on the head's machine."""
    log = place / "lakes.log"
    serve = [sys.executable, "-m", "astuner_env", "serve", "frozen_lake", "--host", three.head.address]
    with three.head.running(serve, three.env, log):
        wait_until(lambda: "Starting server on" in log.read_text(), 60, f"the environment service (see {log})")
        yield f"http://{three.head.address}:8080"


@contextlib.contextmanager
def training(three: Cluster, folder: Path, lakes: str, *more: str) -> Iterator[Run]:
    """The example on the cluster, started on its head."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**three.env, "RAY_ADDRESS": three.address}.items():
            patch.setenv(name, value)
        file = folder.parents[1] / "own" / "frozen_lake" / "frozen_lake.yaml"
        told = (*SEPARATE, f"astuner.env_service.url={lakes}", *more)
        with running("verl", file, folder, *told, on=three.head.command) as run:
            yield run


def test_a_model_and_a_run_folder_that_others_do_not_see_are_refused_by_name(
    three: Cluster, place: Path, lakes: str
) -> None:
    own = place / "own"
    with training(three, own / "run", lakes, "--no-resume") as run:
        assert run.ends() == 1, run.said()
    said = run.said().strip().splitlines()[-1]
    assert said.startswith("astuner: not every machine of the cluster has what the run needs: on machine2 (10.77.0.2)")
    both = "on machine2 (10.77.0.2) and machine3 (10.77.0.3): "
    assert f"{both}the model {own}/frozen_lake/tiny_skater: no such folder; copy it to this path on every" in said
    assert f"{both}the run folder {own}/run: a file just created in it is missing; every GPU writes" in said
    assert not list((own / "run").glob(".shared-*"))
    assert three.where() == {}, "nothing was started"


def test_trainer_rollouts_and_environments_on_three_machines_while_others_join_and_are_lost(
    three: Cluster, place: Path, lakes: str
) -> None:
    folder, model = place / "shared" / "run", f"astuner.model.path={EXAMPLE / 'tiny_skater'}"

    def trained(run: Run) -> int:
        return max(run.steps(), default=0)

    with training(three, folder, lakes, "--no-resume", model) as run:
        run.until(lambda: trained(run) >= 1)
        where = three.where()
        print(where)
        (trainer,), (server,) = where["WorkerDict"], where["HFServer"]
        machines = {machine.address: machine for machine in three.added}
        assert {trainer, server} == set(machines), "on different machines, which are not the environments'"
        assert set(where["EpisodeWorker"]) == {three.head.address, trainer, server}

        guest = three.add(gpus=0)
        run.until(lambda: "a machine joined the cluster; episodes now run in" in run.said())
        assert guest.address in three.where()["EpisodeWorker"]
        at = trained(run)
        run.until(lambda: trained(run) >= at + 2)

        guest.lose_power()
        run.until(lambda: "an episode worker died" in run.said())
        at = trained(run)
        run.until(lambda: trained(run) >= at + 2)
        assert guest.address not in three.machines()
        assert run.failures() == [], "its episodes started over elsewhere"

        run.until(lambda: run.resumable_at() >= 3)
        machines[trainer].lose_power()
        assert run.ends() == 1, run.said()
        print(run.said()[-3000:])
    last = run.said().strip().splitlines()[-1]
    assert f" on {trainer}) died: " in last
    assert "Its machine left the cluster (see: ray status)" in last
    saved, done = run.resumable_at(), trained(run)

    three.add(gpus=1)
    more = f"astuner.trainer_common.total_steps={done + 2}"
    with training(three, folder, lakes, "--resume", model, more) as run:
        assert run.ends() == 0, run.said()
    assert sorted(run.steps()) == list(range(1, done + 3)), "every step once"
    assert saved >= 3
