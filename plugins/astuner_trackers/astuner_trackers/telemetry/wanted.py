"""Which log sinks the section ``astuner.telemetry`` asks for, checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from astuner.contracts.errors import ConfigError
from astuner_trackers.telemetry.collector import collector

if TYPE_CHECKING:
    from astuner.config.telemetry import Telemetry

OTEL, STUDIO = "otel", "studio"


def checked_telemetry(telemetry: Telemetry, loggers: Iterable[str]) -> list[str]:
    """The sinks to have beside ``loggers``.

    :raises ConfigError: one of them, or of ``loggers``, lacks what it needs.
    """
    wanted = [name for name, set_ in ((OTEL, telemetry.otlp_endpoint), (STUDIO, telemetry.studio_url)) if set_]
    if OTEL in {*wanted, *loggers}:
        collector(telemetry, "traces")  # its mistakes show now
    if STUDIO in loggers and not telemetry.studio_url:
        raise ConfigError(
            f"trainer_common.logger names {STUDIO}, which needs astuner.telemetry.studio_url, e.g. http://localhost:3000"
        )
    return wanted
