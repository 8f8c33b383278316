"""What ``astuner doctor`` says about VERL: the driver, what must fit to what, and what is missing.

Asks ``nvidia-smi`` and package metadata; imports neither torch nor VERL.  What VERL is known to run with is read from
its own extra ``vllm``, so a newer VERL needs no new list here.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.requirements import Requirement

from astuner.diagnosis import Finding, nvidia_smi

ENOUGH_FREE = 0.9
"""VERL shares a GPU with nobody: rollout engines take their part of the whole card, not of what is free."""
DRIVER_FOR_CUDA = {"13": 580, "12": 525}
"""CUDA's major version -> the oldest driver that runs it (CUDA compatibility guide, "minor version compatibility")."""
ENGINES = ("vllm", "sglang")
FLASH_EXTRA = "flash-attn"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU, as ``nvidia-smi`` sees it."""

    name: str
    driver: str
    free: int
    """MiB."""
    total: int
    """MiB."""


def diagnose() -> Iterator[Finding]:
    """Everything that stops VERL here, in the order to mend it."""
    yield from _conflict()
    yield from _trainer()
    try:
        cards = gpus()
    except TimeoutError as e:
        yield Finding(
            level="fail", what="NVIDIA driver", detail=str(e), fix="nvidia-smi  (restart the machine if it hangs)"
        )
        return
    if not cards:
        yield _without_gpu()
        return
    yield from _driver(cards)
    yield from _engine()
    yield from _flash_attention()
    yield from _memory(cards)


def gpus() -> list[Gpu]:
    """The NVIDIA GPUs of this machine.

    :raises TimeoutError: ``nvidia-smi`` does not answer.
    """
    fields = "name,driver_version,memory.free,memory.total"
    shown = nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits") or ""
    rows = [[cell.strip() for cell in line.rsplit(",", 3)] for line in shown.splitlines() if line.strip()]
    return [Gpu(name=name, driver=driver, free=int(free), total=int(total)) for name, driver, free, total in rows]


def pins(extra: str = "vllm") -> dict[str, str]:
    """Distribution -> version that the installed VERL names exactly in one of its extras."""
    found = {}
    for text in importlib.metadata.requires("verl") or ():
        requirement = Requirement(text)
        exact = [s.version for s in requirement.specifier if s.operator == "=="]
        if exact and requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            found[requirement.name] = exact[0]
    return found


def version(distribution: str) -> str | None:
    """Its version here; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _conflict() -> Iterator[Finding]:
    if (other := version("astuner-trinity")) is not None:
        yield Finding(
            level="fail",
            what="verl and trinity",
            detail=f"astuner-trinity {other} is in the same environment, and the two need different torch and vllm",
            fix="python3 -m venv .venv-verl && .venv-verl/bin/pip install 'astuner-verl[vllm]'",
        )


def _trainer() -> Iterator[Finding]:
    for distribution in ("verl", "ray", "TransferQueue", "tensordict"):
        if (have := version(distribution)) is None:
            detail = "not installed; the verl backbone cannot start without it"
            yield Finding(level="fail", what=distribution, detail=detail, fix="pip install astuner-verl")
        else:
            yield Finding(level="ok", what=distribution, detail=have)


def _without_gpu() -> Finding:
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return Finding(
            level="warn",
            what="verl's GPU",
            detail="no NVIDIA GPU is seen here (nvidia-smi finds none); a machine of a cluster that has some is needed",
            fix="astuner run FILE --backbone local  (or try VERL out: pip install astuner-verl-cpu; VERL_PLATFORM=cpu)",
        )
    if (have := version("astuner-verl-cpu")) is None:
        detail = "VERL_PLATFORM=cpu, and the package that makes it possible is not installed"
        return Finding(level="fail", what="verl on a CPU", detail=detail, fix="pip install astuner-verl-cpu")
    return Finding(level="ok", what="verl on a CPU", detail=f"astuner-verl-cpu {have}: to try VERL out, not to train")


def _driver(cards: list[Gpu]) -> Iterator[Finding]:
    driver = cards[0].driver
    found = re.search(r"CUDA Version:\s*([\d.]+)", nvidia_smi() or "")
    cuda = found.group(1) if found else "unknown"
    torch = version("torch")
    if torch is None:
        yield Finding(
            level="fail",
            what="verl's torch",
            detail=f"torch is not installed, beside {len(cards)} x {cards[0].name}",
            fix="pip install 'astuner-verl[vllm]'",
        )
        return
    wanted = pins().get("torch", torch.partition("+")[0])
    built_for = _cuda_of_torch(torch)
    again = f"pip install --force-reinstall 'torch=={wanted}'"
    if built_for is None:
        detail = f"torch {torch} is built for CPUs and cannot use {cards[0].name}"
        yield Finding(level="fail", what="verl's torch", detail=detail, fix=again)
        return
    oldest = DRIVER_FOR_CUDA.get(built_for)
    if oldest is not None and int(driver.partition(".")[0]) < oldest:
        yield Finding(
            level="fail",
            what="NVIDIA driver",
            detail=f"{driver} runs CUDA up to {cuda}, and torch {torch} is built for CUDA {built_for}, which needs "
            f"driver {oldest} or newer",
            fix=f"update the driver to {oldest} or newer, e.g.: apt install nvidia-driver-{oldest}",
        )
    else:
        yield Finding(level="ok", what="NVIDIA driver", detail=f"{driver}, CUDA up to {cuda}; torch {torch}")


def _cuda_of_torch(torch: str) -> str | None:
    """The major version of CUDA that torch is built for; None: for CPUs.

    A wheel says it in its version (``+cu130``, ``+cpu``) or, from PyPI, in the CUDA packages that it requires; else it
    is "unknown".
    """
    if local := torch.partition("+")[2]:
        found = re.fullmatch(r"cu(\d\d)\d", local)
        return found.group(1) if found else None
    needs = "\n".join(importlib.metadata.requires("torch") or ())
    found = re.search(r"^(?:nvidia-[\w-]+-cu|cuda-(?:toolkit|bindings)[^=\n]*==)(\d\d)", needs, re.MULTILINE)
    return found.group(1) if found else "unknown"


def _engine() -> Iterator[Finding]:
    have = {name: found for name in ENGINES if (found := version(name)) is not None}
    if not have:
        detail = "neither vllm nor sglang is installed, and one of them generates"
        yield Finding(level="fail", what="rollout engine", detail=detail, fix="pip install 'astuner-verl[vllm]'")
    for name, found in have.items():
        wanted = pins(name).get(name)
        if wanted is None or found == wanted:
            yield Finding(level="ok", what=name, detail=found)
        else:
            detail = f"{found}, and verl {version('verl')} was released with {wanted}"
            yield Finding(level="warn", what=name, detail=detail, fix=f"pip install '{name}=={wanted}'")


def _flash_attention() -> Iterator[Finding]:
    have = version("flash-attn")
    if have is not None:
        yield Finding(level="ok", what="flash-attn", detail=have)
        return
    wanted = next(
        (
            Requirement(text).specifier
            for text in importlib.metadata.requires("verl") or ()
            if Requirement(text).name == "flash-attn"
        ),
        "",
    )
    yield Finding(
        level="warn",
        what="flash-attn",
        detail="not installed; without it each experiment has to say "
        "verl.actor_rollout_ref.model.+override_config.attn_implementation=sdpa "
        "verl.actor_rollout_ref.model.use_remove_padding=false",
        fix=f"pip install --no-build-isolation 'flash-attn{wanted}'",
    )


def _memory(cards: list[Gpu]) -> Iterator[Finding]:
    for number, card in enumerate(cards):
        what, detail = f"GPU {number}", f"{card.name}, {card.free / 1024:.1f} of {card.total / 1024:.1f} GiB free"
        if card.free < ENOUGH_FREE * card.total:
            yield Finding(
                level="warn",
                what=what,
                detail=f"{detail}; VERL takes its part of the whole card",
                fix="nvidia-smi  (end what uses it), or leave this card out with CUDA_VISIBLE_DEVICES",
            )
        else:
            yield Finding(level="ok", what=what, detail=detail)
