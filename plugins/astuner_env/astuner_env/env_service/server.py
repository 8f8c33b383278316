"""The environment service as a companion of the run: started with it, and stopped with it, whatever happens.

It is ``python -m astuner_env serve``, or what the person's own variables say.  Invariant: what was started is in one
process group, which is gone when `EnvServer.stop` returns; nothing else is ever signalled.
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
"""How the names of services' folders begin, and no others."""
_ANNOUNCED = re.compile(r"Starting server on (\S+?):(\d+)(?!\d)")
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_ANYWHERE = {"0.0.0.0", "::", "[::]", ""}
_PASSED_ON = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|XDG_\w+_(HOME|DIR)|PYTHON\w+|VIRTUAL_ENV"
    rf"|CONDA_PREFIX|(DY)?LD_LIBRARY_PATH|ASTUNER_HOME|{DISABLE_PLUGINS}"
)
"""The variables of the run that our service gets: where things lie, and how to speak. No key is called so."""
_MODULES = (("env", "env_service"), ("env_service", "env_service"))
"""Where the known services have their program, below the folder: package and module."""


class EnvServer(ProcessService):
    """Serves one environment or several."""

    grace = 10.0

    def __init__(self, names: Sequence[str], *, token_env: str = TOKEN_VARIABLE, run_dir: Path | str = "") -> None:
        """
        :param names: registered environments, or code as ``[NAME=]path/to/file.py->Class``.
        :param token_env: the variable in which the run looks for the token (``astuner.env_service.token_env``).
        :param run_dir: what `astuner kill --run-dir` knows it by.
        """
        super().__init__()
        self.names = tuple(names)
        self.what = f"environment service for {', '.join(self.names)}"
        self._token_env = token_env or TOKEN_VARIABLE
        self._run_dir = run_dir
        self._listens = False  # it said so
        self._url = ""
        self._token = ""

    def start(self, *, url: str = "", log: Path | None = None) -> None:
        """Start it; ``url`` must be one of this machine.

        :raises ConfigError: the person's variables make no sense, or ``url`` is elsewhere.
        :raises RunError: something answers at ``url`` already.
        """
        if url:
            self._url = url
            if EnvClient(url, timeout=5.0).is_up():
                raise RunError(
                    f"something answers at {url} already; use it and leave out --with {self.names[0]}, or stop it "
                    "(astuner kill ends what an earlier run left)"
                )
        command, folder, variables = self._command(url)
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL}
        if self._token:  # our own ends with the pipe
            options = {"told": f"{self._token}\n".encode()}
        environ = {**variables, "PYTHONUNBUFFERED": "1"}
        self.launch(command, log, run_dir=self._run_dir, cwd=folder, env=environ, **options)

    def stop(self) -> None:
        """As `ProcessService.stop`; what it left in the folder for temporary files, if it was killed, goes too."""
        super().stop()
        remove_abandoned(FOLDERS, Path(tempfile.gettempdir()))

    def is_ready(self) -> bool:
        """Whether it says where it listens, and answers there.

        :raises RunError: it has ended.
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
        """What to run, where, and with which variables.

        Our own gets no key of the run's: whoever may read a process's variables finds none in it.  Its token comes
        through its standard input.
        """
        own = {name: script for name in self.names if not is_code(name) and (script := own_script(name)) is not None}
        if own:
            name, script = next(iter(own.items()))
            if len(self.names) > 1:
                others = ", ".join(other for other in self.names if other != name)
                raise ConfigError(f"{name} is served by your own script, so {others} cannot be served beside it here")
            return ["bash", "-c", script.command], script.folder, {**script.variables, **os.environ}
        host, port = _place(url)
        self._token = secrets.token_urlsafe(32)
        command = [sys.executable, "-m", "astuner_env", "serve", *self.names, "--host", host, "--port", str(port)]
        command += ["--token-from-stdin", "--stop-with-stdin"]
        return command, None, {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}


def _place(url: str) -> tuple[str, int]:
    """Host and port to listen on; port 0 takes a free one."""
    if not url:
        return "127.0.0.1", 0
    parts = urllib.parse.urlsplit(url)
    if parts.hostname not in _LOOPBACK or parts.scheme != "http":
        raise ConfigError(
            f"astuner.env_service.url is {url}, which is not this machine's, so --with cannot start the service there; "
            "leave out --with if it runs there already, or leave out the url"
        )
    return parts.hostname, parts.port or 80


@dataclass(frozen=True)
class OwnScript:
    """What to run, and where."""

    folder: Path
    command: str
    """For bash."""
    variables: Mapping[str, str]
    """What ``.env`` has beside, for the command."""


def own_script(name: str, dotenv: Path | None = None) -> OwnScript | None:
    """What the person's variables say for the environment ``name``; None: they say nothing.

    For ``--with appworld`` the variables ``APPWORLD_PATH``, ``APPWORLD_SCRIPT`` and ``APPWORLD_ACTIVATION``, exported
    or in ``./.env``, name the folder to start in, the command, and one to run before it, such as ``conda activate
    appworld``.

    :param dotenv: the file to read; ``.env`` in the working directory by default. Exported variables win over it.
    :raises ConfigError: a part is missing, or the folder is not there.
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
        raise ConfigError(f"{prefix}_PATH is {path!r}, and there is no such folder; correct it, or unset it")
    if not script:
        script = _program(folder)
        if not script:
            raise ConfigError(
                f"{prefix}_PATH is {path!r}, and {prefix}_SCRIPT does not say what to run there; set it, for example "
                f"{prefix}_SCRIPT='python3 -m env.env_service'"
            )
    command = f"{{ {before}\n}} && {{ {script}\n}}" if before else script
    return OwnScript(folder.resolve(), command, written)


def _program(folder: Path) -> str:
    """How the program of a known service in ``folder`` is run."""
    for package, module in _MODULES:
        if (folder / package / f"{module}.py").is_file():
            return f"python3 -m {package}.{module}"
    return ""
