"""``--with feedback``: the service as a companion of the run.

The socket is bound here, so that an address that cannot be had is said at once, and handed to a process of its own,
with the keys over a pipe.  Invariant: a key is in that pipe, in the file for applications, which only this user can
read, and in the run's own variable; in no message, argument or log.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO

from astuner.contracts.errors import ConfigError, RunError
from astuner.contracts.service import Service
from astuner.support import processes
from astuner.support.http_client import JsonClient
from astuner_gateway.access_file import write
from astuner_gateway.feedback.server import Terms
from astuner_gateway.feedback.settings import TOKEN_VARIABLE, URL_VARIABLE, ServiceConfig
from astuner_gateway.listening import bind, key_for, url_of

GRACE_SECONDS = 5.0
"""How long it may take to stop in order."""


class FeedbackService(Service):
    """Brings users' conversations to the run's episodes, and their ratings back."""

    def __init__(self, config: ServiceConfig | None = None) -> None:
        super().__init__(config)
        self._settings = config or ServiceConfig()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._log_path: Path | None = None
        self._url = ""
        self._run_key = ""
        self._access: Path | None = None

    def start(self, *, url: str = "", log: Path | None = None) -> None:
        """Start it where ``astuner.services.feedback`` says; ``url`` is the environment service's, and not read.

        :raises ConfigError: the address cannot be had, or others could reach it without a key of the person's.
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
            self._log_path = log
            self._log = open(log or os.devnull, "ab")  # noqa: SIM115  (for as long as the service runs)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "astuner_gateway.feedback"],
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.PIPE,  # closes when this process ends, even by SIGKILL, and the service then ends too
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(number,),
                start_new_session=True,  # Ctrl-C in the terminal is for the run, which stops it in order
            )
            processes.record(self._process.pid, "feedback service")
            assert self._process.stdin is not None  # a pipe
            self._process.stdin.write(json.dumps({"terms": asdict(terms), "socket": number}).encode() + b"\n")
            self._process.stdin.flush()
        self._run_key = terms.run_key
        access = {"base_url": f"{self._url}/v1", "feedback_url": f"{self._url}/feedback", "api_key": terms.app_key}
        self._access = write("feedback", port, {**access, "pid": self._process.pid})

    def is_ready(self) -> bool:
        """Whether it answers.

        :raises RunError: it has ended.
        """
        if self._process is None or self._process.poll() is not None:
            raise RunError(f"the feedback service ended at its start; see {self._log_path}")
        return JsonClient(self._url, timeout=5.0).is_up("/health")

    def stop(self) -> None:
        """End it; users' requests that are under way are broken off."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
            processes.forget(process.pid)
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._access is not None:
            self._access.unlink(missing_ok=True)
            self._access = None

    def environ(self) -> Mapping[str, str]:
        return {URL_VARIABLE: self._url, TOKEN_VARIABLE: self._run_key}

    def address(self) -> str:
        return f"{self._url} (for applications: base URL and key are in {self._access})"
