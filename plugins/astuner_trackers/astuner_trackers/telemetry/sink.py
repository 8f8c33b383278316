"""Log sink `otel` for episodes and steps as OpenTelemetry traces, and activation of sinks by ``astuner.telemetry``.

An address in the config section enables its sink, even if `trainer_common.logger` does not name it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import ConfigError
from astuner.contracts.events import RunContext, Subscriber
from astuner.contracts.log_sink import LogSink
from astuner.contracts.types import Episode, Split
from astuner_trackers.telemetry import run_ids
from astuner_trackers.telemetry.collector import collector
from astuner_trackers.telemetry.settings import Telemetry, TelemetryKeys
from astuner_trackers.telemetry.spans import VALIDATION_TIME, Attribute, Naming, dotted, episode_spans, step_span

if TYPE_CHECKING:
    from astuner import Config
    from astuner_trackers.telemetry.export import MetricSender

OTEL, STUDIO = "otel", "studio"
LINKS = 128
"""Maximum episodes linked to a step's span, OpenTelemetry's limit."""


class OtelSink(LogSink):
    """Sends spans to the collector of ``astuner.telemetry``."""

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        from astuner import __version__
        from astuner_trackers.telemetry.export import MetricSender, SpanSender, resource

        astuner = settings["astuner"]
        telemetry = Telemetry.model_validate(astuner["telemetry"])
        self._run_dir, self._share = run_dir, telemetry.sample
        ids = run_ids.begin(run_dir, traced=self._share)
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

    def episode(self, step: int, episode: Episode) -> None:
        ids = self._naming.ids
        root = ids.root(episode.workflow_task.episode_id)
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
            run_ids.end(self._run_dir)


def _sampling(rollout: Mapping[str, Any]) -> dict[str, Attribute]:
    """Return the training values of ``gen_ai.request.*``, without disabled ones."""
    found: dict[str, Attribute] = {"gen_ai.request.temperature": float(rollout["temperature"])}
    if rollout["top_p"] < 1:
        found["gen_ai.request.top_p"] = float(rollout["top_p"])
    if rollout["top_k"] > 0:
        found["gen_ai.request.top_k"] = int(rollout["top_k"])
    return found


class Wanted(Subscriber):
    """Enables the sinks whose address is configured."""

    @classmethod
    def for_run(cls, context: RunContext) -> Sequence[Subscriber]:
        config: Config = context.config
        return [config.resolve("log sink", name)() for name in _wanted(config) if name not in _named(config)]

    @classmethod
    def check(cls, config: Any) -> None:
        """Check the settings of enabled and configured sinks.

        :raises ConfigError: A sink lacks a setting or a package.
        """
        wanted, named = _wanted(config), _named(config)
        if OTEL in (*wanted, *named):
            collector(config.astuner.telemetry, "traces")  # reports invalid settings now
        if STUDIO in named and STUDIO not in wanted:
            raise ConfigError(
                f"trainer_common.logger contains {STUDIO}, which requires astuner.telemetry.studio_url, e.g. "
                "http://localhost:3000"
            )
        for name in wanted:
            config.resolve("log sink", name)  # checks its dependencies


def _wanted(config: Config) -> list[str]:
    telemetry = config.keys_of(TelemetryKeys).telemetry
    return [name for name, set_ in ((OTEL, telemetry.otlp_endpoint), (STUDIO, telemetry.studio_url)) if set_]


def _named(config: Config) -> list[str]:
    names = config.astuner.trainer_common.logger
    return [names] if isinstance(names, str) else list(names)
