"""The log sinks that the section ``astuner.telemetry`` asks for, whether or not `trainer_common.logger` names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import ConfigError
from astuner.contracts.events import RunContext, Subscriber
from astuner_trackers.telemetry.collector import collector
from astuner_trackers.telemetry.settings import TelemetryKeys

if TYPE_CHECKING:
    from astuner.config import Config

OTEL, STUDIO = "otel", "studio"


class Telemetry(Subscriber):
    """A collector's or a Studio's address is reason enough to send there."""

    @classmethod
    def for_run(cls, context: RunContext) -> Sequence[Subscriber]:
        config: Config = context.config
        return [config.resolve("log sink", name)() for name in _wanted(config) if name not in _named(config)]

    @classmethod
    def check(cls, config: Any) -> None:
        """
        :raises ConfigError: one of those that are asked for here, or named as loggers, lacks what it needs.
        """
        wanted, named = _wanted(config), _named(config)
        if OTEL in (*wanted, *named):
            collector(config.keys_of(TelemetryKeys).telemetry, "traces")  # its mistakes show now
        if STUDIO in named and STUDIO not in wanted:
            raise ConfigError(
                f"trainer_common.logger names {STUDIO}, which needs astuner.telemetry.studio_url, e.g. "
                "http://localhost:3000"
            )
        for name in wanted:
            config.resolve("log sink", name)  # what it needs is installed


def _wanted(config: Config) -> list[str]:
    telemetry = config.keys_of(TelemetryKeys).telemetry
    return [name for name, set_ in ((OTEL, telemetry.otlp_endpoint), (STUDIO, telemetry.studio_url)) if set_]


def _named(config: Config) -> list[str]:
    names = config.astuner.trainer_common.logger
    return [names] if isinstance(names, str) else list(names)
