"""Find a collector's address and headers, and turn the exporters' log records into messages.

Addresses and headers come from the config and from OpenTelemetry's environment variables. OpenTelemetry's exporters log
every failed batch, with internal class names and URLs that may contain a password. Invariant: log records from
ASTuner's exporter threads are not printed, and messages derived from them contain no secret.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from astuner.contracts.errors import ConfigError
from astuner.contracts.secrets import without_secrets

if TYPE_CHECKING:
    from astuner_trackers.telemetry.settings import Telemetry

DEFAULT = "http://localhost:4318"
"""Paths of OTLP over HTTP, as specified."""
_TIMEOUT = 10.0
"""Default timeout in seconds, as specified."""
PATHS = {"traces": "v1/traces", "metrics": "v1/metrics"}
_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.trace.export",
)
_ours = threading.local()

_ADDRESS = "check {url}: it must be an OTLP/HTTP address, usually with port 4318 (4317 is gRPC)"
_CAUSES = (  # (pattern in the first line, cause, advice); the first match counts
    (r"refused", "connection refused", "check that it is running, and {url}"),
    (r"resolve|not known|nodename|No address associated", "unknown host", "check {url}"),
    (r"CERTIFICATE|SSL", "its certificate is not trusted, or it does not support TLS",
     "check {url}, and OTEL_EXPORTER_OTLP_CERTIFICATE"),
    (r"code: 40[13]|Unauthorized|Forbidden", "it rejected the key{code}", "check {headers}"),
    (r"code: 40[45]|Not Found|Method Not Allowed", "it accepts no spans at this path{code}", _ADDRESS),
    (r"aborted|BadStatusLine|Disconnected|reset by peer", "it closed the connection", _ADDRESS),
    (r"timed out|[Tt]imeout", "it did not answer in time", "check that it is healthy, and {url}"),
    (r"code: \d{3}", "it rejected the data{code}", "check its log"),
    (r"Unavailable|Too Many|Bad Gateway|Internal Server", "it is temporarily unavailable{code}", "check its log"),
)  # fmt: skip
_LONGEST = 200
"""Maximum characters of a line that matches no pattern."""


@dataclass(frozen=True)
class Collector:
    """Destination of one kind of signal."""

    url: str
    """URL for the exporter. It may contain a user and a password if it comes from a variable."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of `headers_env`. The exporter adds the headers of ``OTEL_EXPORTER_OTLP_HEADERS``."""
    url_from: str = "astuner.telemetry.otlp_endpoint"
    """Name of the setting that contains the address, for messages."""
    headers_from: str = "astuner.telemetry.headers_env"

    @property
    def shown(self) -> str:
        """URL without user and password."""
        parts = urllib.parse.urlsplit(self.url)
        return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    def without_secrets(self, text: str) -> str:
        """Remove header values and the user part of the URL from ``text``."""
        user = urllib.parse.urlsplit(self.url).netloc.rpartition("@")[0]
        for secret in (user, *self.headers.values(), *_headers_of_variables().values()):
            if secret:
                text = text.replace(secret, "***")
        return without_secrets(text)


def collector(telemetry: Telemetry, signal: str) -> Collector:
    """Return the destination of ``traces`` or ``metrics``.

    The config's endpoint takes precedence over ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` (a complete address) and
    ``OTEL_EXPORTER_OTLP_ENDPOINT``, to which the signal's path is added, as to the config's.

    :raises ConfigError: The variable with headers is not set, or contains none.
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
    """Return the request timeout for ``traces`` or ``metrics`` in seconds, from OpenTelemetry's variables, or 10."""
    names = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
    try:
        return float(next(filter(None, map(os.environ.get, names)), _TIMEOUT))
    except ValueError:
        return _TIMEOUT  # as the exporters do, which also log a warning


def _with_path(base: str, signal: str) -> str:
    for path in PATHS.values():  # the address is already complete
        base = base.rstrip("/").removesuffix(f"/{path}")
    return f"{base}/{PATHS[signal]}"


def _headers(name: str | None) -> dict[str, str]:
    if name is None:
        return {}
    text = os.environ.get(name, "")
    if not text:
        raise ConfigError(f"astuner.telemetry.headers_env: the environment variable {name} is not set.")
    headers = _parsed(text)
    if not headers or not all(v.isascii() and v.isprintable() for pair in headers.items() for v in pair):
        raise ConfigError(
            f"astuner.telemetry.headers_env: the environment variable {name} contains no headers. Use "
            "key=value, separated by commas."
        )
    return headers


def _parsed(text: str) -> dict[str, str]:
    """Parse comma-separated ``key=value`` with percent-encoded values (W3C Baggage, as in OTLP's variables)."""
    pairs = (item.partition("=") for item in text.split(","))
    return {key.strip().lower(): urllib.parse.unquote(value.strip()) for key, equals, value in pairs if equals and key}


def _headers_of_variables() -> dict[str, str]:
    names = ("", "TRACES_", "METRICS_")
    found = [os.environ.get(f"OTEL_EXPORTER_OTLP_{name}HEADERS", "") for name in names]
    return {key: value for text in found for key, value in _parsed(text).items()}


class _Divert(logging.Filter):
    """Filter that captures log records of ASTuner's exporter threads."""

    def filter(self, record: logging.LogRecord) -> bool:
        lines: list[str] | None = getattr(_ours, "lines", None)
        if lines is None:
            return True
        lines.append(record.getMessage())
        return False


_divert = _Divert()


@contextmanager
def diverted() -> Iterator[list[str]]:
    """Capture the exporters' log messages of this thread in a list."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_divert)  # adding the same filter again has no effect
    lines: list[str] = []
    _ours.lines = lines
    try:
        yield lines
    finally:
        _ours.lines = None


def timed_out(lines: Sequence[str], seconds: float, timeout: float) -> bool:
    """Return whether a request was sent and its response did not arrive in time, so the data may have been accepted.

    :param seconds: Time until the exporter logged ``lines``. After its time limit, the message contains no cause and is
        the same if a request was rejected and no time is left for a retry.
    :param timeout: Time limit in seconds.
    """
    if any(re.search(r"Read timed out|ReadTimeout", line) for line in lines):
        return True
    return bool(lines) and "batch due to timeout" in lines[0] and seconds > 0.9 * timeout


def why(lines: Sequence[str], collector: Collector) -> str:
    """Return why a collector did not accept data, and what to check.

    :param lines: Log messages of the exporter. The first one contains the cause, later ones only report giving up.
    """
    text = lines[0] if lines else "timed out"
    for pattern, cause, check in _CAUSES:
        if re.search(pattern, text):
            code = re.search(r"code: (\d{3})", text)
            return f"{cause}; {check}".format(
                code=f" (status {code[1]})" if code else "", url=collector.url_from, headers=collector.headers_from
            )
    said = collector.without_secrets(" ".join(text.split()))
    return f"{said[:_LONGEST].rstrip('.')}{'…' if len(said) > _LONGEST else ''}; check {collector.url_from}"
