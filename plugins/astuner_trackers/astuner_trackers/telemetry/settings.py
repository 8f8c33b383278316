"""The section ``astuner.telemetry``: who else is told what a run does (`astuner.telemetry`)."""

from __future__ import annotations

import re
import urllib.parse

from pydantic import Field, field_validator

from astuner.contracts.section import Section

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Telemetry(Section):
    otlp_endpoint: str = ""
    """An OpenTelemetry collector (OTLP over HTTP), e.g. `http://localhost:4318`; set, the log sink `otel` is on."""
    headers_env: str | None = None
    """The environment variable with headers for the collector, as in `OTEL_EXPORTER_OTLP_HEADERS`: `key=value,…`."""
    content: bool = False
    """Send the collector what was said, too: messages, arguments and results of tools, errors."""
    sample: float = Field(1.0, ge=0, le=1)
    """The share of episodes that the collector is sent."""
    metrics: bool = False
    """Send the collector the numbers of each step as OTLP metrics, too (Jaeger takes traces only)."""
    studio_url: str = ""
    """An AgentScope Studio, e.g. `http://localhost:3000`; set, the log sink `studio` is on."""
    studio_episodes: int = Field(2, ge=1)
    """Episodes of each step, and of each validation, that Studio is sent: first attempts at the first tasks to end."""

    @field_validator("otlp_endpoint", "studio_url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        parts = urllib.parse.urlsplit(url)
        if "@" in url:  # before anything prints it
            raise ValueError("leave user and password out of the URL; a collector's key goes into headers_env")
        if url and (parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\s?#]", url)):
            raise ValueError("write a URL like http://localhost:4318, without ? and #")
        _ = parts.port  # raises ValueError where it is no number
        return url.rstrip("/")

    @field_validator("headers_env")
    @classmethod
    def _is_a_variable(cls, name: str | None) -> str | None:
        if name is not None and not _VARIABLE.fullmatch(name):  # somebody wrote the headers themselves
            raise ValueError("write the name of an environment variable, not the headers themselves")
        return name


class TelemetryKeys(Section):
    telemetry: Telemetry = Telemetry()
    """Traces for an OpenTelemetry collector and for AgentScope Studio; nothing is sent unless an address is set."""
