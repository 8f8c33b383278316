"""Checks for ``astuner doctor`` of the VERL backbone: driver, matching versions and missing packages.

Versions that VERL supports come from its own extras, so a newer VERL needs no new list here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from astuner.contracts.diagnosis import Finding, fail, ok, version, warn
from astuner_ray.native.gpu_diagnosis import Gpu, GpuBackbone, bound

VERL = GpuBackbone(name="verl", title="VERL", install="pip install 'astuner-verl[vllm]'")
ENGINES = ("vllm", "sglang")


def diagnose() -> Iterator[Finding]:
    """Yield findings about everything that can stop VERL here, in the order in which to fix them."""
    yield from VERL.alone("trinity", differ="torch and vllm")
    for distribution in ("verl", "ray", "TransferQueue", "tensordict"):
        yield VERL.package(distribution, fix="pip install astuner-verl")
    yield from VERL.on_gpus(_on_gpus)


def _on_gpus(cards: Sequence[Gpu]) -> Iterator[Finding]:
    yield from VERL.torch(cards, bound("verl", "torch", "vllm"))
    yield from _engine()
    yield VERL.flash_attention(bound("verl", "flash-attn"))
    yield from VERL.memory(cards)


def _engine() -> Iterator[Finding]:
    have = {name: found for name in ENGINES if (found := version(name)) is not None}
    if not have:
        detail = "neither vllm nor sglang is installed, but one of them is needed for rollouts"
        yield fail(what="rollout engine", detail=detail, fix=VERL.install)
    for name, found in have.items():
        wanted = bound("verl", name, name)
        if wanted.contains(found, prereleases=True):
            yield ok(what=name, detail=found)
        else:
            detail = f"{found}, but verl {version('verl')} was released with {name}{wanted}"
            yield warn(what=name, detail=detail, fix=f"pip install '{name}{wanted}'")
