"""Export one run as a single page with all its data, readable without the run or ASTuner.

The data are embedded as JSON that cannot close its element. The page may run only its own script and style, identified
by hashes, and makes no requests.
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
from astuner_view.verdict import verdict_facts

PLACEHOLDER = '<script type="application/json" id="astuner-data">null</script>'
FORMAT = 1
_MARK = '<meta name="generator" content="astuner view --export">'
_HEAD = re.compile(r"<head(\s[^>]*)?>", re.IGNORECASE)
_ELEMENT = re.compile(r"<(script|style)(\s[^>]*)?>(.*?)</\1\s*>", re.IGNORECASE | re.DOTALL)
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def export(run: Path, file: Path, where: Sequence[str], limit: int, static: Path = STATIC) -> dict[str, Any]:
    """Write a run as a page, with the newest ``limit`` episodes that meet all conditions.

    :returns: number of ``episodes`` written, ``of`` how many that match, the size in ``bytes``, and ``problems`` of the
        log, one sentence each.
    :raises ConfigError: a condition is invalid, or ``file`` exists and is not an exported page.
    :raises DataError: the built page is missing, or the log cannot be read.
    """
    if not file.parent.is_dir():
        raise ConfigError(f"--export {file}: the folder {file.parent} does not exist. Create it first")
    if file.is_dir() or (file.exists() and _MARK.encode() not in file.read_bytes()[:4096]):
        raise ConfigError(f"--export {file}: the file exists and is not an exported page. Choose another name")
    page = static / EXPORT
    if not page.is_file():
        raise DataError(missing(static, EXPORT))
    data = _data(run, where, limit)
    if where and not data["episodes"]:
        raise DataError(f"No episode matches every --where. The log contains {data['run']['episodes']:,} episodes")
    text = page_with(page.read_text(encoding="utf-8"), data)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError as e:
        raise DataError(f"Could not write {file}: {e.strerror or e}. Free some space or choose another file") from e
    finally:
        temporary.unlink(missing_ok=True)
    found = {"episodes": len(data["episodes"]), "of": data["episodes_total"]}
    return {**found, "bytes": file.stat().st_size, "problems": data["run"]["problems"]}


def page_with(page: str, data: Any) -> str:
    """Return the built page with ``data`` and its content security policy.

    :raises DataError: the page is not such a template.
    """
    if page.count(PLACEHOLDER) != 1 or _HEAD.search(page) is None:
        raise DataError(
            f"{EXPORT} is of another version, because its element for the data is missing. Build the page again"
        )
    rules = f'<meta http-equiv="Content-Security-Policy" content="{_policy(page)}">'
    before, after = page.split(PLACEHOLDER)
    before = _HEAD.sub(lambda head: f"{head[0]}\n{_MARK}\n{rules}", before, count=1)
    element = PLACEHOLDER.replace(">null<", f">{json_text(data).translate(_ESCAPES)}<")
    return before + element + after


def _policy(page: str) -> str:
    """Return a policy that allows only the scripts and styles in the page."""
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
        "run": facts | {"files": {}},  # the files are not exported
        "metrics": book.metrics().rows,
        "verdict": verdict_facts(run),
        **found,
    }


def _of_log(log: EpisodeLog | None, run: Path, where: Sequence[str], limit: int) -> dict[str, Any]:
    splits = [split.value for split in Split]
    if log is None:
        nothing: dict[str, Any] = {"count": 0, "groups": [], "episodes": [], "episodes_total": 0}
        return nothing | {"facets": NO_FACETS, "fields": [], "steps": {split: [] for split in splits}}
    newest = log.list(where, order="time", descending=True, limit=limit)[::-1]
    episodes = []
    for listed in newest:
        logged = log.read(listed)
        episodes.append(episode_json(listed, logged) | {"tokens": tokens_json(logged, run)})
    wanted = {listed.group_id for listed in newest}
    return {
        "count": log.count(),
        "facets": log.facets(),
        "fields": log.fields(),
        "steps": {split: log.steps(split) for split in splits},
        "groups": [group for group in log.groups(where) if group["group_id"] in wanted],
        "episodes": episodes,
        "episodes_total": log.count(where),
    }
