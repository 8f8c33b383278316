"""Rendering of the templates of this package (``templates/``).

Texts come from models, agents and files, so each is escaped for its format: HTML in pages and pictures, plain text in
Markdown.

Invariant: control characters are made visible, so no text looks shorter or different than it is.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from astuner_record.foreign import shown
from astuner_report.sentinel.statistics import percent

MARKS = {"good": "✓", "warning": "!", "error": "✗"}
"""Marks at the beginning of important statements."""
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!$&])")


def escaped(text: str) -> str:
    """Return one line of Markdown without any markup: no HTML, no link, no list item."""
    line = _SPECIAL.sub(r"\\\1", " ".join(shown(text).split()))
    line = line.replace("://", "\\://").replace("www.", "www\\.")  # some renderers turn these into links
    return re.sub(r"^(\d+)([.)])(?= |$)", r"\1\\\2", re.sub(r"^([-+=])(?= |$)", r"\\\1", line))


def code(text: str) -> Markup:
    """Return a command as a Markdown code block."""
    line = " ".join(shown(text).splitlines())
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return Markup(f"{fence}bash\n{line}\n{fence}")


def inline(text: str) -> Markup:
    """Return a command as inline code in a Markdown table."""
    line = " ".join(shown(text).split()).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return Markup(f"{fence} {line} {fence}" if len(fence) > 1 else f"`{line}`")


def lasted(alarm: Mapping[str, Any]) -> str:
    """Return how many steps an alarm held and their share of tokens, or an empty string if that is unknown."""
    if not alarm.get("held"):
        return ""
    return f"in {alarm['held']} of {alarm['of']} steps, {percent(alarm['tokens_share'])} of the tokens"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if hours < 2 else f"{hours:.1f} h"


_FILTERS = {
    "code": code,
    "inline": inline,
    "lasted": lasted,
    "duration": _duration,
    "count": lambda n: "" if n is None else f"{n:,.0f}",
    "json": lambda value: json.dumps(value, ensure_ascii=False) if value else "",
    "percent": percent,
    "utc": lambda seconds: time.strftime("started %Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)),
}


def rendered(template: str, **values: object) -> str:
    """Return a template filled with values, escaped by its suffix: ``.md``, ``.txt`` (not escaped), otherwise HTML."""
    from jinja2 import Environment, PackageLoader

    kind = template.rpartition(".")[2]
    is_text = kind in ("md", "txt")
    templates = Environment(
        loader=PackageLoader("astuner_report"),
        autoescape=kind != "txt",
        finalize={"md": _in_markdown, "txt": None}.get(kind, _plain),
        trim_blocks=is_text,
        lstrip_blocks=is_text,
        keep_trailing_newline=True,
    )
    templates.filters.update(_FILTERS)
    return templates.get_template(template).render(values)


def _plain(value: object) -> object:
    return shown(value) if type(value) is str else value  # Markup is part of the page and already safe


def _in_markdown(value: object) -> object:
    return value if isinstance(value, Markup) else Markup(escaped(str(value)))
