"""Start and stop the environment service of a run.

The service is ``python -m astuner_env serve`` or the user's own script. Invariant: the started processes are in one
process group, which is gone when `EnvServer.stop` returns; no other process receives a signal.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astuner import DISABLE_PLUGINS, is_code
from astuner import TOKEN_VARIABLE as TOKEN_VARIABLE
from astuner.contracts.errors import ConfigError, RunError
from astuner_env.env_service.client import URL_VARIABLE, EnvClient
from astuner_gateway.beside import ProcessService
from astuner_sandbox.isolation.scratch import remove_abandoned

FOLDERS = "astuner-env-"
"""Prefix of the services' temporary folders."""
_ANNOUNCED = re.compile(r"Starting server on (\S+?):(\d+)(?!\d)")
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_ANYWHERE = {"0.0.0.0", "::", "[::]", ""}
_PASSED_ON = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|XDG_\w+_(HOME|DIR)|PYTHON\w+|VIRTUAL_ENV"
    rf"|CONDA_PREFIX|(DY)?LD_LIBRARY_PATH|ASTUNER_HOME|{DISABLE_PLUGINS}"
)
"""Environment variables passed to ASTuner's service: paths and locale. None of them contains a secret."""
_MODULES = (("env", "env_service"), ("env_service", "env_service"))
"""Package and module of the main program of known services, relative to their folder."""


class EnvServer(ProcessService):
    """Service process for one or more environments."""

    grace = 10.0

    def __init__(self, names: Sequence[str], *, token_env: str = TOKEN_VARIABLE, run_dir: Path | str = "") -> None:
        """Prepare a service; `start` starts it.

        :param names: Registered environments, or code as ``[NAME=]path/to/file.py->Class``.
        :param token_env: Variable in which the run looks for the token (``astuner.env_service.token_env``).
        :param run_dir: Run folder, by which ``astuner kill --run-dir`` finds the service.
        """
        super().__init__()
        self.names = tuple(names)
        self.what = f"environment service for {', '.join(self.names)}"
        self._token_env = token_env or TOKEN_VARIABLE
        self._run_dir = run_dir
        self._listens = False  # the start line was printed
        self._url = ""
        self._token = ""

    def start(self, *, url: str = "", log: Path | None = None) -> None:
        """Start the service; ``url`` must be an address of this machine.

        :raises ConfigError: The user's variables are invalid, or ``url`` is on another machine.
        :raises RunError: A service already answers at ``url``.
        """
        if url:
            self._url = url
            if EnvClient(url, timeout=5.0).is_up():
                raise RunError(
                    f"A service already answers at {url}. Omit --with {self.names[0]} to use it, or stop it "
                    "(astuner kill ends processes of earlier runs)."
                )
        command, folder, variables = self._command(url)
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL}
        if self._token:  # ASTuner's service stops when the pipe closes
            options = {"told": f"{self._token}\n".encode()}
        environ = {**variables, "PYTHONUNBUFFERED": "1"}
        self.launch(command, log, run_dir=self._run_dir, cwd=folder, env=environ, **options)

    def stop(self) -> None:
        """Stop the service and remove temporary files that a killed service left."""
        super().stop()
        remove_abandoned(FOLDERS, Path(tempfile.gettempdir()))

    def is_ready(self) -> bool:
        """Return whether the service has printed its address and answers there.

        :raises RunError: The service has ended.
        """
        self.check()
        if not self._listens:
            announced = _ANNOUNCED.search(self.said())
            if announced is None:
                return False
            host, port = announced.groups()
            self._url = self._url or f"http://{'127.0.0.1' if host in _ANYWHERE else host}:{port}"
            self._listens = True
        return EnvClient(self._url, timeout=5.0).is_up()

    def environ(self) -> Mapping[str, str]:
        return {URL_VARIABLE: self._url, **({self._token_env: self._token} if self._token else {})}

    def address(self) -> str:
        return self._url

    # ---------------------------------------------------------------- private

    def _command(self, url: str) -> tuple[list[str], Path | None, Mapping[str, str]]:
        """Return command, working directory and environment variables.

        ASTuner's service gets none of the run's secrets, because other processes can read a process's variables. It
        receives its token through standard input.
        """
        own = {name: script for name in self.names if not is_code(name) and (script := own_script(name)) is not None}
        if own:
            name, script = next(iter(own.items()))
            if len(self.names) > 1:
                others = ", ".join(other for other in self.names if other != name)
                raise ConfigError(f"{name} is served by your own script, so --with cannot also serve {others}.")
            return ["bash", "-c", script.command], script.folder, {**script.variables, **os.environ}
        host, port = _place(url)
        self._token = secrets.token_urlsafe(32)
        command = [sys.executable, "-m", "astuner_env", "serve", *self.names, "--host", host, "--port", str(port)]
        command += ["--token-from-stdin", "--stop-with-stdin"]
        return command, None, {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}


def _place(url: str) -> tuple[str, int]:
    """Return host and port to listen on; port 0 selects a free port."""
    if not url:
        return "127.0.0.1", 0
    parts = urllib.parse.urlsplit(url)
    if parts.hostname not in _LOOPBACK or parts.scheme != "http":
        raise ConfigError(
            f"astuner.env_service.url is {url}, which is not on this machine, so --with cannot start a service there. "
            "Omit --with to use a service that runs there, or remove the URL."
        )
    return parts.hostname, parts.port or 80


@dataclass(frozen=True)
class OwnScript:
    """The user's own command for a service."""

    folder: Path
    command: str
    """Command line for bash."""
    variables: Mapping[str, str]
    """All variables of ``.env``, for the command."""


def own_script(name: str, dotenv: Path | None = None) -> OwnScript | None:
    """Return the user's own script for the environment ``name``, or None if the variables are not set.

    For ``--with appworld`` these are ``APPWORLD_PATH`` (working directory), ``APPWORLD_SCRIPT`` (command) and
    ``APPWORLD_ACTIVATION`` (command to run before it, such as ``conda activate appworld``), exported or in ``./.env``.

    :param dotenv: File to read. Default: ``.env`` in the working directory. Exported variables take precedence.
    :raises ConfigError: A variable is missing, or the folder does not exist.
    """
    from dotenv import dotenv_values

    file = dotenv or Path(".env")
    written = {key: value for key, value in dotenv_values(file).items() if value is not None} if file.is_file() else {}
    known = {**written, **os.environ}
    prefix = re.sub(r"\W", "_", name).upper()
    path, script, before = (known.get(f"{prefix}_{part}", "").strip() for part in ("PATH", "SCRIPT", "ACTIVATION"))
    if not path and not script:
        return None
    folder = Path(path).expanduser() if path else Path()
    if not folder.is_dir():
        raise ConfigError(f"{prefix}_PATH: the folder {path!r} does not exist. Correct or unset the variable.")
    if not script:
        script = _program(folder)
        if not script:
            raise ConfigError(
                f"{prefix}_PATH is {path!r}, but {prefix}_SCRIPT is not set. Set it to the command to run, for example "
                f"{prefix}_SCRIPT='python3 -m env.env_service'"
            )
    command = f"{{ {before}\n}} && {{ {script}\n}}" if before else script
    return OwnScript(folder.resolve(), command, written)


def _program(folder: Path) -> str:
    """Return the command that runs a known service in ``folder``, or an empty string."""
    for package, module in _MODULES:
        if (folder / package / f"{module}.py").is_file():
            return f"python3 -m {package}.{module}"
    return ""
