"""What this package writes from templates (``templates/``).

Texts come from models, agents and files, so each is escaped where it stands: in a page and a picture as HTML, in
Markdown so that nothing in it is markup.  Invariant: no text shows less than all that it is.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from astuner_record.foreign import shown

MARKS = {"good": "✓", "warning": "!", "error": "✗"}
"""What a person must not miss begins with one of them."""
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!$&])")


def escaped(text: str) -> str:
    """One line of Markdown in which nothing is markup, not even HTML, a link, or the beginning of a list."""
    line = _SPECIAL.sub(r"\\\1", " ".join(shown(text).split()))
    line = line.replace("://", "\\://").replace("www.", "www\\.")  # which some would make links of
    return re.sub(r"^(\d+)([.)])(?= |$)", r"\1\\\2", re.sub(r"^([-+=])(?= |$)", r"\\\1", line))


def code(text: str) -> Markup:
    """What to type, in Markdown."""
    line = " ".join(shown(text).splitlines())
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return Markup(f"{fence}bash\n{line}\n{fence}")


def lasted(alarm: Mapping[str, Any]) -> str:
    """In how many steps an alarm held, and what these cost; empty where that is not known."""
    if not alarm.get("held"):
        return ""
    return f"in {alarm['held']} of {alarm['of']} steps, {alarm['tokens_share']:.0%} of the tokens"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if hours < 2 else f"{hours:.1f} h"


_FILTERS = {
    "code": code,
    "lasted": lasted,
    "duration": _duration,
    "count": lambda n: "" if n is None else f"{n:,.0f}",
    "json": lambda value: json.dumps(value, ensure_ascii=False) if value else "",
    "utc": lambda seconds: time.strftime("began %Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)),
}


def rendered(template: str, **values: object) -> str:
    """A template, filled in; what becomes of the texts is said by its name: ``.md``, ``.txt`` (nothing), or HTML."""
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
    return shown(value) if type(value) is str else value  # what is Markup is a part of the page


def _in_markdown(value: object) -> object:
    return value if isinstance(value, Markup) else Markup(escaped(str(value)))
