"""What astuner-verl offers; imports nothing heavy."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_backbones() -> dict[str, Provider]:
    return {
        "verl": Provider(
            target="astuner_verl.backbone:VerlBackbone",
            summary="Ray cluster, VERL: large synchronous or asynchronous training",
            config="astuner_verl.settings:VerlSettings",
            requires=("verl", "ray", "transfer_queue", "tensordict", "hydra"),
            install='pip install "astuner-verl[vllm]" (without a GPU: astuner-verl)',
            conflicts=("astuner-trinity",),
        )
    }


@hookimpl
def register_diagnoses() -> dict[str, Provider]:
    return {
        "verl": Provider(target="astuner_verl.diagnosis:diagnose", summary="GPUs, and what VERL is installed beside")
    }
