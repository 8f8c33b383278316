"""Provide the names of the model in addition to ``plugin.toml``, without heavy imports."""

from __future__ import annotations

from astuner import hookimpl

MODELS = {"smollm2-135m": "bfloat16", "smollm2-135m-float32": "float32"}
"""Name -> type of the weights."""


@hookimpl
def locate_model(path: str) -> str | None:
    """Return the folder of a model with one of these names, or None."""
    if path not in MODELS:
        return None
    from astuner_smollm2.cache import model_folder

    return str(model_folder(path))


@hookimpl
def list_models() -> list[str]:
    """Return the names of the models."""
    return list(MODELS)
