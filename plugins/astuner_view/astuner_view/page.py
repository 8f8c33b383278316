"""The built page: its files, and what they are."""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).with_name("static")
EXPORT = "export.html"
"""The page for exports, which is not served."""
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
"""The kinds of files that are served: of the page, and of a run's folder."""


def missing(folder: Path, name: str) -> str:
    """What to say where a part of the page is not there."""
    return (
        f"built assets are missing: {folder / name}; in a checkout, type: cd plugins/astuner_view/web && npm ci && "
        "npm run build; otherwise: pip install --force-reinstall astuner-view"
    )


def static_file(folder: Path, name: str) -> Path | None:
    """The file of that name, which is looked up among those that are there; None: there is none."""
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file() and p.suffix in TYPES}
    return None if name == EXPORT else files.get(name)
