"""The built page: looked up among the files that are there."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import FileResponse, PlainTextResponse, Response

STATIC = Path(__file__).with_name("static")
EXPORT = "export.html"
"""The page for exports, which is not served."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}


def missing(folder: Path, name: str) -> str:
    """What to say where a part of the page is not there."""
    return (
        f"built assets are missing: {folder / name}; in a checkout, type: cd plugins/astuner_view/web && npm ci && "
        "npm run build; otherwise: pip install --force-reinstall astuner-view"
    )


def static_answer(folder: Path, path: str) -> Response:
    """The file for a request's path; 404 where there is none, and 500 where the page itself was not built."""
    name = path.lstrip("/") or "index.html"
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file() and p.suffix in _TYPES}
    found = None if name == EXPORT else files.get(name)
    if found is None:
        if name == "index.html":
            return PlainTextResponse(missing(folder, name), 500)
        return PlainTextResponse("there is no such page; the runs are at /", 404)
    return FileResponse(found, media_type=_TYPES[found.suffix])
