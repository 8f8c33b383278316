"""What backbones on NVIDIA GPUs need of a machine, for ``astuner doctor``: driver, CUDA, torch, packages, free memory.

A backbone says once who it is (`GpuBackbone`), and then what to look at, in the order to mend it.  Which versions fit
is read from what installed packages themselves ask for (`bound`), so that no list of versions has to be kept twice.
Asks ``nvidia-smi`` and package metadata, and imports nothing that it reports on.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from astuner.contracts.diagnosis import Finding, fail, nvidia_smi, ok, version, warn

ENOUGH_FREE = 0.9
"""These backbones share a GPU with nobody: rollout engines take their part of the whole card, not of what is free."""
DRIVER_FOR_CUDA = {"13": 580, "12": 525}
"""CUDA's major version -> the oldest driver that runs it (CUDA compatibility guide, "minor version compatibility")."""
ANY = SpecifierSet()


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU, as ``nvidia-smi`` sees it."""

    name: str
    driver: str
    free: int
    """MiB."""
    total: int
    """MiB."""


def gpus() -> list[Gpu]:
    """The NVIDIA GPUs of this machine.

    :raises TimeoutError: ``nvidia-smi`` does not answer.
    """
    fields = "name,driver_version,memory.free,memory.total"
    shown = nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits") or ""
    rows = [[cell.strip() for cell in line.rsplit(",", 3)] for line in shown.splitlines() if line.strip()]
    return [Gpu(name=name, driver=driver, free=int(free), total=int(total)) for name, driver, free, total in rows]


def bound(of: str, name: str, extra: str | None = None) -> SpecifierSet:
    """Which versions of ``name`` the installed distribution ``of`` asks for.

    `ANY` where it names none of them, or is not installed itself.

    :param extra: one of the extras of ``of``, "" for none of them; None: wherever it names ``name`` first.
    """
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires(of) or ()]
    except importlib.metadata.PackageNotFoundError:
        return ANY
    for asked in requirements:
        if canonicalize_name(asked.name) == canonicalize_name(name) and (
            extra is None or asked.marker is None or asked.marker.evaluate({"extra": extra})
        ):
            return asked.specifier
    return ANY


@dataclass(frozen=True, kw_only=True)
class GpuBackbone:
    """A backbone that runs on GPUs, and what can be said of any such."""

    name: str
    """As ``--backbone`` takes it.  Its package is ``astuner-NAME``; ``astuner-NAME-cpu`` does without a GPU where
    ``NAME_PLATFORM=cpu``."""
    title: str
    """What the trainer underneath is called."""
    install: str
    """What to type for all of it, with what generates."""

    def alone(self, other: str, differ: str) -> Iterator[Finding]:
        """That the backbone ``other`` is not in the same environment, for the two need a different ``differ``."""
        if (have := version(f"astuner-{other}")) is not None:
            yield fail(
                what=f"{self.name} and {other}",
                detail=f"astuner-{other} {have} is in the same environment, and the two need different {differ}",
                fix=f"python3 -m venv .venv-{self.name} && . .venv-{self.name}/bin/activate && {self.install}",
            )

    def package(self, distribution: str, *, fix: str, wanted: SpecifierSet = ANY, why: str = "") -> Finding:
        """That a package is here without which nothing starts, and is one of the versions ``wanted``, for ``why``."""
        if (have := version(distribution)) is None:
            detail = f"not installed; the {self.name} backbone cannot start without it"
            return fail(what=distribution, detail=detail, fix=fix)
        if not wanted.contains(have, prereleases=True):
            detail = f"{have}, and {distribution}{wanted} is needed: {why}"
            return fail(what=distribution, detail=detail, fix=fix)
        return ok(what=distribution, detail=have)

    def on_gpus(self, look: Callable[[Sequence[Gpu]], Iterator[Finding]]) -> Iterator[Finding]:
        """What ``look`` finds on this machine's GPUs; where there is none, or the driver hangs, only that."""
        try:
            cards = gpus()
        except TimeoutError as e:
            yield fail(what="NVIDIA driver", detail=str(e), fix="nvidia-smi  (restart the machine if it hangs)")
            return
        if cards:
            yield from look(cards)
        else:
            yield self._without_gpu()

    def _without_gpu(self) -> Finding:
        variable, package = f"{self.name.upper()}_PLATFORM", f"astuner-{self.name}-cpu"
        if os.environ.get(variable, "").strip().lower() != "cpu":
            return warn(
                what=f"{self.name}'s GPU",
                detail="no NVIDIA GPU is seen here (nvidia-smi finds none); a machine of a cluster that has some is "
                "needed",
                fix=f"astuner run FILE --backbone local  (or try {self.title} out: pip install {package}; "
                f"{variable}=cpu)",
            )
        what = f"{self.name} on a CPU"
        if (have := version(package)) is None:
            detail = f"{variable}=cpu, and the package that makes it possible is not installed"
            return fail(what=what, detail=detail, fix=f"pip install {package}")
        return ok(what=what, detail=f"{package} {have}: to try {self.title} out, not to train")

    def torch(self, cards: Sequence[Gpu], wanted: SpecifierSet) -> Iterator[Finding]:
        """That torch is built for GPUs, and that the driver is new enough for its CUDA.

        :param wanted: which torch to type where this one is built for CPUs; `ANY`: the same version again.
        """
        driver = cards[0].driver
        found = re.search(r"CUDA Version:\s*([\d.]+)", nvidia_smi() or "")
        cuda = found.group(1) if found else "unknown"
        torch = version("torch")
        if torch is None:
            yield fail(
                what=f"{self.name}'s torch",
                detail=f"torch is not installed, beside {len(cards)} x {cards[0].name}",
                fix=self.install,
            )
            return
        built_for = cuda_of_torch(torch)
        if built_for is None:
            yield fail(
                what=f"{self.name}'s torch",
                detail=f"torch {torch} is built for CPUs and cannot use {cards[0].name}",
                fix=f"pip install --force-reinstall 'torch{wanted or '==' + torch.partition('+')[0]}'",
            )
            return
        oldest = DRIVER_FOR_CUDA.get(built_for)
        if oldest is not None and int(driver.partition(".")[0]) < oldest:
            yield fail(
                what="NVIDIA driver",
                detail=f"{driver} runs CUDA up to {cuda}, and torch {torch} is built for CUDA {built_for}, which needs "
                f"driver {oldest} or newer",
                fix=f"update the driver to {oldest} or newer, e.g.: apt install nvidia-driver-{oldest}",
            )
        else:
            yield ok(what="NVIDIA driver", detail=f"{driver}, CUDA up to {cuda}; torch {torch}")

    def flash_attention(self, wanted: SpecifierSet) -> Finding:
        """That flash-attn is here."""
        if (have := version("flash-attn")) is not None:
            return ok(what="flash-attn", detail=have)
        return warn(
            what="flash-attn",
            detail="not installed: the trainer takes torch's own attention (sdpa), on padded rows",
            fix=f"pip install --no-build-isolation 'flash-attn{wanted}'",
        )

    def memory(self, cards: Sequence[Gpu]) -> Iterator[Finding]:
        """That nobody else uses the GPUs."""
        for number, card in enumerate(cards):
            what, detail = f"GPU {number}", f"{card.name}, {card.free / 1024:.1f} of {card.total / 1024:.1f} GiB free"
            if card.free < ENOUGH_FREE * card.total:
                yield warn(
                    what=what,
                    detail=f"{detail}; {self.title} takes its part of the whole card",
                    fix="nvidia-smi  (end what uses it), or leave this card out with CUDA_VISIBLE_DEVICES",
                )
            else:
                yield ok(what=what, detail=detail)


def cuda_of_torch(torch: str) -> str | None:
    """The major version of CUDA that this version of torch, the installed one, is built for; None: for CPUs.

    A wheel says it in its version (``+cu130``, ``+cpu``) or, from PyPI, in the CUDA packages that it requires; else it
    is "unknown".
    """
    if local := torch.partition("+")[2]:
        found = re.fullmatch(r"cu(\d\d)\d", local)
        return found.group(1) if found else None
    needs = "\n".join(importlib.metadata.requires("torch") or ())
    found = re.search(r"^(?:nvidia-[\w-]+-cu|cuda-(?:toolkit|bindings)[^=\n]*==)(\d\d)", needs, re.MULTILINE)
    return found.group(1) if found else "unknown"
