"""What ``astuner doctor`` says about Trinity: the driver, GPUs for both of its parts, what must fit to what.

Which versions of Trinity, verl and vLLM fit is read from astuner-trinity's own requirements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packaging.version import Version

from astuner.contracts.diagnosis import Finding, fail, ok, version, warn
from astuner_ray.native.gpu_diagnosis import Gpu, GpuBackbone, bound

OURS = "astuner-trinity"
INSTALL_ENGINE = 'pip install "vllm>=0.22,<=0.23.0" "numpy>=2"'
"""The extra ``vllm`` as pip takes it: together with verl it finds no solution (see this package's README)."""
INSTALL = f"pip install {OURS} && {INSTALL_ENGINE}"
"""``plugin.toml`` says the same."""
TRINITY = GpuBackbone(name="trinity", title="Trinity", install=INSTALL)
WHY = {
    "trinity-rft": "its interfaces change between releases",
    "verl": "Trinity's trainer fails with others as soon as it starts",
    "ray": "Trinity runs on it",
}
"""What nothing starts without, and why in this version."""
LEAST_GPUS = 2
ARROW_FOR_NUMPY_2 = 26
"""From this pyarrow on, it refuses to be imported beside an older numpy."""


def diagnose() -> Iterator[Finding]:
    """Everything that stops Trinity here, in the order to mend it."""
    yield from TRINITY.alone("verl", differ="verl, vllm and transformers")
    for distribution, why in WHY.items():
        wanted = bound(OURS, distribution)
        yield TRINITY.package(distribution, wanted=wanted, why=why, fix=_install(f"{distribution}{wanted}"))
    yield from _numpy()
    yield from TRINITY.on_gpus(_on_gpus)


def _install(requirement: str) -> str:
    """What to type for it; verl's "numpy<2", which pip obeys whenever verl is part of its question, is undone."""
    return f"pip install '{requirement}' && pip install 'numpy>=2'"


def _numpy() -> Iterator[Finding]:
    numpy, arrow, engine = version("numpy"), version("pyarrow"), version("vllm")
    if numpy is None or arrow is None:
        return  # what brings them is missing as well, and that is said
    pair = f"{numpy}, beside pyarrow {arrow}"
    if Version(numpy).major >= 2:
        yield ok(what="numpy", detail=pair)
    elif Version(arrow).major >= ARROW_FOR_NUMPY_2:
        fix = f"pip install 'numpy>=2' 'pyarrow{bound(OURS, 'pyarrow')}'"
        detail = f"{pair}, which cannot be imported with numpy below 2"
        yield fail(what="numpy", detail=detail, fix=fix)
    elif engine is not None:
        detail = f"{numpy}, and vllm {engine} needs 2 (verl runs with either, whatever it declares)"
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
        return ok(what=what, detail=f"{count}, and two are the least: one rolls out, one trains")
    return warn(
        what=what,
        detail=f"{count} is seen here, and trinity needs two, here or in the cluster: one rolls out, one trains",
        fix="astuner run FILE --backbone verl  (it shares one, in an environment of its own; or: --backbone local)",
    )


def _engine() -> Finding:
    have, wanted = version("vllm"), bound(OURS, "vllm")
    if have is None:
        detail = "not installed, and it is what generates"
        return fail(what="vllm", detail=detail, fix=INSTALL_ENGINE)
    if wanted.contains(have, prereleases=True):
        return ok(what="vllm", detail=have)
    if any(not part.contains(have, prereleases=True) for part in wanted if part.operator == ">="):
        detail = f"{have}, and vllm{wanted} is needed: older ones lack that by which Trinity sends weights"
        return fail(what="vllm", detail=detail, fix=INSTALL_ENGINE)
    detail = f"{have}, newer than Trinity {version('trinity-rft')} takes: vllm{wanted}"
    return warn(what="vllm", detail=detail, fix=INSTALL_ENGINE)
