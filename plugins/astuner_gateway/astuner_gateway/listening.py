"""Provide what every ASTuner server needs: bind a port, check access and keep malformed requests out of the log.

Invariant: a host counts as loopback only if no other machine can reach it; in doubt it does not.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Mapping

from astuner.contracts.errors import ConfigError

BACKLOG = 1024
SHORTEST_TOKEN = 16


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_own_name(header: str, host: str) -> bool:
    """Return whether the ``Host`` header of a request names this machine, for a server on loopback.

    A web page can reach such a server under its own name by pointing it to this machine (DNS rebinding).

    :param host: Address of the server.
    """
    name = header.lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return name == host.lower() or is_loopback(name)


def keys_in(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return the keys in ``x-api-key`` and ``Authorization: Bearer``; empty strings if absent."""
    scheme, _, bearer = headers.get("Authorization", "").partition(" ")
    return headers.get("x-api-key", "").strip(), bearer.strip() if scheme.lower() == "bearer" else ""


def is_key(given: str, key: str) -> bool:
    """Compare two keys in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode())


def has_key(headers: Mapping[str, str], key: str) -> bool:
    """Return whether a request contains the key."""
    return any([is_key(given, key) for given in keys_in(headers)])


def is_token(text: str) -> bool:
    """Return whether ``text`` can be a server's token: long enough, and only characters that a header can contain."""
    return len(text) >= SHORTEST_TOKEN and text.isascii() and text.isprintable() and " " not in text


TOKEN_RULE = f"at least {SHORTEST_TOKEN} printable ASCII characters and no spaces; make one with: openssl rand -hex 16"
"""Description of valid tokens for messages."""


def check_open(host: str, key: str, *, host_at: str, key_at: str, variable: str = "") -> None:
    """Check that a server may listen on a host with this key.

    :param key: Key that every request must contain; empty for none.
    :param host_at: Config key or option of the host, for messages; likewise ``key_at``.
    :param variable: Environment variable of the key.
    :raises ConfigError: Other machines could reach the server without a key, or the key is invalid.
    """
    if not key and not is_loopback(host):
        raise ConfigError(
            f"{host_at}: other machines can reach {host}. Set {key_at} to the name of a variable with a key, or keep "
            "the host 127.0.0.1"
        )
    if key and not is_token(key):
        raise ConfigError(f"{key_at}: the key{f' in {variable}' if variable else ''} must have {TOKEN_RULE}")


def own_key(host: str, variable: str | None, *, host_at: str, key_at: str) -> str | None:
    """Return the user's own key for a server; None if none is configured or needed.

    :param variable: Environment variable with the key; None if not configured.
    :raises ConfigError: The variable is not set, or as in `check_open`, with its parameters.
    """
    key = "" if variable is None else os.environ.get(variable, "")
    if variable is not None and not key:
        raise ConfigError(
            f"{key_at}: the variable {variable} is not set. Set it, for example: "
            f"export {variable}=$(openssl rand -hex 16)"
        )
    check_open(host, key, host_at=host_at, key_at=key_at, variable=variable or "")
    return key or None


def key_for(host: str, variable: str | None, *, host_at: str, key_at: str, prefix: str) -> str:
    """Return `own_key`, or a new key that starts with ``prefix``; parameters and errors are the same."""
    own = own_key(host, variable, host_at=host_at, key_at=key_at)
    return f"{prefix}-{secrets.token_urlsafe(32)}" if own is None else own


def bind(host: str, port: int, *, listen: bool = False) -> socket.socket:
    """Return a bound socket for an event loop.

    :param port: Port; 0 selects a free one.
    :param listen: Accept connections immediately; they wait in the backlog.
    :raises ConfigError: The address is not available.
    """
    if not 0 <= port < 1 << 16:  # the C library would silently truncate it
        raise ConfigError(f"cannot listen on port {port}: valid ports are 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as e:  # UnicodeError: not a valid host name
        raise ConfigError(f"cannot listen on {host!r}: {e}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        if listen:
            bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError as e:
        bound.close()
        raise ConfigError(f"cannot listen on {host}, port {port}: {e.strerror}. Use port 0 for a free port") from None
    return bound


def reachable(host: str) -> str:
    """Return an address that other machines can use, for a server that listens on all addresses."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    family, elsewhere = (socket.AF_INET, "192.0.2.1") if address.version == 4 else (socket.AF_INET6, "2001:db8::1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing, only selects the route
        try:
            probe.connect((elsewhere, 9))
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def url_of(host: str, listening: socket.socket) -> str:
    """Return the URL of a listening server as clients reach it, without a trailing slash."""
    name = reachable(host)
    return f"http://{f'[{name}]' if ':' in name else name}:{listening.getsockname()[1]}"


def quiet_http_logger(name: str) -> logging.Logger:
    """Return the logger ``name``, which logs malformed requests without the traceback, because that quotes headers."""
    logger = logging.getLogger(name)
    if _without_traceback not in logger.filters:
        logger.addFilter(_without_traceback)
    return logger


def _without_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and (kind := record.exc_info[0]) is not None:
        record.msg, record.args = f"{record.getMessage()}: not a valid HTTP request ({kind.__name__})", ()
    record.exc_info = None
    return True
