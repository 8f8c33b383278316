"""Tiny models shipped with astuner-local; imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

from astuner import hookimpl

SHIPPED = {"tiny-calculator": "model"}


@hookimpl
def locate_model(path: str) -> str | None:
    """Return the folder of a shipped model, or None for other names."""
    folder = SHIPPED.get(path)
    return None if folder is None else str(Path(__file__).with_name("tiny") / folder)


@hookimpl
def list_models() -> list[str]:
    """Return the names of the shipped models."""
    return list(SHIPPED)
