"""Where to send: addresses and headers of a collector, from the config and from OpenTelemetry's own variables; and
what OpenTelemetry's exporters say of it, kept off the screen and put into our own words.

They say it again for every batch, with their own class names and with URLs that may hold a password.  Invariant: what
they log in a thread of ours is not printed, and what is told of it holds no secret.
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
"""OTLP over HTTP, as the specification has it."""
_TIMEOUT = 10.0
"""Seconds, as the specification has it."""
PATHS = {"traces": "v1/traces", "metrics": "v1/metrics"}
_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.trace.export",
)
_ours = threading.local()

_ADDRESS = "check {url}: the address of OTLP over HTTP, often port 4318 (4317 is gRPC)"
_CAUSES = (  # what is looked for in the first line, what that means, what to check; the first that fits
    (r"refused", "nothing takes connections there", "check that it runs, and {url}"),
    (r"resolve|not known|nodename|No address associated", "there is no such host", "check {url}"),
    (r"CERTIFICATE|SSL", "its certificate is not trusted, or it speaks no TLS",
     "check {url}, and OTEL_EXPORTER_OTLP_CERTIFICATE"),
    (r"code: 40[13]|Unauthorized|Forbidden", "it does not accept the key{code}", "check {headers}"),
    (r"code: 40[45]|Not Found|Method Not Allowed", "it takes no spans under that path{code}", _ADDRESS),
    (r"aborted|BadStatusLine|Disconnected|reset by peer", "what listens there breaks the connection off", _ADDRESS),
    (r"timed out|[Tt]imeout", "it does not answer in time", "check that it is well, and {url}"),
    (r"code: \d{3}", "it refuses them{code}", "look into its own log"),
    (r"Unavailable|Too Many|Bad Gateway|Internal Server", "it cannot take any now{code}", "look into its own log"),
)  # fmt: skip
_LONGEST = 200
"""Characters of a line that none of them fits."""


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
        return without_secrets(text)


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


class _Divert(logging.Filter):
    """Keeps what is logged by threads of ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        lines: list[str] | None = getattr(_ours, "lines", None)
        if lines is None:
            return True
        lines.append(record.getMessage())
        return False


_divert = _Divert()


@contextmanager
def diverted() -> Iterator[list[str]]:
    """Within it, what this thread makes the exporters log goes into the list."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_divert)  # once: it is the same object
    lines: list[str] = []
    _ours.lines = lines
    try:
        yield lines
    finally:
        _ours.lines = None


def timed_out(lines: Sequence[str], seconds: float, timeout: float) -> bool:
    """Whether a request went out and its answer did not come in time; it may have been taken.

    :param seconds: it took until the exporter said ``lines``, which names no cause where its time is up: it says the
        same of a refusal after which there is no time for another try.
    :param timeout: seconds that it had.
    """
    if any(re.search(r"Read timed out|ReadTimeout", line) for line in lines):
        return True
    return bool(lines) and "batch due to timeout" in lines[0] and seconds > 0.9 * timeout


def why(lines: Sequence[str], collector: Collector) -> str:
    """Why a collector did not take what it was sent, and what to check.

    :param lines: what the exporter said; the first names the cause, later ones only say that it gave up.
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
