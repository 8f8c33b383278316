"""The files of the built page and their content types."""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).with_name("static")
EXPORT = "export.html"
"""Template of exported pages; it is not served."""
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    **dict.fromkeys((".txt", ".md", ".yaml", ".log"), "text/plain; charset=utf-8"),
}
"""Content types of served files: of the page, and of a run's folder."""


def missing(folder: Path, name: str) -> str:
    """Return the message for a missing part of the page."""
    return (
        f"The built page is missing: {folder / name}. Run pip install --force-reinstall astuner-view, or in a "
        "checkout: cd plugins/astuner_view/web && npm ci && npm run build"
    )


def static_file(folder: Path, name: str) -> Path | None:
    """Return the file with this name from the existing files; None if there is no such file."""
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file() and p.suffix in TYPES}
    return None if name == EXPORT else files.get(name)
