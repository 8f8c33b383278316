"""The person's own way to start an environment service, as the first documents have it.

For ``--with appworld`` the variables ``APPWORLD_PATH``, ``APPWORLD_SCRIPT`` and ``APPWORLD_ACTIVATION``, exported or in
``./.env``, name the folder to start in, the command, and one to run before it, such as ``conda activate appworld``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from astuner.contracts.errors import ConfigError

_MODULES = (("env", "env_service"), ("env_service", "env_service"))
"""Where the known services have their program, below the folder: package and module."""


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
