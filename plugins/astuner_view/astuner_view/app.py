"""The routes: what the page asks for, of which run, and who answers.

Invariant: a run's id is looked up in `Runs`, and an episode's in the log; neither becomes part of a path.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from astuner.contracts.errors import ConfigError, DataError
from astuner_record.episode_log.reader import ORDERS, EpisodeLog
from astuner_view.answers import BadRequest, NotFound, error_answer, json_answer
from astuner_view.book import FILES, Book, is_plain_file
from astuner_view.episodes import episode_json, facets_json, listed_json
from astuner_view.guard import HEALTH, Guard
from astuner_view.live import events
from astuner_view.log_thread import Counts, LogReader, LogThread, count
from astuner_view.runs import RunPlace, Runs
from astuner_view.static_files import STATIC, static_answer
from astuner_view.texts import Tokenizers
from astuner_view.tokens import tokens_json

MOST = 1000
"""Lines of a list in one answer."""
OPEN_LOGS = 16
"""That are kept open; the one that was not asked for longest is closed."""
_OF_A_FILE = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
"""A file of a run is shown, and can do nothing."""

log = logging.getLogger("astuner_view")


class OpenRun:
    """A run that somebody looks at."""

    def __init__(self, place: RunPlace, book: Book) -> None:
        self.book = book
        self.tokenizers = Tokenizers(place.path)
        self.log = LogThread(place.path)


class Viewer:
    """Answers the routes."""

    def __init__(self, runs: Runs, static: Path = STATIC, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self._runs, self._static, self._is_stopping = runs, static, is_stopping
        self._books: dict[RunPlace, Book] = {}
        self._open: OrderedDict[RunPlace, OpenRun] = OrderedDict()
        self._counts = Counts()

    def application(self) -> Starlette:
        run = "/api/runs/{run}"
        routes = [
            Route("/api/runs", partial(_answer, self.all_runs)),
            Route(run, partial(_answer, self.run)),
            Route(f"{run}/metrics", partial(_answer, self.metrics)),
            Route(f"{run}/steps", partial(_answer, self.steps)),
            Route(f"{run}/groups", partial(_answer, self.groups)),
            Route(f"{run}/episodes", partial(_answer, self.episodes)),
            Route(f"{run}/position", partial(_answer, self.position)),
            Route(f"{run}/episodes/{{episode}}", partial(_answer, self.episode)),
            Route(f"{run}/episodes/{{episode}}/tokens", partial(_answer, self.tokens)),
            Route(f"{run}/live", partial(_answer, self.live)),
            Route(f"{run}/files/{{name}}", partial(_answer, self.file)),
            Route(HEALTH, _healthy),
            Route("/{path:path}", partial(_answer, self.static)),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    def close(self) -> None:
        for opened in self._open.values():
            opened.log.close()
        self._open.clear()
        self._counts.close()

    async def all_runs(self, request: Request) -> Response:
        places = await asyncio.to_thread(self._runs.all)
        books = [(self._book(place), await self._counts.of(place.path)) for place in places.values()]
        found = await asyncio.to_thread(lambda: [book.facts(episodes) for book, episodes in books])
        newest_first = sorted(found, key=lambda facts: (facts["state"] != "running", -facts["updated"]))
        return await json_answer(request, {"runs": newest_first})

    async def run(self, request: Request) -> Response:
        opened = await self._of(request)

        def look(reader: LogReader) -> dict[str, Any]:
            facets = reader.ask(lambda log: facets_json(None if log is None else log.facets()))
            return opened.book.page(count(reader), facets, reader.problems())

        return await json_answer(request, await opened.log.ask(look))

    async def metrics(self, request: Request) -> Response:
        opened = await self._of(request)
        tail = await asyncio.to_thread(opened.book.metrics, request.query_params.get("cursor", ""))
        return await json_answer(request, {"rows": tail.rows, "cursor": tail.cursor, "reset": tail.reset})

    async def steps(self, request: Request) -> Response:
        split = request.query_params.get("split", "train")
        found = await self._ask(request, lambda log: log.steps(split), [])
        return await json_answer(request, {"steps": [asdict(step) for step in found]})

    async def groups(self, request: Request) -> Response:
        where, offset, limit = _where(request), _number(request, "offset", 0), _limit(request)

        def look(log: EpisodeLog) -> dict[str, Any]:
            found = log.groups(where, limit=limit, offset=offset)
            return {"total": log.count_groups(where), "groups": [asdict(group) for group in found]}

        return await json_answer(request, await self._ask(request, look, {"total": 0, "groups": []}))

    async def episodes(self, request: Request) -> Response:
        where, offset, limit = _where(request), _number(request, "offset", 0), _limit(request)
        order, descending = _order(request)

        def look(log: EpisodeLog) -> dict[str, Any]:
            found = log.list(where, order=order, descending=descending, limit=limit, offset=offset)
            return {"total": log.count(where), "offset": offset, "episodes": [listed_json(one) for one in found]}

        return await json_answer(request, await self._ask(request, look, {"total": 0, "offset": 0, "episodes": []}))

    async def position(self, request: Request) -> Response:
        where, (order, descending) = _where(request), _order(request)
        episode = request.query_params.get("episode", "")

        def look(log: EpisodeLog) -> int | None:
            return log.position(episode, where, order=order, descending=descending)

        return await json_answer(request, {"index": await self._ask(request, look, None)})

    async def episode(self, request: Request) -> Response:
        name = request.path_params["episode"]

        def look(log: EpisodeLog) -> dict[str, Any]:
            listed = log.find(name)
            return episode_json(listed, log.read(listed))

        return await json_answer(request, await self._ask(request, look))

    async def tokens(self, request: Request) -> Response:
        name, opened = request.path_params["episode"], await self._of(request)

        def look(log: EpisodeLog) -> dict[str, Any]:
            return tokens_json(log.read(name), opened.tokenizers)

        return await json_answer(request, await self._ask(request, look))

    async def live(self, request: Request) -> Response:
        place = await self._place(request)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        cursor = request.headers.get("last-event-id") or request.query_params.get("cursor", "")
        stream = events(self._book(place), lambda q: self._opened(place).log.ask(q), cursor, self._is_stopping)
        return StreamingResponse(stream, media_type="text/event-stream")

    async def file(self, request: Request) -> Response:
        place, name = await self._place(request), request.path_params["name"]
        if name not in FILES:
            raise NotFound(f"files that are shown are {', '.join(FILES)}")
        path = place.path / name
        if not is_plain_file(path):
            raise NotFound(f"there is no {name} in this run's folder")
        return FileResponse(path, media_type=FILES[name], headers={"Content-Security-Policy": _OF_A_FILE})

    async def static(self, request: Request) -> Response:
        if request.url.path.startswith("/api/"):
            raise NotFound("there is no such address; the runs are at /api/runs")
        return await asyncio.to_thread(static_answer, self._static, request.url.path)

    async def _place(self, request: Request) -> RunPlace:
        """The run that a request names."""
        place = await asyncio.to_thread(self._runs.get, request.path_params["run"])
        if place is None:
            raise NotFound("there is no such run; it may have been moved away")
        return place

    async def _of(self, request: Request) -> OpenRun:
        return self._opened(await self._place(request))

    def _opened(self, place: RunPlace) -> OpenRun:
        if place not in self._open:
            self._open[place] = OpenRun(place, self._book(place))
        self._open.move_to_end(place)
        while len(self._open) > OPEN_LOGS:
            self._open.popitem(last=False)[1].log.close()
        return self._open[place]

    def _book(self, place: RunPlace) -> Book:
        return self._books.setdefault(place, Book(place))

    async def _ask(self, request: Request, question: Callable[[EpisodeLog], Any], without: Any = NotFound) -> Any:
        """What the log of a request's run answers.

        :param without: the answer where there is no log; an error that says why, when left out.
        """

        def look(reader: LogReader) -> Any:
            def ask(log: EpisodeLog | None) -> Any:
                if log is not None:
                    return question(log)
                if without is NotFound:
                    raise NotFound(reader.why)
                return without

            return reader.ask(ask)

        return await (await self._of(request)).log.ask(look)


async def _answer(route: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
    """What a route gives back; what it raises is said in a sentence."""
    try:
        return await route(request)
    except (NotFound, DataError) as e:
        return error_answer(str(e), 404)
    except (BadRequest, ConfigError) as e:
        return error_answer(str(e).replace("--where ", ""), 400)
    except (OSError, sqlite3.Error) as e:  # the disk, or somebody who keeps the index locked
        log.warning("%s: %s", request.url.path, e)
        return error_answer(f"the run cannot be read: {e}", 500)
    except Exception as e:
        log.exception("the viewer failed at %s", request.url.path)
        return error_answer(f"the viewer failed ({type(e).__name__}); where it was started it says more", 500)


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return error_answer(str(error), status)


async def _healthy(request: Request) -> Response:
    return PlainTextResponse("OK")


def _where(request: Request) -> list[str]:
    return request.query_params.getlist("where")


def _limit(request: Request) -> int:
    limit = _number(request, "limit", 200)
    if limit > MOST:
        raise BadRequest(f"limit is at most {MOST}; go on with offset")
    return limit


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise BadRequest(f"{name} is a number from 0 on, not {text!r}")
    return int(text)


def _order(request: Request) -> tuple[str, bool]:
    order, descending = request.query_params.get("order", "written"), request.query_params.get("desc", "0")
    if order not in ORDERS:
        raise BadRequest(f"order is one of {', '.join(ORDERS)}, not {order!r}")
    if descending not in ("0", "1"):
        raise BadRequest(f"desc is 0 or 1, not {descending!r}")
    return order, descending == "1"


def make_app(
    runs: Runs,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str = "",
    static: Path = STATIC,
    is_stopping: Callable[[], bool] = lambda: False,
) -> tuple[ASGIApp, Callable[[], None]]:
    """The viewer of ``runs``, and what closes it; parameters and errors as `Guard`.

    :param is_stopping: whether those who listen for what happens are to be told nothing more.
    """
    viewer = Viewer(runs, static, is_stopping)
    return Guard(viewer.application(), host=host, port=port, token=token), viewer.close
