"""Experiment trackers. Each is imported when a run opens it; keys come from the tracker's own environment."""

from __future__ import annotations

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
        import time

        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WandbSink(LogSink):
    """Weights & Biases; ``WANDB_MODE=offline`` needs no account."""

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        import wandb

        project = settings["astuner"]["project_name"]
        self._run = wandb.init(project=project, name=run_name, dir=str(run_dir), config=dict(settings), resume="allow")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class SwanlabSink(LogSink):
    """SwanLab; ``SWANLAB_MODE=offline`` needs no account."""

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        import swanlab

        project = settings["astuner"]["project_name"]
        self._run = swanlab.init(project=project, experiment_name=run_name, logdir=str(run_dir), config=dict(settings))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
