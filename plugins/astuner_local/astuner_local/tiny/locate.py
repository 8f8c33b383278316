"""Finds the models that ship inside this package; imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

SHIPPED = {"tiny-calculator": "model"}


def locate_model(path: str) -> str | None:
    """Return the folder of a shipped model, or None when ``path`` does not name one.

    :param path: what ``astuner.model.path`` says.
    """
    folder = SHIPPED.get(path)
    return None if folder is None else str(Path(__file__).parent / folder)
