"""What astuner-trinity offers; imports nothing heavy."""

from __future__ import annotations

from astuner import Provider, hookimpl

INSTALL_ENGINE = 'pip install "vllm>=0.22,<=0.23.0" "numpy>=2"'
"""The extra ``vllm`` as pip takes it: together with verl it finds no solution (see this package's README)."""
INSTALL = f"pip install astuner-trinity && {INSTALL_ENGINE}"


@hookimpl
def register_backbones() -> dict[str, Provider]:
    return {
        "trinity": Provider(
            target="astuner_trinity.backbone:TrinityBackbone",
            summary="Ray cluster, Trinity-RFT: rollout and training apart, as far as you like",
            config="astuner_trinity.settings:TrinitySettings",
            requires=("trinity", "verl", "ray"),
            install=f"{INSTALL} (without a GPU: the first of the two)",
            conflicts=("astuner-verl",),
        )
    }


@hookimpl
def register_diagnoses() -> dict[str, Provider]:
    return {
        "trinity": Provider(
            target="astuner_trinity.diagnosis:diagnose", summary="GPUs, and what Trinity is installed beside"
        )
    }
