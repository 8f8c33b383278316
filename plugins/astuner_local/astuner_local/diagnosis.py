"""What ``astuner doctor`` says about this machine's GPU, torch and transformers; imports neither."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from astuner.contracts.diagnosis import Finding, nvidia_smi


def findings() -> Iterator[Finding]:
    """Whether torch is here, and can use the GPU."""
    cards = _nvidia()
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield Finding(
            level="warn",
            what="torch",
            detail="not installed; the local backbone needs it",
            fix="pip install astuner-local",
        )
        return
    if cards and "+cpu" in torch:
        yield Finding(
            level="warn",
            what="torch",
            detail=f"{torch} cannot use {cards[0]}",
            fix=f"pip install --force-reinstall 'torch=={torch.partition('+')[0]}'",
        )
    else:
        where = "; ".join(cards) if cards else "no NVIDIA GPU, so on the CPU"
        yield Finding(level="ok", what="torch", detail=f"{torch}, {where}")
    try:
        yield Finding(level="ok", what="transformers", detail=metadata.version("transformers"))
    except metadata.PackageNotFoundError:
        yield Finding(level="warn", what="transformers", detail="not installed", fix="pip install astuner-local")


def _nvidia() -> list[str]:
    """One line per GPU, without importing torch."""
    try:
        shown = nvidia_smi("--query-gpu=name,memory.free", "--format=csv,noheader") or ""
    except TimeoutError as e:
        return [str(e)]
    return [f"{line.strip()} free" for line in shown.splitlines() if line.strip()]
