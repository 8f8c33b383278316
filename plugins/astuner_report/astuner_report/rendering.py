"""What this package writes from templates (``templates/``): every text in them is escaped, and shows all that it is."""

from __future__ import annotations


def shown(text: str) -> str:
    """``text`` without what nobody can see: control characters, and those that turn the direction of writing."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def rendered(template: str, **values: object) -> str:
    """A template, filled in."""
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("astuner_report")
    templates = Environment(loader=loader, autoescape=True, finalize=_plain, keep_trailing_newline=True)
    return templates.get_template(template).render(values)


def _plain(value: object) -> object:
    return shown(value) if type(value) is str else value  # what is Markup is a part of the page
