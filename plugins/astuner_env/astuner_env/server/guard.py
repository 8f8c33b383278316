"""Who may ask: whoever has the token, or, on loopback, the programs of this machine; a browser never.

A page from anywhere can have its reader's browser send requests to this machine: plainly, which the ``Origin`` and
``Sec-Fetch-Site`` headers tell, or under a name of its own that it lets point here (DNS rebinding), which the ``Host``
header tells.  Invariant: the service cannot be reached from another machine without a token.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping

from astuner.errors import ConfigError
from astuner_env.manager.refusal import Refusal

TOKEN_VARIABLE = "ASTUNER_ENV_TOKEN"
_SHORTEST_TOKEN = 16


class Guard:
    """Looks at a request's headers.

    :param host: where the service listens.
    :raises ConfigError: it would be open to others, or the token cannot be one.
    """

    def __init__(self, host: str, token: str = "") -> None:
        self._host = host.lower()
        self._token = token.encode()
        self._loopback = is_loopback(host)
        if not self._loopback and not token:
            raise ConfigError(
                f"{host} can be reached from other machines: give the service a token first, for example: "
                f"export {TOKEN_VARIABLE}=$(openssl rand -hex 16)"
            )
        if token and (len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token):
            raise ConfigError(
                f"{TOKEN_VARIABLE}: a token has at least {_SHORTEST_TOKEN} printable ASCII characters and no spaces; "
                "make one with: openssl rand -hex 16"
            )

    def check(self, headers: Mapping[str, str], *, public: bool = False) -> None:
        """Let a request pass.

        :param public: it needs no token.
        :raises Refusal: forbidden or unauthorized.
        """
        if "Origin" in headers or headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise Refusal("forbidden", "this service is for programs, and takes no requests from web pages")
        # A rebound name is of use only where no token is asked for; elsewhere the service may have any name.
        if self._loopback and not self._is_ours(headers.get("Host", "")):
            raise Refusal(
                "forbidden",
                "this service is for this machine, under the name localhost or an address such as 127.0.0.1",
            )
        if self._token and not public and not self._has_token(headers.get("Authorization", "")):
            raise Refusal(
                "unauthorized",
                f"this service wants its token: send the header 'Authorization: Bearer …'; clients take it from the "
                f"variable {TOKEN_VARIABLE}",
            )

    def _has_token(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        given_bytes = given.strip().encode("utf-8", "surrogateescape")
        return scheme.lower() == "bearer" and hmac.compare_digest(given_bytes, self._token)

    def _is_ours(self, host: str) -> bool:
        host = host.lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        return name == self._host or is_loopback(name)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
