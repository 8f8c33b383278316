"""Experiment trackers. Each is imported when a run opens it; keys come from the tracker's own environment.

They are called in a thread of their own (`astuner.sink_threads`), where none of them can take over a signal.  A run
that is continued goes on under the id that it left in its folder.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astuner.log_sink import LogSink


class TensorboardSink(LogSink):
    """Event files below ``tensorboard/`` in the run folder."""

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


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
    """SwanLab; ``SWANLAB_MODE=offline`` needs no account."""

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        import swanlab

        place = run_dir / "swanlab"
        place.mkdir(exist_ok=True)
        project = settings["astuner"]["project_name"]
        self._run = swanlab.init(project=project, experiment_name=run_name, logdir=str(place), config=dict(settings))

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
