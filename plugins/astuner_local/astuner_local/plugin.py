"""What astuner-local offers; imports nothing heavy."""

from __future__ import annotations

from astuner import Provider, hookimpl
from astuner_local.tiny.locate import SHIPPED
from astuner_local.tiny.locate import locate_model as find_shipped_model


@hookimpl
def register_backbones() -> dict[str, Provider]:
    return {
        "local": Provider(
            target="astuner_local.backbone:LocalBackbone",
            summary="one machine, CPU or one GPU: trains inside this process",
            config="astuner_local.settings:LocalSettings",
            requires=("torch", "transformers"),
            install="pip install astuner-local",
        )
    }


@hookimpl
def register_diagnoses() -> dict[str, Provider]:
    return {"local": Provider(target="astuner_local.diagnosis:findings", summary="the GPU, torch and transformers")}


@hookimpl
def locate_model(path: str) -> str | None:
    return find_shipped_model(path)


@hookimpl
def list_models() -> list[str]:
    return list(SHIPPED)
