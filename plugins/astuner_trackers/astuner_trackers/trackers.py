"""Experiment trackers. Each one is imported when a run opens it; API keys come from the tracker's own environment.

Trackers run in their own thread (`astuner.runs.sink_threads`), where they cannot install signal handlers. A resumed run
continues under the ID stored in its folder.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from astuner.contracts.errors import RunError
from astuner.contracts.log_sink import LogSink
from astuner.contracts.places import Tree, dotted
from astuner_trackers.telemetry.spans import VALIDATION_TIME

SWANLAB_ID = 21
"""Length of an ID of lower-case letters and digits that every version of SwanLab accepts."""
ADDRESS_VARIABLE = "MLFLOW_TRACKING_URI"
RETRIES_VARIABLE = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
RETRIES = "5"
"""Retries of a request, after 2, 4, 8, 16 and 32 s. A server that restarts within a minute loses nothing, and the cause
of a longer outage is known before the thread's time limit. MLflow's default is 7 retries."""
ARTEFACTS = (
    "resolved.yaml", "certificate.json", "summary.json", "reward_curve.png", "reward_curve.svg", "report.html",
    "report.md", "alarms.jsonl",
)  # fmt: skip
"""Files of the run folder that are uploaded to MLflow at the end of the run, if they exist."""
LONGEST_KEY = 250
LONGEST_VALUE = 500
"""Maximum characters of a parameter. Newer servers accept more."""
_REFUSED = re.compile(r"[^\w\-./ ]")
_AT_ONCE = 100
"""Maximum parameters per MLflow request. Metrics: up to 1000."""


class TensorboardSink(LogSink):
    """Event files in ``tensorboard/`` of the run folder."""

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._session, self._summary = Event, SessionLog, Summary
        self._has_begun = False
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._forget_from(step + 1 if VALIDATION_TIME in metrics else step)
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()  # the default is every two minutes, which a killed run would lose

    def close(self) -> None:
        self._writer.close()

    def _forget_from(self, step: int) -> None:
        """Make TensorBoard discard events from ``step`` on, because a resumed run repeats these steps.

        A validation follows its step. If it is the first event, its step is not repeated.
        """
        started = self._session(status=self._session.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, session_log=started))


class _RunSink(LogSink):
    """Base class for trackers whose `init` returns a run."""

    _run: Any

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)


class WandbSink(_RunSink):
    """Weights & Biases. ``WANDB_MODE=offline`` needs no account."""

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        import wandb

        self._run_dir = run_dir
        quiet = {} if "WANDB_CONSOLE" in os.environ else {"console": "off"}  # run.log contains the output
        self._run = wandb.init(
            project=settings["astuner"]["project_name"],
            name=run_name,
            dir=str(run_dir),
            config=dict(settings),
            id=kept_id(run_dir, "wandb"),
            resume="allow",
            settings=wandb.Settings(**quiet),
        )

    def close(self) -> None:
        self._run.finish(exit_code=0 if has_ended(self._run_dir) else 1)


class SwanlabSink(_RunSink):
    """SwanLab. ``SWANLAB_MODE=offline`` needs no account, and creates a folder for each start of the run."""

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        import swanlab

        place = run_dir / "swanlab"
        place.mkdir(exist_ok=True)
        self._run = swanlab.init(
            project=settings["astuner"]["project_name"],
            experiment_name=run_name,
            logdir=str(place),
            config=dict(settings),
            id=kept_id(run_dir, "swanlab")[:SWANLAB_ID],
            resume="allow",
        )

    def close(self) -> None:
        self._run.finish()


class MlflowSink(LogSink):
    """MLflow server or database file: one MLflow run per run folder, in the experiment `astuner.project_name`.

    Metric names keep their slashes; characters that MLflow does not allow, such as ``@``, become ``_``. MLflow
    parameters are immutable, so the config is written once, when the run starts.
    """

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        """Open the MLflow run.

        :raises RunError: MLflow is configured to store files, where a metric cannot be nested in another one.
        """
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._run_dir = run_dir
        os.environ.setdefault(RETRIES_VARIABLE, RETRIES)
        address = os.environ.get(ADDRESS_VARIABLE) or f"sqlite:///{run_dir.parent / 'mlflow.db'}"
        scheme = urlparse(address).scheme
        if scheme in ("", "file"):
            raise RunError(
                f"{ADDRESS_VARIABLE} is {address}, but MLflow cannot store both kl and kl/ref in files. Set "
                f"{ADDRESS_VARIABLE}=sqlite:////absolute/path/mlflow.db, or use the address of a server."
            )
        self._client = MlflowClient(tracking_uri=address)
        kept = run_dir / ".mlflow-id"
        if kept.exists():
            self._id = kept.read_text(encoding="utf-8")
            self._client.update_run(self._id, status="RUNNING")
            return
        place = Path(address.removeprefix("sqlite:///")).parent / "mlartifacts" if scheme == "sqlite" else None
        experiment = self._experiment(settings["astuner"]["project_name"], place)
        self._id = self._client.create_run(
            experiment, run_name=run_name, tags={"astuner.run_dir": str(run_dir), "mlflow.source.name": "astuner"}
        ).info.run_id
        kept.write_text(self._id, encoding="utf-8")
        parameters = [Param(*pair) for pair in flat(settings)]
        for at in range(0, len(parameters), _AT_ONCE):
            self._client.log_batch(self._id, params=parameters[at : at + _AT_ONCE])

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[self._metric(name_for_mlflow(n), value, now, step) for n, value in metrics.items()]
        )

    def close(self) -> None:
        for name in ARTEFACTS:
            if (file := self._run_dir / name).is_file():
                self._client.log_artifact(self._id, str(file))
        self._client.set_terminated(self._id, "FINISHED" if has_ended(self._run_dir) else "KILLED")

    def _experiment(self, name: str, artefacts: Path | None) -> str:
        """Return the ID of the MLflow experiment, and create it if necessary.

        :param artefacts: Folder for files. None: the server decides.
        """
        from mlflow.exceptions import MlflowException

        if (found := self._client.get_experiment_by_name(name)) is None:
            try:
                made: str = self._client.create_experiment(
                    name, artifact_location=artefacts.resolve().as_uri() if artefacts else None
                )
                return made
            except MlflowException:  # another run has created it meanwhile
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        known: str = found.experiment_id
        return known


def name_for_mlflow(name: str) -> str:
    """Return a metric name with only the characters that MLflow allows."""
    return _REFUSED.sub("_", name)[:LONGEST_KEY]


def flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the leaves of a config as parameters: dotted key, and value as text, truncated if it is too long."""
    for key, value in Tree(dict(settings)).leaves():
        text = str(value)
        yield name_for_mlflow(dotted(key)), text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def kept_id(run_dir: Path, tracker: str) -> str:
    """Return this run's ID with a tracker: a new ID, or the ID of the run that is resumed."""
    file = run_dir / f".{tracker}-id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex, encoding="utf-8")
    return file.read_text(encoding="utf-8")


def has_ended(run_dir: Path) -> bool:
    """Return whether the run has finished and cannot be resumed."""
    return (run_dir / "summary.json").exists()
