"""How each environment runs on this machine: ``$ASTUNER_HOME/environments/NAME.json``.

``astuner env setup`` writes it and the service reads it.  Invariant: what is read decides which program is started, so
it is taken from a file of this user's only; a reader sees a whole file or none; a name never becomes another path.
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
    """The settings of environment ``name``; the defaults where nothing was set up.

    :raises ConfigError: ``name`` cannot be the name of an environment.
    :raises RunError: what is there cannot be used; says what to do.
    """
    file = file_of(name)
    try:
        with file.open("rb") as f:
            status = os.fstat(f.fileno())
            others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if status.st_uid not in (os.getuid(), 0) or others_write:
                who = "others may write it" if others_write else "it belongs to another user"
                what = f"{file} is not used, since {who}, and it says which program to start"
                raise RunError(f"{what}; type: rm {file}")
            text = f.read()
    except FileNotFoundError:
        return EnvironmentSettings()
    except OSError as e:
        raise RunError(f"{file} cannot be read: {e.strerror}; mend that, or: astuner env setup {name}") from None
    try:
        return _KEPT.validate_json(text, strict=True)
    except ValidationError as e:
        problem = e.errors()[0]
        why = ": ".join(map(str, (*problem["loc"], problem["msg"])))
        what = f"{file} is not what `astuner env setup` wrote"
        raise RunError(f"{what} ({why}); type: astuner env setup {name}") from None


def save(name: str, settings: EnvironmentSettings) -> Path:
    """Keep the settings of environment ``name``, for nobody else to read.

    :raises ConfigError: ``name`` cannot be the name of an environment.
    :raises RunError: the folder cannot be written.
    """
    file = file_of(name)
    try:
        access_file.write(_KIND, name, _KEPT.dump_python(settings))
    except OSError as e:
        raise RunError(f"cannot write {file}: {e.strerror}; set ASTUNER_HOME to a folder of your own") from None
    return file


def is_saved(name: str) -> bool:
    """Whether ``astuner env setup`` was ever finished for ``name``; raises as `file_of`."""
    return file_of(name).exists()


def file_of(name: str) -> Path:
    """Where the settings are; raises as `folder_of`."""
    return folder_of(name).with_name(f"{name}.json")


def folder_of(name: str) -> Path:
    """What belongs to environment ``name`` on this machine: its interpreter and its data. May not exist.

    :raises ConfigError: ``name`` cannot be the name of an environment.
    """
    # a name that ends like our own files would be taken for one of them
    if not _NAME.fullmatch(name) or name.endswith((".json", ".tmp")):
        raise ConfigError(
            f"{name!r} cannot be the name of an environment: letters, digits, '.', '-' and '_', at most 128, no '.' or "
            "'-' at the beginning; `astuner env list` shows those there are"
        )
    return astuner_home().absolute() / _KIND / name
