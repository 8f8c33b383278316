"""The log sink `otel`: a run's episodes and steps as OpenTelemetry traces."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astuner.contracts.log_sink import LogSink
from astuner.contracts.types import Episode, Split
from astuner_trackers.telemetry import parent, run_ids
from astuner_trackers.telemetry.collector import collector
from astuner_trackers.telemetry.episode_spans import Naming, episode_spans, root_of
from astuner_trackers.telemetry.export import MetricSender, SpanSender, resource
from astuner_trackers.telemetry.records import VALIDATION_TIME, Attribute, dotted, step_span
from astuner_trackers.telemetry.settings import Telemetry

LINKS = 128
"""Episodes that a step's span is linked to at most: OpenTelemetry's own limit."""


class OtelSink(LogSink):
    """Sends spans to the collector of ``astuner.telemetry``."""

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        from astuner import __version__

        astuner = settings["astuner"]
        telemetry = Telemetry.model_validate(astuner["telemetry"])
        self._run_dir, self._share = run_dir, telemetry.sample
        ids = run_ids.begin(run_dir)
        self._naming = Naming(
            ids=ids,
            workflow=astuner["rollout"]["workflow"] or "workflow",
            models={name: p["path"] for name, p in astuner["policies"].items() if p["path"]},
            default_model=astuner["model"]["path"],
            sampling=_sampling(astuner["rollout"]),
            content=telemetry.content,
        )
        who = resource(
            {
                "service.version": __version__,
                "service.instance.id": ids.run,
                "astuner.project": astuner["project_name"],
                "astuner.experiment": run_name,
                "astuner.backbone": astuner["backbone"],
            }
        )
        self._links: dict[tuple[int, Split], deque[tuple[int, int]]] = {}
        self._spans = SpanSender(collector(telemetry, "traces"), who, __version__, self.remark)
        self._metrics: MetricSender | None = None
        if telemetry.metrics:
            self._metrics = MetricSender(collector(telemetry, "metrics"), who, __version__, self.remark)
        parent.begin(ids, self._share)

    def episode(self, step: int, episode: Episode) -> None:
        ids = self._naming.ids
        root = root_of(episode.workflow_task.episode_id, ids)
        if run_ids.is_sampled(root[0], self._share):
            self._spans.send(episode_spans(step, episode, self._naming, now=time.time()))
            self._links.setdefault((step, episode.workflow_task.split), deque(maxlen=LINKS)).append(root)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        split = Split.VALIDATION if VALIDATION_TIME in metrics else Split.TRAIN
        links = self._links.pop((step, split), ())
        self._spans.send([step_span(step, metrics, self._naming.ids, links)])
        if self._metrics is not None:
            self._metrics.send({f"astuner.{dotted(name)}": value for name, value in metrics.items()}, {"step": step})

    def close(self) -> None:
        try:
            self._spans.close()
            if self._metrics is not None:
                self._metrics.close()
        finally:
            parent.end(self._naming.ids)
            run_ids.end(self._run_dir)


def _sampling(rollout: Mapping[str, Any]) -> dict[str, Attribute]:
    """``gen_ai.request.*`` as training asks for it; what is off is left out."""
    found: dict[str, Attribute] = {"gen_ai.request.temperature": float(rollout["temperature"])}
    if rollout["top_p"] < 1:
        found["gen_ai.request.top_p"] = float(rollout["top_p"])
    if rollout["top_k"] > 0:
        found["gen_ai.request.top_k"] = int(rollout["top_k"])
    return found
