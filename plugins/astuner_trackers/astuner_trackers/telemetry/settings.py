"""Config section ``astuner.telemetry``: external services that receive traces and conversations."""

from __future__ import annotations

import re
import urllib.parse

from pydantic import Field, field_validator

from astuner.contracts.section import Section

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Telemetry(Section):
    """Settings of traces and conversations for external services."""

    otlp_endpoint: str = ""
    """OpenTelemetry collector (OTLP over HTTP), e.g. `http://localhost:4318`. Enables the log sink `otel`."""
    headers_env: str | None = None
    """Environment variable with headers for the collector, as in `OTEL_EXPORTER_OTLP_HEADERS`: `key=value,…`."""
    content: bool = False
    """Also send content to the collector: messages, tool arguments and results, errors."""
    sample: float = Field(1.0, ge=0, le=1)
    """Share of episodes sent to the collector."""
    metrics: bool = False
    """Also send the metrics of each step as OTLP metrics (Jaeger accepts traces only)."""
    studio_url: str = ""
    """AgentScope Studio, e.g. `http://localhost:3000`. Enables the log sink `studio`."""
    studio_episodes: int = Field(2, ge=1)
    """Episodes sent to Studio per step and per validation: first attempts at the first tasks to end."""

    @field_validator("otlp_endpoint", "studio_url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        parts = urllib.parse.urlsplit(url)
        if "@" in url:  # reject before the URL is printed
            raise ValueError("remove user and password from the URL; put a collector's key into headers_env")
        if url and (parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\s?#]", url)):
            raise ValueError("use a URL like http://localhost:4318, without ? and #")
        _ = parts.port  # raises ValueError if it is not a number
        return url.rstrip("/")

    @field_validator("headers_env")
    @classmethod
    def _is_a_variable(cls, name: str | None) -> str | None:
        if name is not None and not _VARIABLE.fullmatch(name):  # the headers themselves
            raise ValueError("use the name of an environment variable, not the headers themselves")
        return name


class TelemetryKeys(Section):
    """Config section of this package."""

    telemetry: Telemetry = Telemetry()
    """Traces for an OpenTelemetry collector and conversations for AgentScope Studio. Off without an address."""
