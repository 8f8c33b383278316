"""Load and save the settings of environments: ``$ASTUNER_HOME/environments/NAME.json``.

``astuner env setup`` writes them and the service reads them. Invariants: the settings decide which program is started,
so only files that no other user can write are read; writes are atomic; a name cannot lead to another path.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from astuner import astuner_home
from astuner.contracts.errors import ConfigError, RunError
from astuner_env.environment_setup import EnvironmentSettings
from astuner_gateway import access_file

_KIND = "environments"
_KEPT = TypeAdapter(with_config(ConfigDict(extra="forbid"))(EnvironmentSettings))
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def load(name: str) -> EnvironmentSettings:
    """Return the settings of environment ``name``, or the defaults if it was not set up.

    :raises ConfigError: ``name`` is not a valid name.
    :raises RunError: The file cannot be used; the message describes what to do.
    """
    file = file_of(name)
    try:
        with file.open("rb") as f:
            status = os.fstat(f.fileno())
            others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if status.st_uid not in (os.getuid(), 0) or others_write:
                who = "other users can write it" if others_write else "it belongs to another user"
                what = f"{file} is ignored because {who} and it selects the program to start"
                raise RunError(f"{what}. Run: rm {file}")
            text = f.read()
    except FileNotFoundError:
        return EnvironmentSettings()
    except OSError as e:
        raise RunError(f"Could not read {file}: {e.strerror}. Fix the file, or run: astuner env setup {name}") from None
    try:
        return _KEPT.validate_json(text, strict=True)
    except ValidationError as e:
        problem = e.errors()[0]
        why = ": ".join(map(str, (*problem["loc"], problem["msg"])))
        raise RunError(f"{file} is damaged ({why}). Run: astuner env setup {name}") from None


def save(name: str, settings: EnvironmentSettings) -> Path:
    """Save the settings of environment ``name``, readable only by this user.

    :raises ConfigError: ``name`` is not a valid name.
    :raises RunError: The folder is not writable.
    """
    file = file_of(name)
    try:
        access_file.write(_KIND, name, _KEPT.dump_python(settings))
    except OSError as e:
        raise RunError(f"Could not write {file}: {e.strerror}. Set ASTUNER_HOME to a writable folder.") from None
    return file


def is_saved(name: str) -> bool:
    """Return whether ``astuner env setup`` has completed for ``name``; raise like `file_of`."""
    return file_of(name).exists()


def file_of(name: str) -> Path:
    """Return the path of the settings; raise like `folder_of`."""
    return folder_of(name).with_name(f"{name}.json")


def folder_of(name: str) -> Path:
    """Return the folder for the interpreter and data of environment ``name``; it may not exist.

    :raises ConfigError: ``name`` is not a valid name.
    """
    # a name with the suffix of a settings file would collide with one
    if not _NAME.fullmatch(name) or name.endswith((".json", ".tmp")):
        raise ConfigError(
            f"{name!r} is not a valid environment name: use at most 128 letters, digits, '.', '-' and '_', and do not "
            "start with '.' or '-'. List environments: astuner env list"
        )
    return astuner_home().absolute() / _KIND / name
