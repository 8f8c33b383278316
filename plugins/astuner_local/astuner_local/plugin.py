"""The tiny models that astuner-local ships, beside what ``plugin.toml`` describes; imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

from astuner import hookimpl

SHIPPED = {"tiny-calculator": "model"}


@hookimpl
def locate_model(path: str) -> str | None:
    folder = SHIPPED.get(path)
    return None if folder is None else str(Path(__file__).with_name("tiny") / folder)


@hookimpl
def list_models() -> list[str]:
    return list(SHIPPED)
