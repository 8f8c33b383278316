"""Log lines with fields, for people or as JSON; the secrets that the service knows are not in them."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable
from typing import Any

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_HIDDEN = "***"


def set_up(*, as_json: bool, debug: bool, secrets: Iterable[str]) -> None:
    """Send what the service logs to the standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(as_json=as_json, secrets=secrets))
    logger = logging.getLogger("astuner_env")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    logger.propagate = False


class Lines(logging.Formatter):
    """One record as one line.

    :param secrets: texts that are never written.
    """

    def __init__(self, *, as_json: bool, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._as_json = as_json
        self._secrets = [secret for secret in secrets if secret]

    def format(self, record: logging.LogRecord) -> str:
        fields = {k: v for k, v in vars(record).items() if k not in _OWN}
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        line = self._json(record, fields) if self._as_json else self._text(record, fields)
        for secret in self._secrets:
            line = line.replace(secret, _HIDDEN)
        return line

    def _json(self, record: logging.LogRecord, fields: dict[str, Any]) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        own = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        return json.dumps({**own, **fields}, default=str)

    def _text(self, record: logging.LogRecord, fields: dict[str, Any]) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        long = [str(v) for v in fields.values() if "\n" in str(v)]
        short = [f"{k}={v}" for k, v in fields.items() if v not in (None, "") and "\n" not in str(v)]
        head = " ".join([stamp, record.levelname.lower(), record.getMessage(), *short])
        return "\n".join([head, *long])
