"""Trackers with their real libraries, offline, in the threads that a run gives them; those that are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from astuner_trackers.trackers import (
    ADDRESS_VARIABLE,
    LONGEST_VALUE,
    SWANLAB_ID,
    flat,
    has_ended,
    kept_id,
    name_for_mlflow,
)

RUN = """
import sys
from pathlib import Path
from astuner.contracts.events import StepEnded
from astuner.runs.run import RunWriter
from astuner import RunDir
from astuner.contracts.log_sink import LogSink
from astuner.plugins.registry import resolve
from astuner.plugins.loader import load_plugins
from astuner.testing import fake_config

name, more = sys.argv[1], sys.argv[2:]
config = fake_config(Path("."), "  project_name: trial\\n")
run_dir = RunDir(Path("runs/run"))
if not more:
    run_dir.start()
    run_dir.resolved.write_text(config.dump_yaml())
notes = []

class Notes(LogSink):
    direct = True

    def step(self, step, metrics):
        pass

    def note(self, text):
        notes.append(text)

books = RunWriter(config, run_dir, [Notes(), resolve(load_plugins(), "log sink", name)()], total_steps=2)
books.publish(StepEnded(step=1, metrics={"kl": 0.25, "kl/ref": 0.5, "val/success/pass@4": 0.75}))
books.publish(StepEnded(step=2, metrics={"kl": 0.5}))
if more:
    run_dir.summary.write_text("{}")
books.close()
assert notes == [], notes
"""


def run(tracker: str, folder: Path, *more: str, **variables: str) -> None:
    (folder / "run.py").write_text(RUN)
    environment = {**os.environ, "WANDB_MODE": "offline", "SWANLAB_MODE": "offline", **variables}
    done = subprocess.run(
        [sys.executable, "run.py", tracker, *more],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own use of SQLAlchemy
@pytest.mark.needs("mlflow")
def test_mlflow_has_the_numbers_the_config_and_the_files_and_a_continued_run_is_the_same(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    run("mlflow", tmp_path)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/runs/mlflow.db")
    (number,) = client.search_experiments(filter_string="name = 'trial'")
    (first,) = client.search_runs([number.experiment_id])
    assert first.info.status == "KILLED", "it can be continued"
    assert first.data.metrics == {"kl": 0.5, "kl/ref": 0.5, "val/success/pass_4": 0.75}
    assert [(m.step, m.value) for m in client.get_metric_history(first.info.run_id, "kl")] == [(1, 0.25), (2, 0.5)]
    assert first.data.params["astuner.model.path"] == "fake"
    assert {file.path for file in client.list_artifacts(first.info.run_id)} == {"resolved.yaml"}
    run("mlflow", tmp_path, "resume")
    (again,) = client.search_runs([number.experiment_id])
    assert (again.info.run_id, again.info.status) == (first.info.run_id, "FINISHED")
    assert {file.path for file in client.list_artifacts(again.info.run_id)} == {"resolved.yaml", "summary.json"}


@pytest.mark.slow
@pytest.mark.needs("mlflow")
def test_mlflow_in_files_is_left_out_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="both kl and kl/ref in files"):
        run("mlflow", tmp_path, **{ADDRESS_VARIABLE: str(tmp_path / "mlruns")})


@pytest.mark.needs("wandb")
def test_wandb_offline_takes_what_it_is_told_in_its_thread(tmp_path: Path) -> None:
    run("wandb", tmp_path)
    (kept,) = (tmp_path / "runs" / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert kept_id(tmp_path / "runs" / "run", "wandb") in kept.name
    assert b"val/success/pass@4" in kept.read_bytes()


@pytest.mark.needs("swanlab")
def test_swanlab_offline_takes_what_it_is_told_in_its_thread(tmp_path: Path) -> None:
    run("swanlab", tmp_path)
    files = [f for f in (tmp_path / "runs" / "run" / "swanlab").rglob("*") if f.is_file()]
    assert any(b"val/success/pass@4" in f.read_bytes() for f in files)
    assert any(kept_id(tmp_path / "runs" / "run", "swanlab")[:SWANLAB_ID] in f.name for f in files)


def test_names_and_parameters_that_mlflow_takes() -> None:
    assert name_for_mlflow("val/success/pass@16") == "val/success/pass_16"
    assert name_for_mlflow("judge/été: a-b.c d") == "judge/été_ a-b.c d"
    settings = {"astuner": {"model": {"path": "x"}, "agents": {}, "list": [1, 2], "long": "y" * 1000}, "verl": {"a": 1}}
    assert dict(flat(settings)) == {
        "astuner.model.path": "x",
        "astuner.agents": "{}",
        "astuner.list": "[1, 2]",
        "astuner.long": "y" * (LONGEST_VALUE - 1) + "…",
        "verl.a": "1",
    }


def test_a_run_keeps_its_id_until_it_starts_over(tmp_path: Path) -> None:
    first = kept_id(tmp_path, "wandb")
    assert kept_id(tmp_path, "wandb") == first
    assert not has_ended(tmp_path)
    (tmp_path / ".wandb-id").unlink()
    assert kept_id(tmp_path, "wandb") != first
