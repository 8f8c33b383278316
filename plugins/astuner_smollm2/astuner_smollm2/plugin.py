"""The names of the model, beside what ``plugin.toml`` describes; imports nothing heavy."""

from __future__ import annotations

from astuner import hookimpl

MODELS = {"smollm2-135m": "bfloat16", "smollm2-135m-float32": "float32"}
"""Name -> the type of the weights in its folder."""


@hookimpl
def locate_model(path: str) -> str | None:
    if path not in MODELS:
        return None
    from astuner_smollm2.cache import model_folder

    return str(model_folder(path))


@hookimpl
def list_models() -> list[str]:
    return list(MODELS)
