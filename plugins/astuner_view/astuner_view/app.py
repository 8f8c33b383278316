"""The server: access control, routing, and the data of the page.

On loopback no token is needed, but a page from elsewhere must not gain access by pointing its own host name here (DNS
rebinding), and must not embed anything. On any other address every request needs the token: as ``Authorization:
Bearer``, or once as ``?token=`` of a link, which becomes a cookie that scripts cannot read.

Invariants: requests change nothing except a user's label of an episode, and only from the viewer's own page or a
program, never from another page: the request is JSON, for which browsers send a preflight and the origin. A run's ID is
looked up in `Runs`, and an episode's in the log; neither becomes part of a path.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import sqlite3
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlencode

from aiohttp import web

from astuner.contracts.errors import ConfigError, DataError
from astuner_gateway.endpoint.errors import ApiError
from astuner_gateway.gate import Gate, parse, read_body, refusal
from astuner_gateway.listening import check_open, is_key, keys_in
from astuner_record.episode_log.reader import NO_FACETS, ORDERS, EpisodeLog
from astuner_record.episode_log.rows import json_text
from astuner_record.exam import FILE, LABELS, MOST_WHY, add_label
from astuner_record.foreign import is_plain_file
from astuner_report.compare import Measured, measured
from astuner_view.book import FILES, Book, Tail
from astuner_view.comparing import FEWEST, MOST_METRICS, MOST_RUNS, overview, tasks
from astuner_view.episodes import episode_json, listed_json, tokens_json
from astuner_view.log_thread import LogReader, LogThread, count, counted, log_files
from astuner_view.page import STATIC, TYPES, missing, static_file
from astuner_view.runs import RunPlace, Runs, about
from astuner_view.verdict import verdict_facts

MOST = 1000
"""Maximum number of entries of a list in one response."""
OPEN_LOGS = 48
"""Number of logs kept open, twice as many as a comparison needs; the least recently used one is closed."""
MOST_MEASURED = 64
"""Number of compared validations kept in memory."""
COMPRESSED_FROM = 16 * 1024
"""Size in bytes from which responses are compressed."""
_LEVEL = 1
"""Compression level of gzip; on loopback, speed matters more than size."""
EVERY, QUIET = 0.5, 15.0
"""Seconds between two checks of a followed run, and seconds after which its state is sent again as a heartbeat."""
CONTENT_POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; object-src 'none'"
)
_OF_A_FILE = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
"""Policy of a run's file, which is displayed without any rights."""
RULES = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "astuner",
}
"""Headers of every response, unless it sets its own."""
_BESIDE = {401: {"WWW-Authenticate": "Bearer"}, 405: {"Allow": "GET, HEAD"}}
"""Status -> additional headers of an error response."""

log = logging.getLogger("astuner_view")
Answer = TypeVar("Answer", bound=web.StreamResponse)


class Viewer(Gate):
    """Answers all requests."""

    what = "page"
    most_bytes = 64 << 10

    def __init__(
        self,
        runs: Runs,
        *,
        host: str,
        port: int,
        token: str = "",
        static: Path = STATIC,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create the viewer.

        :param token: token that every request needs; required unless ``host`` is loopback.
        :param is_stopping: whether event streams should end.
        :raises ConfigError: the server would be accessible without a token, or the token is invalid.
        """
        super().__init__(host)
        check_open(host, token, host_at="--host", key_at="--token-env")
        self._token, self._cookie = token, f"astuner_view_{port}"  # cookies are of a host, whatever its ports
        self._runs, self._static, self._is_stopping = runs, static, is_stopping
        self._books: dict[RunPlace, Book] = {}
        self._measured: dict[tuple[object, ...], Measured] = {}
        """Run, step, how tasks are matched, and the state of its log -> its validation."""
        self._open: OrderedDict[RunPlace, LogThread] = OrderedDict()
        """Open logs of recently requested runs."""

    def close(self) -> None:
        for opened in self._open.values():
            opened.close()
        self._open.clear()

    # ---- who may ask, and what every answer carries ------------------------------------------------------------------

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        return _with_rules(await super().__call__(request))

    async def reply(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        headers = request.headers
        if request.method == "POST" and request.path.endswith("/label"):
            _check_own(request)
        elif request.method not in ("GET", "HEAD"):
            raise ApiError(405, "The viewer is read-only; send GET")
        if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and not _is_visit(request):
            raise ApiError(400, "Requests from other pages are refused")
        linked = request.query.getall("token", [])
        if self._token:
            given = [*keys_in(headers), request.cookies.get(self._cookie, ""), *linked]
            if not any([is_key(one, self._token) for one in given]):
                advice = "Open the link that `astuner view` printed, or send Authorization: Bearer TOKEN"
                raise ApiError(401, f"This viewer requires its token. {advice}")
        if not (self._token and linked):
            return await self._answer(request)
        cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
        if headers.get("Sec-Fetch-Site") == "cross-site":  # browsers would not send the cookie after a redirect
            answer = await self._answer(request)
            answer.headers["Set-Cookie"] = cookie
            return answer
        rest = urlencode([(name, value) for name, value in request.query.items() if name != "token"])
        path = "/" + request.rel_url.raw_path.lstrip("/")  # not //host, which would redirect to another host
        return web.Response(status=303, headers={"Set-Cookie": cookie, "Location": path + (f"?{rest}" if rest else "")})

    def error_of(self, error: Exception) -> ApiError:
        if isinstance(error, DataError):
            return ApiError(404, str(error))
        if isinstance(error, ConfigError):
            return ApiError(400, str(error).replace("--where ", ""))
        if isinstance(error, (ApiError, ConnectionResetError)):
            return super().error_of(error)
        if isinstance(error, (OSError, sqlite3.Error)):  # disk error, or another process locks the index
            log.warning("%s", error)
            return ApiError(500, f"Could not read the run: {error}")
        log.error("The viewer failed", exc_info=error)
        return ApiError(500, f"The viewer failed ({type(error).__name__}). See the terminal where it was started")

    def refuse(self, error: ApiError, request: web.BaseRequest, request_id: str) -> web.Response:
        answer = refusal(error, {"error": error.message}, request_id)
        answer.headers.update(_BESIDE.get(error.status, {}))
        return _with_rules(answer)

    # ---- what is asked for -------------------------------------------------------------------------------------------

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.rel_url.raw_path.lstrip("/")
        match [unquote(part) for part in path.split("/")]:
            case ["api", "runs"]:
                return await _json(request, {"runs": await self._all_runs()})
            case ["api", "runs", run, "episodes", episode, "label"] if request.method == "POST":
                return await _json(request, await self._label(request, await self._place(run), episode))
            case _ if request.method == "POST":
                raise _nowhere()
            case ["api", "compare"]:
                return await _json(request, await self._compare(request))
            case ["api", "compare", "tasks"]:
                return await _json(request, await self._compare_tasks(request))
            case ["api", "runs", run, "live"]:
                return await self._live(request, await self._place(run))
            case ["api", "runs", run, "files", name]:
                return await self._file(await self._place(run), name)
            case ["api", "runs", run, *what]:
                return await _json(request, await self._of_run(request, await self._place(run), what))
            case ["api", *_]:
                raise _nowhere()
        return await asyncio.to_thread(self._of_the_page, unquote(path) or "index.html")

    def _of_the_page(self, name: str) -> web.Response:
        found = static_file(self._static, name)
        if found is not None:
            return web.Response(body=found.read_bytes(), headers={"Content-Type": TYPES[found.suffix]})
        if name == "index.html":
            return web.Response(text=missing(self._static, name), status=500)
        return web.Response(text="Page not found. The list of runs is at /", status=404)

    async def _all_runs(self) -> list[dict[str, Any]]:
        places = await asyncio.to_thread(self._runs.all)
        books = [self._book(place) for place in places.values()]
        found = await asyncio.to_thread(lambda: [book.facts(counted(book.place.path)) for book in books])
        return sorted(found, key=lambda facts: (facts["state"] != "running", -facts["updated"]))  # the newest first

    async def _compare(self, request: web.BaseRequest) -> dict[str, Any]:
        books = await self._books_of(request, "run", FEWEST)
        names = list(dict.fromkeys(request.query.getall("metric", [])))
        if len(names) > MOST_METRICS:
            raise ApiError(400, f"At most {MOST_METRICS} metrics can be compared")
        return await asyncio.to_thread(overview, books, names)

    async def _compare_tasks(self, request: web.BaseRequest) -> dict[str, Any]:
        query, sides = request.query, {side: await self._books_of(request, side, 1) for side in "ab"}
        if (by := query.get("by", "task")) not in ("task", "text"):
            raise ApiError(400, f"by must be task or text, not {by!r}")

        async def of(side: str, book: Book) -> Measured:
            step = _number(request, f"step_{side}", 0) if f"step_{side}" in query else None
            run, opened = book.place.path, self._opened(book.place)
            await opened.ask(LogReader.fresh)  # creates SQLite's own files before they are identified
            key = (run, step, by, *map(about, log_files(run)))
            one = self._measured.get(key) or await _ask(opened, lambda log: measured(run, log, step=step, by=by))
            if len(self._measured) >= MOST_MEASURED:
                self._measured.clear()
            self._measured[key] = one
            return one

        draws = asyncio.create_task(asyncio.to_thread(import_module, "numpy"))  # concurrently with SQLite
        found = {side: await asyncio.gather(*(of(side, book) for book in books)) for side, books in sides.items()}
        await draws
        return await asyncio.to_thread(tasks, sides, found)

    async def _books_of(self, request: web.BaseRequest, name: str, fewest: int) -> list[Book]:
        """Return the books of the runs in a query parameter, each once."""
        ids = list(dict.fromkeys(request.query.getall(name, [])))
        if not fewest <= len(ids) <= MOST_RUNS:
            raise ApiError(400, f"{name} must list {fewest} to {MOST_RUNS} run IDs, not {len(ids)}")
        return [self._book(await self._place(run)) for run in ids]

    async def _of_run(self, request: web.BaseRequest, place: RunPlace, what: list[str]) -> Any:
        query, opened, book = request.query, self._opened(place), self._book(place)
        where = query.getall("where", [])
        match what:
            case []:

                def look(reader: LogReader) -> dict[str, Any]:
                    log = reader.fresh()
                    facets = NO_FACETS if log is None else log.facets()
                    return book.page(count(reader), facets, reader.problems())

                return await opened.ask(look)
            case ["verdict"]:
                return await asyncio.to_thread(verdict_facts, place.path)
            case ["fields"]:
                return {"fields": await _ask(opened, EpisodeLog.fields, [])}
            case ["metrics"]:
                return _rows_of(await asyncio.to_thread(book.metrics, query.get("cursor", "")))
            case ["steps"]:
                split = query.get("split", "train")
                steps = await _ask(opened, lambda log: log.steps(split), [])
                return {"steps": steps}
            case ["groups"]:
                offset, limit = _number(request, "offset", 0), _limit(request)

                def groups(log: EpisodeLog) -> dict[str, Any]:
                    found = log.groups(where, limit=limit, offset=offset)
                    return {"total": log.count_groups(where), "groups": found}

                return await _ask(opened, groups, {"total": 0, "groups": []})
            case ["episodes"]:
                offset, limit, (order, descending) = _number(request, "offset", 0), _limit(request), _order(request)

                def episodes(log: EpisodeLog) -> dict[str, Any]:
                    found = log.list(where, order=order, descending=descending, limit=limit, offset=offset)
                    listed = [listed_json(one, *exam) for one, exam in zip(found, log.exams(found), strict=True)]
                    return {"total": log.count(where), "offset": offset, "episodes": listed}

                return await _ask(opened, episodes, {"total": 0, "offset": 0, "episodes": []})
            case ["position"]:
                wanted, (order, descending) = query.get("episode", ""), _order(request)

                def position(log: EpisodeLog) -> int | None:
                    return log.position(wanted, where, order=order, descending=descending)

                return {"index": await _ask(opened, position, None)}
            case ["episodes", name]:
                return await _ask(opened, lambda log: episode_json(listed := log.find(name), log.read(listed)))
            case ["episodes", name, "tokens"]:
                return await _ask(opened, lambda log: tokens_json(log.read(name), place.path))
        raise _nowhere()

    async def _label(self, request: web.BaseRequest, place: RunPlace, episode: str) -> dict[str, Any]:
        """Write a user's label of an episode."""
        said = parse(await read_body(request))
        label, why = said.get("label"), said.get("why", "")
        if label not in (*LABELS, "") or not isinstance(why, str) or len(why) > MOST_WHY:
            allowed = f"{', '.join(LABELS)} or empty (to remove it)"
            raise ApiError(400, f"label must be {allowed}; why must be text of at most {MOST_WHY:,} characters")

        def write(log: EpisodeLog) -> dict[str, Any]:
            try:
                add_label(place.path, log.find(episode).id, episode, label, why)
            except OSError as e:
                raise ApiError(409, f"Could not write {FILE} of this run: {e.strerror or e}") from None
            return {"label": label, "why": why if label else ""}

        found: dict[str, Any] = await _ask(self._opened(place), write)
        return found

    async def _file(self, place: RunPlace, name: str) -> web.FileResponse:
        if name not in FILES:
            raise ApiError(404, f"This file is not served. Available: {', '.join(FILES)}")
        path = place.path / name
        if not is_plain_file(path):
            raise ApiError(404, f"{name} does not exist in this run's folder")
        headers = {"Content-Type": TYPES[path.suffix], "Content-Security-Policy": _OF_A_FILE}
        return web.FileResponse(path, headers=headers)  # streams the file, which may exceed the memory

    async def _live(self, request: web.BaseRequest, place: RunPlace) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", **RULES})
        await answer.prepare(request)
        if request.method == "GET":
            cursor = request.headers.get("Last-Event-ID") or request.query.get("cursor", "")
            async for event in self._events(place, cursor):
                await answer.write(event.encode())
        return answer

    async def _events(self, place: RunPlace, cursor: str) -> AsyncIterator[str]:
        """Yield the events of a run as server-sent events, until it ends, the server stops, or the client disconnects.

        :param cursor: end of the client's metrics; "" for all of them.
        """
        book = self._book(place)
        yield "retry: 2000\n\n"
        alarms = (await asyncio.to_thread(book.alarms)).cursor
        said: dict[str, Any] = {}
        said_at = 0.0
        first = True
        while not self._is_stopping():
            # The state first: no row is missed at the end.
            status = await self._opened(place).ask(lambda reader: book.status(count(reader)))
            metrics = await asyncio.to_thread(book.metrics, cursor)
            if metrics.rows or (metrics.reset and (first or cursor)):
                yield _event("metrics", _rows_of(metrics), metrics.cursor)
            cursor, first = metrics.cursor, False
            new = await asyncio.to_thread(book.alarms, alarms)
            for alarm in new.rows if not new.reset or not alarms else ():  # a rewound file contains no new alarms
                yield _event("alarm", alarm)
            alarms = new.cursor
            if status != said or time.monotonic() - said_at >= QUIET:
                yield _event("status", status)
                said, said_at = status, time.monotonic()
            if status["state"] == "ended":
                yield _event("end", {})
                return
            await asyncio.sleep(EVERY)

    # ---- the runs ----------------------------------------------------------------------------------------------------

    async def _place(self, run: str) -> RunPlace:
        """Return the run with this ID."""
        place = await asyncio.to_thread(self._runs.get, run)
        if place is None:
            raise ApiError(404, "Run not found; it may have been moved or deleted")
        return place

    def _opened(self, place: RunPlace) -> LogThread:
        if place not in self._open:
            self._open[place] = LogThread(place.path)
        self._open.move_to_end(place)
        while len(self._open) > OPEN_LOGS:
            self._open.popitem(last=False)[1].close()
        return self._open[place]

    def _book(self, place: RunPlace) -> Book:
        return self._books.setdefault(place, Book(place))


def _nowhere() -> ApiError:
    return ApiError(404, "Address not found. The list of runs is at /api/runs")


def _ask(opened: LogThread, question: Callable[[EpisodeLog], Any], *without: Any) -> Awaitable[Any]:
    """Return the answer of a run's log.

    :param without: the answer if the log cannot be read; if omitted, raise an error with the reason.
    """

    def look(reader: LogReader) -> Any:
        log = reader.fresh()
        if log is not None:
            return question(log)
        if not without:
            raise ApiError(404, reader.why)
        return without[0]

    return opened.ask(look)


def _with_rules(answer: Answer) -> Answer:
    if not answer.prepared:
        for name, value in RULES.items():
            answer.headers.setdefault(name, value)
    return answer


def _check_own(request: web.BaseRequest) -> None:
    """Check that a change does not come from another page.

    :raises ApiError: it may.
    """
    headers = request.headers
    host = headers.get("Host", "")
    is_own = headers.get("Origin", f"://{host}").partition("://")[2] == host
    if not is_own or headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
        raise ApiError(403, "Changes from other pages are refused")
    if request.content_type != "application/json":
        raise ApiError(415, "Send the label as application/json")


def _is_visit(request: web.BaseRequest) -> bool:
    """Return whether the user followed a link from another page."""
    how = request.headers.get("Sec-Fetch-Mode"), request.headers.get("Sec-Fetch-Dest")
    return how == ("navigate", "document") and not request.path.startswith("/api/")


async def _json(request: web.BaseRequest, data: Any) -> web.Response:
    """Return ``data`` as a JSON response, encoded and compressed in a thread."""

    def made() -> web.Response:
        body = json_text(data).encode()
        headers = {"Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("Accept-Encoding", "") and len(body) >= COMPRESSED_FROM:
            body, headers["Content-Encoding"] = gzip.compress(body, _LEVEL), "gzip"
        return web.Response(body=body, content_type="application/json", headers=headers)

    return await asyncio.to_thread(made)


def _rows_of(tail: Tail) -> dict[str, Any]:
    return {"rows": tail.rows, "cursor": tail.cursor, "reset": tail.reset}


def _event(name: str, data: Any, identity: str = "") -> str:
    head = f"id: {identity}\n" if identity else ""
    return f"{head}event: {name}\ndata: {json_text(data)}\n\n"


def _limit(request: web.BaseRequest) -> int:
    limit = _number(request, "limit", 200)
    if limit > MOST:
        raise ApiError(400, f"limit must be at most {MOST}; use offset for more")
    return limit


def _number(request: web.BaseRequest, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise ApiError(400, f"{name} must be a number from 0, not {text!r}")
    return int(text)


def _order(request: web.BaseRequest) -> tuple[str, bool]:
    order, descending = request.query.get("order", "written"), request.query.get("desc", "0")
    if order not in ORDERS:
        raise ApiError(400, f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    if descending not in ("0", "1"):
        raise ApiError(400, f"desc must be 0 or 1, not {descending!r}")
    return order, descending == "1"
