"""Start the feedback service alongside a run (``--with feedback``).

The socket is bound here, so that an unavailable address is reported immediately. It is passed to a separate process,
which receives the keys over a pipe. Invariant: a key occurs only in that pipe, in the file for applications, which only
the current user can read, and in the run's own variable; never in a message, argument or log.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from astuner.contracts.errors import ConfigError
from astuner_gateway.access_file import write
from astuner_gateway.beside import ProcessService
from astuner_gateway.feedback.server import Terms
from astuner_gateway.feedback.settings import TOKEN_VARIABLE, URL_VARIABLE, ServiceConfig
from astuner_gateway.listening import bind, key_for, url_of


class FeedbackService(ProcessService):
    """Connect users' conversations and ratings with the run's episodes."""

    what = "feedback service"

    def __init__(self, config: ServiceConfig | None = None) -> None:
        super().__init__(config)
        self._settings = config or ServiceConfig()
        self._url = ""
        self._run_key = ""
        self._access: Path | None = None

    def start(self, *, url: str = "", log: Path | None = None) -> None:
        """Start the service at ``astuner.services.feedback``; ``url``, the environment service's address, is unused.

        :raises ConfigError: The address is not available, or other machines could reach it without a custom key.
        """
        settings = self._settings
        terms = Terms(
            host=settings.host,
            app_key=key_for(
                settings.host,
                settings.key_env,
                host_at="astuner.services.feedback.host",
                key_at="astuner.services.feedback.key_env",
                prefix="sk-feedback",
            ),
            run_key=secrets.token_urlsafe(32),
            wait_timeout=settings.wait_timeout,
        )
        try:
            listening = bind(settings.host, settings.port, listen=True)
        except ConfigError as e:
            raise ConfigError(f"astuner.services.feedback.host and .port: {e}") from None
        with listening:
            port, number = listening.getsockname()[1], listening.fileno()
            self._url = url_of(settings.host, listening)
            pid = self.launch(
                [sys.executable, "-m", "astuner_gateway.feedback.server"],
                log,
                told=json.dumps({"terms": asdict(terms), "socket": number}).encode() + b"\n",
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                pass_fds=(number,),
            )
        self._run_key = terms.run_key
        access = {"base_url": f"{self._url}/v1", "feedback_url": f"{self._url}/feedback", "api_key": terms.app_key}
        self._access = write("feedback", port, {**access, "pid": pid})

    def is_ready(self) -> bool:
        """Return whether the service answers.

        :raises RunError: The process has ended.
        """
        return self.answers(self._url)

    def stop(self) -> None:
        """Stop the service and abort running requests of users."""
        super().stop()
        if self._access is not None:
            self._access.unlink(missing_ok=True)
            self._access = None

    def environ(self) -> Mapping[str, str]:
        return {URL_VARIABLE: self._url, TOKEN_VARIABLE: self._run_key}

    def address(self) -> str:
        return f"{self._url} (base URL and key for applications: {self._access})"
