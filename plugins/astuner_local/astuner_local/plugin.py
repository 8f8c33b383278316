"""The tiny models that astuner-local ships, beside what ``plugin.toml`` describes; imports nothing heavy."""

from __future__ import annotations

from astuner import hookimpl
from astuner_local.tiny.locate import SHIPPED
from astuner_local.tiny.locate import locate_model as find_shipped_model


@hookimpl
def locate_model(path: str) -> str | None:
    return find_shipped_model(path)


@hookimpl
def list_models() -> list[str]:
    return list(SHIPPED)
