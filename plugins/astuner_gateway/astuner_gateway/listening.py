"""What every server of ours needs before it answers: a port, who can reach it, and what it logs of nonsense.

Invariant: a host counts as loopback only where no other machine can reach it; in doubt it does not.
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
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_own_name(header: str, host: str) -> bool:
    """Whether a request's ``Host`` header names this machine, for a server that listens on loopback.

    A web page can reach such a server under a name of its own that it lets point here (DNS rebinding).

    :param host: where the server listens.
    """
    name = header.lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return name == host.lower() or is_loopback(name)


def keys_in(headers: Mapping[str, str]) -> tuple[str, str]:
    """The keys that a request shows: as ``x-api-key`` and as ``Authorization: Bearer``; empty where it has none."""
    scheme, _, bearer = headers.get("Authorization", "").partition(" ")
    return headers.get("x-api-key", "").strip(), bearer.strip() if scheme.lower() == "bearer" else ""


def is_key(given: str, key: str) -> bool:
    """Whether they are the same; how long that takes says nothing about either."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode())


def has_key(headers: Mapping[str, str], key: str) -> bool:
    """Whether a request shows the key."""
    return any([is_key(given, key) for given in keys_in(headers)])


def is_token(text: str) -> bool:
    """Whether ``text`` can be a server's token: long enough, and nothing that a header cannot have."""
    return len(text) >= SHORTEST_TOKEN and text.isascii() and text.isprintable() and " " not in text


TOKEN_RULE = f"at least {SHORTEST_TOKEN} printable ASCII characters and no spaces; make one with: openssl rand -hex 16"
"""What `is_token` wants, for a message."""


def check_open(host: str, key: str, *, host_at: str, key_at: str, variable: str = "") -> None:
    """Whether a server may listen there with this key.

    :param key: what every request must bring; empty: nothing.
    :param host_at: where the host was said, for a message: a key of the config, or an option; so too ``key_at``.
    :param variable: the environment variable that the key was in.
    :raises ConfigError: others could reach it and there is no key, or it is a bad one.
    """
    if not key and not is_loopback(host):
        raise ConfigError(
            f"{host_at}: {host} can be reached from other machines; set {key_at} to the name of a variable with a "
            "key of your own, or leave the host at 127.0.0.1"
        )
    if key and not is_token(key):
        raise ConfigError(f"{key_at}: the key{f' in {variable}' if variable else ''} must have {TOKEN_RULE}")


def own_key(host: str, variable: str | None, *, host_at: str, key_at: str) -> str | None:
    """The key of the person's that a server is to ask for; None where they named none and need none.

    :param variable: the environment variable that holds it; None: they named none.
    :raises ConfigError: the variable is not set, or as `check_open`, with its parameters.
    """
    key = "" if variable is None else os.environ.get(variable, "")
    if variable is not None and not key:
        raise ConfigError(
            f"{key_at}: the variable {variable} is not set; write for example: "
            f"export {variable}=$(openssl rand -hex 16)"
        )
    check_open(host, key, host_at=host_at, key_at=key_at, variable=variable or "")
    return key or None


def key_for(host: str, variable: str | None, *, host_at: str, key_at: str, prefix: str) -> str:
    """`own_key`, or a new one that begins with ``prefix``; parameters and errors as there."""
    own = own_key(host, variable, host_at=host_at, key_at=key_at)
    return f"{prefix}-{secrets.token_urlsafe(32)}" if own is None else own


def bind(host: str, port: int, *, listen: bool = False) -> socket.socket:
    """A socket for an event loop.

    :param port: 0 takes a free one.
    :param listen: take connections at once; they wait in the backlog.
    :raises ConfigError: the address cannot be had.
    """
    if not 0 <= port < 1 << 16:  # the C library would quietly take what is left of it
        raise ConfigError(f"cannot listen on port {port}: ports go from 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as e:  # the latter: no name of a host
        raise ConfigError(f"cannot listen on {host!r}: {e}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        if listen:
            bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError as e:
        bound.close()
        raise ConfigError(f"cannot listen on {host}, port {port}: {e.strerror}; port 0 takes a free one") from None
    return bound


def reachable(host: str) -> str:
    """An address that others can use, where a server listens on all of them."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    family, elsewhere = (socket.AF_INET, "192.0.2.1") if address.version == 4 else (socket.AF_INET6, "2001:db8::1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing: it only asks for the way there
        try:
            probe.connect((elsewhere, 9))
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def url_of(host: str, listening: socket.socket) -> str:
    """Of a server that listens, as others reach it; without a slash at its end."""
    name = reachable(host)
    return f"http://{f'[{name}]' if ':' in name else name}:{listening.getsockname()[1]}"


def quiet_http_logger(name: str) -> logging.Logger:
    """The logger ``name`` for what aiohttp says of malformed requests, without the traceback, which quotes headers."""
    logger = logging.getLogger(name)
    if _without_traceback not in logger.filters:
        logger.addFilter(_without_traceback)
    return logger


def _without_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and (kind := record.exc_info[0]) is not None:
        record.msg, record.args = f"{record.getMessage()}: no HTTP that can be read ({kind.__name__})", ()
    record.exc_info = None
    return True
