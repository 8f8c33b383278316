"""What OpenTelemetry's exporters say, kept off the screen and put into our own words.

They say it again for every batch, with their own class names and with URLs that may hold a password.  Invariant: what
they log in a thread of ours is not printed, and what is told of it holds no secret.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from astuner_trackers.telemetry.collector import Collector

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
