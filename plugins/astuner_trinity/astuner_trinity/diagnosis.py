"""Checks for ``astuner doctor`` of the Trinity backbone: driver, number of GPUs, matching versions.

Supported versions of Trinity, verl and vLLM come from astuner-trinity's own requirements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packaging.version import Version

from astuner.contracts.diagnosis import Finding, fail, ok, version, warn
from astuner_ray.native.gpu_diagnosis import Gpu, GpuBackbone, bound

OURS = "astuner-trinity"
INSTALL_ENGINE = 'pip install "vllm>=0.22,<=0.23.0" "numpy>=2"'
"""Command that installs the extra ``vllm`` with pip, which cannot resolve it together with verl (see the README)."""
INSTALL = f"pip install {OURS} && {INSTALL_ENGINE}"
"""Must match ``install`` in ``plugin.toml``."""
TRINITY = GpuBackbone(name="trinity", title="Trinity", install=INSTALL)
WHY = {
    "trinity-rft": "its interfaces change between releases",
    "verl": "Trinity's trainer fails at its start with other versions",
    "ray": "Trinity runs on it",
}
"""Required packages, and the reason for their version."""
LEAST_GPUS = 2
ARROW_FOR_NUMPY_2 = 26
"""First pyarrow version that requires numpy 2."""


def diagnose() -> Iterator[Finding]:
    """Yield findings about everything that can stop Trinity here, in the order in which to fix them."""
    yield from TRINITY.alone("verl", differ="verl, vllm and transformers")
    for distribution, why in WHY.items():
        wanted = bound(OURS, distribution)
        yield TRINITY.package(distribution, wanted=wanted, why=why, fix=_install(f"{distribution}{wanted}"))
    yield from _numpy()
    yield from TRINITY.on_gpus(_on_gpus)


def _install(requirement: str) -> str:
    """Return the command that installs a requirement; it also reverts numpy, which pip downgrades because of verl."""
    return f"pip install '{requirement}' && pip install 'numpy>=2'"


def _numpy() -> Iterator[Finding]:
    numpy, arrow, engine = version("numpy"), version("pyarrow"), version("vllm")
    if numpy is None or arrow is None:
        return  # a missing package that installs them is reported elsewhere
    pair = f"{numpy}, with pyarrow {arrow}"
    if Version(numpy).major >= 2:
        yield ok(what="numpy", detail=pair)
    elif Version(arrow).major >= ARROW_FOR_NUMPY_2:
        fix = f"pip install 'numpy>=2' 'pyarrow{bound(OURS, 'pyarrow')}'"
        detail = f"{pair}, which cannot be imported with numpy below 2"
        yield fail(what="numpy", detail=detail, fix=fix)
    elif engine is not None:
        detail = f"{numpy}, but vllm {engine} needs numpy 2 (verl works with both, although it declares numpy<2)"
        yield warn(what="numpy", detail=detail, fix="pip install 'numpy>=2'")
    else:
        yield ok(what="numpy", detail=pair)


def _on_gpus(cards: Sequence[Gpu]) -> Iterator[Finding]:
    yield _enough(len(cards))
    yield from TRINITY.torch(cards, bound("vllm", "torch"))
    yield _engine()
    yield TRINITY.flash_attention(bound("trinity-rft", "flash-attn"))
    yield from TRINITY.memory(cards)


def _enough(count: int) -> Finding:
    what = "trinity's GPUs"
    if count >= LEAST_GPUS:
        return ok(what=what, detail=f"{count}; at least two are needed: one for rollouts, one for training")
    return warn(
        what=what,
        detail=f"{count} found, but trinity needs two, here or in the cluster: one for rollouts, one for training",
        fix="astuner run FILE --backbone verl  (shares one GPU; separate environment), or: --backbone local",
    )


def _engine() -> Finding:
    have, wanted = version("vllm"), bound(OURS, "vllm")
    if have is None:
        detail = "not installed, but needed for rollouts"
        return fail(what="vllm", detail=detail, fix=INSTALL_ENGINE)
    if wanted.contains(have, prereleases=True):
        return ok(what="vllm", detail=have)
    if any(not part.contains(have, prereleases=True) for part in wanted if part.operator == ">="):
        detail = f"{have}, but vllm{wanted} is needed: older versions lack the interface by which Trinity sends weights"
        return fail(what="vllm", detail=detail, fix=INSTALL_ENGINE)
    detail = f"{have} is newer than Trinity {version('trinity-rft')} supports: vllm{wanted}"
    return warn(what="vllm", detail=detail, fix=INSTALL_ENGINE)
