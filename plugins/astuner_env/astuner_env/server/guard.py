"""Who may ask: whoever has the token, or, on loopback, the programs of this machine; a browser never.

A page from anywhere can have its reader's browser send requests to this machine: plainly, which the ``Origin`` and
``Sec-Fetch-Site`` headers tell, or under a name of its own that it lets point here (DNS rebinding), which the ``Host``
header tells.  Invariant: the service cannot be reached from another machine without a token.
"""

from __future__ import annotations

from collections.abc import Mapping

from astuner.contracts.errors import ConfigError
from astuner_env.env_service.server import TOKEN_VARIABLE
from astuner_env.manager.refusal import Refusal
from astuner_gateway.listening import check_open, has_key, is_loopback, is_own_name


class Guard:
    """Looks at a request's headers.

    :param host: where the service listens.
    :raises ConfigError: it would be open to others, or the token cannot be one.
    """

    def __init__(self, host: str, token: str = "") -> None:
        self._host = host
        self._token = token
        self.is_local = is_loopback(host)
        """Whether only this machine reaches it."""
        if not self.is_local and not token:
            raise ConfigError(
                f"{host} can be reached from other machines: give the service a token first, for example: "
                f"export {TOKEN_VARIABLE}=$(openssl rand -hex 16)"
            )
        check_open(host, token, host_at="--host", key_at=TOKEN_VARIABLE)

    def check(self, headers: Mapping[str, str], *, public: bool = False) -> None:
        """Let a request pass.

        :param public: it needs no token.
        :raises Refusal: forbidden or unauthorized.
        """
        if "Origin" in headers or headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise Refusal("forbidden", "this service is for programs, and takes no requests from web pages")
        # A rebound name is of use only where no token is asked for; elsewhere the service may have any name.
        if self.is_local and not is_own_name(headers.get("Host", ""), self._host):
            raise Refusal(
                "forbidden",
                "this service is for this machine, under the name localhost or an address such as 127.0.0.1",
            )
        if self._token and not public and not has_key(headers, self._token):
            raise Refusal(
                "unauthorized",
                f"this service wants its token: send the header 'Authorization: Bearer …'; clients take it from the "
                f"variable {TOKEN_VARIABLE}",
            )
