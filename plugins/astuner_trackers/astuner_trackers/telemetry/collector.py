"""Where to send: addresses and headers of a collector, from the config and from OpenTelemetry's own variables."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from astuner.contracts.errors import ConfigError

if TYPE_CHECKING:
    from astuner_trackers.telemetry.settings import Telemetry

DEFAULT = "http://localhost:4318"
"""OTLP over HTTP, as the specification has it."""
_TIMEOUT = 10.0
"""Seconds, as the specification has it."""
PATHS = {"traces": "v1/traces", "metrics": "v1/metrics"}


@dataclass(frozen=True)
class Collector:
    """Where one kind of signal goes."""

    url: str
    """For the exporter, which may hold a user and a password where a variable does."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Those of `headers_env`; the exporter itself adds those of ``OTEL_EXPORTER_OTLP_HEADERS``."""
    url_from: str = "astuner.telemetry.otlp_endpoint"
    """What named the address, for a person who has to correct it."""
    headers_from: str = "astuner.telemetry.headers_env"

    @property
    def shown(self) -> str:
        """The URL for people to read, without a user."""
        parts = urllib.parse.urlsplit(self.url)
        return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    def without_secrets(self, text: str) -> str:
        """``text`` without the values of headers and without what stands before the ``@`` of the URL."""
        user = urllib.parse.urlsplit(self.url).netloc.rpartition("@")[0]
        for secret in (user, *self.headers.values(), *_headers_of_variables().values()):
            if secret:
                text = text.replace(secret, "***")
        return text


def collector(telemetry: Telemetry, signal: str) -> Collector:
    """Where ``traces`` or ``metrics`` go.

    The config's endpoint wins over ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` (whole) and ``OTEL_EXPORTER_OTLP_ENDPOINT``
    (to which the signal's path is added, as to the config's).

    :raises ConfigError: the variable with headers is not set, or holds none.
    """
    headers = _headers(telemetry.headers_env)
    if telemetry.otlp_endpoint:
        return Collector(_with_path(telemetry.otlp_endpoint, signal), headers)
    variables = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    whole, base = map(os.environ.get, variables)
    if whole:
        return Collector(whole, headers, url_from=f"the variable {variables[0]}")
    if base:
        return Collector(_with_path(base, signal), headers, url_from=f"the variable {variables[1]}")
    return Collector(_with_path(DEFAULT, signal), headers)


def timeout(signal: str) -> float:
    """Seconds for a request of ``traces`` or ``metrics``, from OpenTelemetry's variables; else 10."""
    names = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
    try:
        return float(next(filter(None, map(os.environ.get, names)), _TIMEOUT))
    except ValueError:
        return _TIMEOUT  # as they do, with a warning of their own


def _with_path(base: str, signal: str) -> str:
    for path in PATHS.values():  # somebody wrote the whole address
        base = base.rstrip("/").removesuffix(f"/{path}")
    return f"{base}/{PATHS[signal]}"


def _headers(name: str | None) -> dict[str, str]:
    if name is None:
        return {}
    text = os.environ.get(name, "")
    if not text:
        raise ConfigError(f"astuner.telemetry.headers_env: the environment variable {name} is not set")
    headers = _parsed(text)
    if not headers or not all(v.isascii() and v.isprintable() for pair in headers.items() for v in pair):
        raise ConfigError(
            f"astuner.telemetry.headers_env: the variable {name} holds no headers; write key=value, and several with "
            "commas between them"
        )
    return headers


def _parsed(text: str) -> dict[str, str]:
    """``key=value`` with commas between them, values percent-encoded (W3C Baggage, as OTLP's variables have it)."""
    pairs = (item.partition("=") for item in text.split(","))
    return {key.strip().lower(): urllib.parse.unquote(value.strip()) for key, equals, value in pairs if equals and key}


def _headers_of_variables() -> dict[str, str]:
    names = ("", "TRACES_", "METRICS_")
    found = [os.environ.get(f"OTEL_EXPORTER_OTLP_{name}HEADERS", "") for name in names]
    return {key: value for text in found for key, value in _parsed(text).items()}
