"""Experiment trackers. Each is imported when a run opens it; keys come from the tracker's own environment.

They are called in a thread of their own (`astuner.runs.sink_threads`), where none of them can take over a signal.  A
run that is continued goes on under the id that it left in its folder.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astuner.contracts.log_sink import LogSink
from astuner_trackers.telemetry.records import VALIDATION_TIME

SWANLAB_ID = 21
"""Characters of an id, lower-case letters and digits, that every version of SwanLab takes."""


class TensorboardSink(LogSink):
    """Event files below ``tensorboard/`` in the run folder."""

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
        self._writer.flush()  # else only every two minutes, and a killed run would lose them

    def close(self) -> None:
        self._writer.close()

    def _forget_from(self, step: int) -> None:
        """Have TensorBoard drop what earlier files say of ``step`` and later ones: they are done again.

        A validation comes after its step, so where it is the first thing that is told, its step is not done again.
        """
        started = self._session(status=self._session.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, session_log=started))


class WandbSink(LogSink):
    """Weights & Biases; ``WANDB_MODE=offline`` needs no account."""

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        import wandb

        self._run_dir = run_dir
        quiet = {} if "WANDB_CONSOLE" in os.environ else {"console": "off"}  # run.log has what the run says
        self._run = wandb.init(
            project=settings["astuner"]["project_name"],
            name=run_name,
            dir=str(run_dir),
            config=dict(settings),
            id=kept_id(run_dir, "wandb"),
            resume="allow",
            settings=wandb.Settings(**quiet),
        )

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish(exit_code=0 if has_ended(self._run_dir) else 1)


class SwanlabSink(LogSink):
    """SwanLab; ``SWANLAB_MODE=offline`` needs no account, and keeps a folder for each time that the run is started."""

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        import swanlab

        place = run_dir / "swanlab"
        place.mkdir(exist_ok=True)
        project = settings["astuner"]["project_name"]
        self._run = swanlab.init(
            project=project,
            experiment_name=run_name,
            logdir=str(place),
            config=dict(settings),
            id=kept_id(run_dir, "swanlab")[:SWANLAB_ID],
            resume="allow",
        )

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def kept_id(run_dir: Path, tracker: str) -> str:
    """The id of this run with a tracker: a new one, or that of the run which is continued."""
    file = run_dir / f".{tracker}-id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex, encoding="utf-8")
    return file.read_text(encoding="utf-8")


def has_ended(run_dir: Path) -> bool:
    """Whether the run came to its end; otherwise it can be continued."""
    return (run_dir / "summary.json").exists()
