"""Who may ask, and what every answer carries.

On loopback nobody needs a key, but a page from elsewhere must not come in under a name of its own that it lets point
here (DNS rebinding), nor embed what is here.  On any other address every request needs the token: as ``Authorization:
Bearer``, or once as ``?token=`` of a link, which becomes a cookie that scripts do not see.  Invariant: nothing but GET
and HEAD is ever answered with data, so that no other page can change anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astuner.contracts.errors import ConfigError
from astuner_gateway.listening import check_open, is_key, is_loopback, is_own_name, keys_in
from astuner_view.answers import error_answer

HEALTH = "/healthz"
"""Whether the server answers; needs no token, and says nothing."""
CONTENT_POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; object-src 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Unless an answer has its own."""


class Guard:
    """Stands before the application."""

    def __init__(self, app: ASGIApp, *, host: str, port: int, token: str = "") -> None:
        """
        :param token: what every request must bring; required unless ``host`` is loopback.
        :raises ConfigError: the server would be open to others, or the token cannot be one.
        """
        self._app, self._host = app, host
        self._is_local = is_loopback(host)
        if not self._is_local and not token:
            raise ConfigError(f"{host} can be reached from other machines, so the viewer needs a token there")
        check_open(host, token, host_at="--host", key_at="--token-env")
        self._token = token
        self._cookie = f"astuner_view_{port}"  # cookies are of a host, whatever its ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(scope) or self._entrance(scope)
        await (answer or self._app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """Why a request is not let in, if it is not."""
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return error_answer("the viewer only shows; send GET", 405, {"Allow": "GET, HEAD"})
        if self._is_local and not is_own_name(headers.get("host", ""), self._host):
            return error_answer("this page is for this machine: open it under localhost or 127.0.0.1", 400)
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not _is_visit(scope, headers):
            return error_answer("other pages do not get anything from here", 400)
        if self._token and scope["path"] != HEALTH and not self._has_token(scope, headers):
            advice = "open the address that `astuner view` printed, with its token, or send Authorization: Bearer TOKEN"
            return error_answer(f"this viewer wants its token: {advice}", 401, {"WWW-Authenticate": "Bearer"})
        return None

    def _entrance(self, scope: Scope) -> ASGIApp | None:
        """For a link with the token in it: the cookie, and the same address without it."""
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if not self._token or not any(name == "token" for name, _ in query):
            return None
        rest = urlencode([pair for pair in query if pair[0] != "token"])
        cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
        if Headers(scope=scope).get("sec-fetch-site") == "cross-site":
            return _with_header(self._app, "Set-Cookie", cookie)  # browsers would not send it where they are led to
        path = "/" + scope["path"].lstrip("/")  # not //host, which would be somewhere else
        return RedirectResponse(path + (f"?{rest}" if rest else ""), 303, {"Set-Cookie": cookie})

    def _has_token(self, scope: Scope, headers: Headers) -> bool:
        given = [*keys_in(headers), _cookies(headers.get("cookie", "")).get(self._cookie, "")]
        given += [value for name, value in parse_qsl(scope["query_string"].decode("latin-1")) if name == "token"]
        return any([is_key(one, self._token) for one in given])


def _is_visit(scope: Scope, headers: Headers) -> bool:
    """Whether somebody followed a link from another page to this one."""
    is_page = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return is_page and not scope["path"].startswith("/api/")


def _cookies(header: str) -> Mapping[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(header).items()}
    except CookieError:
        return {}


def _with_header(app: ASGIApp, name: str, value: str) -> ASGIApp:
    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append(name, value)
            await send(message)

        await app(scope, receive, add)

    return wrapped
