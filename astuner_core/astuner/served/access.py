"""Who can use the server: its key, and the file that tells an application where it is.

Invariant: the key is in that file, which only this user can read, or in the person's own variable; in no message and
no log.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from astuner.access_file import write
from astuner.errors import ConfigError
from astuner.listening import TOKEN_RULE, is_loopback, is_token


def key_for(host: str, variable: str | None) -> str:
    """The key that requests must show: the one in the variable, or a new one.

    :raises ConfigError: others could reach the server and there is no key of the person's, or it is a bad one.
    """
    if variable is None:
        if not is_loopback(host):
            raise ConfigError(
                f"--host {host} can be reached from other machines; name a variable with a key of your own, "
                "--key-env VAR, or leave the host at 127.0.0.1"
            )
        return f"sk-astuner-{secrets.token_urlsafe(32)}"
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(
            f"--key-env: the variable {variable} is not set; write for example: "
            f"export {variable}=$(openssl rand -hex 16)"
        )
    if not is_token(key):
        raise ConfigError(f"--key-env: the key in {variable} must have {TOKEN_RULE}")
    return key


@contextmanager
def access_file(port: int, access: Mapping[str, object]) -> Iterator[Path]:
    """``$ASTUNER_HOME/serve/PORT.json``, for this user only and for as long as the block runs."""
    path = write("serve", port, access)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
