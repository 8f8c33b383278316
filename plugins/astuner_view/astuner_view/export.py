"""One run as one page: the built page with everything in it, for somebody who has neither the run nor ASTuner.

The data stand in the page as JSON in which nothing can end the element that they are in.  The page may run its own
script and style, which are named by their hashes, and reach nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import astuner
from astuner.contracts.errors import ConfigError, DataError
from astuner.contracts.types import Split
from astuner_record.episode_log.reader import NO_FACETS, EpisodeLog
from astuner_record.episode_log.rows import json_text
from astuner_view.book import Book
from astuner_view.episodes import episode_json, tokens_json
from astuner_view.log_thread import LogReader
from astuner_view.page import EXPORT, STATIC, missing
from astuner_view.runs import Runs

PLACEHOLDER = '<script type="application/json" id="astuner-data">null</script>'
FORMAT = 1
_MARK = '<meta name="generator" content="astuner view --export">'
_HEAD = re.compile(r"<head(\s[^>]*)?>", re.IGNORECASE)
_ELEMENT = re.compile(r"<(script|style)(\s[^>]*)?>(.*?)</\1\s*>", re.IGNORECASE | re.DOTALL)
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def export(run: Path, file: Path, where: Sequence[str], limit: int, static: Path = STATIC) -> dict[str, Any]:
    """Write a run, with the newest ``limit`` episodes that meet all conditions.

    :returns: how many ``episodes`` were written, ``of`` how many that meet them, in how many ``bytes``; and as
        ``problems`` what of the log could not be read, a sentence each.
    :raises ConfigError: a condition cannot be read, or ``file`` is something else than such a page, and is left alone.
    :raises DataError: the built page is not there, or the log cannot be read.
    """
    if not file.parent.is_dir():
        raise ConfigError(f"--export {file}: there is no folder {file.parent}; make it first")
    if file.is_dir() or (file.exists() and _MARK.encode() not in file.read_bytes()[:4096]):
        raise ConfigError(f"--export {file}: that is something else than an exported page; choose another name")
    page = static / EXPORT
    if not page.is_file():
        raise DataError(missing(static, EXPORT))
    data = _data(run, where, limit)
    if where and not data["episodes"]:
        raise DataError(f"no episode meets every --where; there are {data['run']['episodes']:,} in the log")
    text = page_with(page.read_text(encoding="utf-8"), data)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError as e:
        raise DataError(f"cannot write {file}: {e.strerror or e}; free space or name another file") from e
    finally:
        temporary.unlink(missing_ok=True)
    found = {"episodes": len(data["episodes"]), "of": data["episodes_total"]}
    return {**found, "bytes": file.stat().st_size, "problems": data["run"]["problems"]}


def page_with(page: str, data: Any) -> str:
    """The built page with ``data`` in it, and the rules of what it may do.

    :raises DataError: it is not such a page.
    """
    if page.count(PLACEHOLDER) != 1 or _HEAD.search(page) is None:
        raise DataError(f"{EXPORT} has no place for the data, so it is not of this ASTuner: build it again")
    rules = f'<meta http-equiv="Content-Security-Policy" content="{_policy(page)}">'
    before, after = page.split(PLACEHOLDER)
    before = _HEAD.sub(lambda head: f"{head[0]}\n{_MARK}\n{rules}", before, count=1)
    element = PLACEHOLDER.replace(">null<", f">{json_text(data).translate(_ESCAPES)}<")
    return before + element + after


def _policy(page: str) -> str:
    """What the page may do: run the scripts and styles that are in it, and nothing else."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for match in _ELEMENT.finditer(page):
        if "application/json" not in (match[2] or ""):
            digest = hashlib.sha256(match[3].replace("\r\n", "\n").encode()).digest()
            hashes[match[1].lower()].append(f"'sha256-{base64.b64encode(digest).decode()}'")
    scripts, styles = (" ".join(found) or "'none'" for found in hashes.values())
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; font-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _data(run: Path, where: Sequence[str], limit: int) -> dict[str, Any]:
    place = next(iter(Runs(run.parent, only=run).all().values()))
    book, reader = Book(place), LogReader(run, check=True)
    try:
        found = _of_log(reader.fresh(), run, where, limit)
        facts = book.page(found.pop("count"), found.pop("facets"), reader.problems())
    finally:
        reader.close()
    return {
        "format": FORMAT,
        "exported": time.time(),
        "astuner": astuner.__version__,
        "run": facts | {"files": {}},  # they are not in the page
        "metrics": book.metrics().rows,
        **found,
    }


def _of_log(log: EpisodeLog | None, run: Path, where: Sequence[str], limit: int) -> dict[str, Any]:
    splits = [split.value for split in Split]
    if log is None:
        nothing: dict[str, Any] = {"count": 0, "groups": [], "episodes": [], "episodes_total": 0}
        return nothing | {"facets": NO_FACETS, "steps": {split: [] for split in splits}}
    newest = log.list(where, order="time", descending=True, limit=limit)[::-1]
    episodes = []
    for listed in newest:
        logged = log.read(listed)
        episodes.append(episode_json(listed, logged) | {"tokens": tokens_json(logged, run)})
    wanted = {listed.group_id for listed in newest}
    return {
        "count": log.count(),
        "facets": log.facets(),
        "steps": {split: log.steps(split) for split in splits},
        "groups": [group for group in log.groups(where) if group["group_id"] in wanted],
        "episodes": episodes,
        "episodes_total": log.count(where),
    }
