"""Checks for ``astuner doctor`` of this machine's GPU, torch and transformers; imports neither package."""

from __future__ import annotations

from collections.abc import Iterator

from astuner.contracts.diagnosis import Finding, nvidia_smi, ok, version, warn

INSTALL = "pip install astuner-local"


def findings() -> Iterator[Finding]:
    """Yield findings about torch, its use of the GPU, and transformers."""
    cards, torch, transformers = _nvidia(), version("torch"), version("transformers")
    if torch is None:
        yield warn(what="torch", detail="not installed; the local backbone needs it", fix=INSTALL)
        return
    if cards and "+cpu" in torch:
        again = f"pip install --force-reinstall 'torch=={torch.partition('+')[0]}'"
        yield warn(what="torch", detail=f"{torch} cannot use {cards[0]}", fix=again)
    else:
        where = "; ".join(cards) if cards else "no NVIDIA GPU: runs on the CPU"
        yield ok(what="torch", detail=f"{torch}, {where}")
    if transformers is None:
        yield warn(what="transformers", detail="not installed", fix=INSTALL)
    else:
        yield ok(what="transformers", detail=transformers)


def _nvidia() -> list[str]:
    """Return one line per GPU, without importing torch."""
    try:
        shown = nvidia_smi("--query-gpu=name,memory.free", "--format=csv,noheader") or ""
    except TimeoutError as e:
        return [str(e)]
    return [f"{line.strip()} free" for line in shown.splitlines() if line.strip()]
