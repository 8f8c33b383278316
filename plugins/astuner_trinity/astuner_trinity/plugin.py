"""What astuner-trinity offers; imports nothing heavy."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_backbones() -> dict[str, Provider]:
    return {
        "trinity": Provider(
            target="astuner_trinity.backbone:TrinityBackbone",
            summary="Ray cluster, Trinity-RFT: rollout and training apart, as far as you like",
            config="astuner_trinity.settings:TrinitySettings",
            requires=("trinity", "verl", "ray"),
            install='pip install "astuner-trinity[vllm]" (without a GPU: astuner-trinity)',
            conflicts=("astuner-verl",),
        )
    }
