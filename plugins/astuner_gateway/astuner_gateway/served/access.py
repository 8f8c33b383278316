"""Who can use the server: its key, and the file that tells an application where it is.

Invariant: the key is in that file, which only this user can read, or in the person's own variable; in no message and
no log.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from astuner_gateway.access_file import write
from astuner_gateway.listening import own_key


def key_for(host: str, variable: str | None) -> str:
    """The key that requests must show: the one in the variable, or a new one.

    :raises ConfigError: others could reach the server and there is no key of the person's, or it is a bad one.
    """
    own = own_key(host, variable, host_at="--host", key_at="--key-env")
    return f"sk-astuner-{secrets.token_urlsafe(32)}" if own is None else own


@contextmanager
def access_file(port: int, access: Mapping[str, object]) -> Iterator[Path]:
    """``$ASTUNER_HOME/serve/PORT.json``, for this user only and for as long as the block runs."""
    path = write("serve", port, access)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
