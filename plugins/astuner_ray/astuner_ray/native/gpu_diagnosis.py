"""Checks for ``astuner doctor`` of backbones on NVIDIA GPUs: driver, CUDA, torch, packages and free memory.

A backbone describes itself once (`GpuBackbone`) and runs the checks in the order in which problems should be fixed.
Required versions come from the metadata of installed packages (`bound`), so no second list has to be maintained.
Uses ``nvidia-smi`` and package metadata, and imports no package under test.
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
"""Least share of free GPU memory: rollout engines take their share of the total memory, so GPUs cannot be shared."""
DRIVER_FOR_CUDA = {"13": 580, "12": 525}
"""CUDA major version -> oldest compatible driver (CUDA compatibility guide, "minor version compatibility")."""
ANY = SpecifierSet()


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU, as ``nvidia-smi`` reports it."""

    name: str
    driver: str
    free: int
    """MiB."""
    total: int
    """MiB."""


def gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs of this machine.

    :raises TimeoutError: ``nvidia-smi`` does not answer.
    """
    fields = "name,driver_version,memory.free,memory.total"
    shown = nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits") or ""
    rows = [[cell.strip() for cell in line.rsplit(",", 3)] for line in shown.splitlines() if line.strip()]
    return [Gpu(name=name, driver=driver, free=int(free), total=int(total)) for name, driver, free, total in rows]


def bound(of: str, name: str, extra: str | None = None) -> SpecifierSet:
    """Return the versions of ``name`` that the installed distribution ``of`` requires.

    `ANY` if ``of`` does not require ``name`` or is not installed.

    :param extra: Extra of ``of``, "" for none; None: the first requirement on ``name``.
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
    """A backbone that runs on GPUs, with the checks shared by all of them."""

    name: str
    """Value of ``--backbone``.  The package is ``astuner-NAME``; ``astuner-NAME-cpu`` runs it without a GPU if
    ``NAME_PLATFORM=cpu``."""
    title: str
    """Name of the trainer under the backbone."""
    install: str
    """Command that installs the backbone with its rollout engine."""

    def alone(self, other: str, differ: str) -> Iterator[Finding]:
        """Check that the backbone ``other``, which needs a different ``differ``, is not in the same environment."""
        if (have := version(f"astuner-{other}")) is not None:
            yield fail(
                what=f"{self.name} and {other}",
                detail=f"astuner-{other} {have} is in the same environment, but the two need different {differ}",
                fix=f"python3 -m venv .venv-{self.name} && . .venv-{self.name}/bin/activate && {self.install}",
            )

    def package(self, distribution: str, *, fix: str, wanted: SpecifierSet = ANY, why: str = "") -> Finding:
        """Check that a required package is installed in one of the versions ``wanted``; ``why`` is the reason."""
        if (have := version(distribution)) is None:
            detail = f"not installed; the {self.name} backbone cannot start without it"
            return fail(what=distribution, detail=detail, fix=fix)
        if not wanted.contains(have, prereleases=True):
            detail = f"{have}, but {distribution}{wanted} is needed: {why}"
            return fail(what=distribution, detail=detail, fix=fix)
        return ok(what=distribution, detail=have)

    def on_gpus(self, look: Callable[[Sequence[Gpu]], Iterator[Finding]]) -> Iterator[Finding]:
        """Yield what ``look`` finds on this machine's GPUs, or a finding that there is no GPU or the driver hangs."""
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
                detail="nvidia-smi finds no NVIDIA GPU on this machine; you need one, or a cluster with GPUs",
                fix=f"astuner run FILE --backbone local  (or test {self.title} without a GPU: pip install {package}; "
                f"{variable}=cpu)",
            )
        what = f"{self.name} on a CPU"
        if (have := version(package)) is None:
            detail = f"{variable}=cpu, but its package is not installed"
            return fail(what=what, detail=detail, fix=f"pip install {package}")
        return ok(what=what, detail=f"{package} {have}: for testing {self.title}, not for training")

    def torch(self, cards: Sequence[Gpu], wanted: SpecifierSet) -> Iterator[Finding]:
        """Check that torch is built for GPUs and that the driver supports its CUDA version.

        :param wanted: Version of torch to suggest if this one is built for CPUs; `ANY`: the same version.
        """
        driver = cards[0].driver
        found = re.search(r"CUDA Version:\s*([\d.]+)", nvidia_smi() or "")
        cuda = found.group(1) if found else "unknown"
        torch = version("torch")
        if torch is None:
            yield fail(
                what=f"{self.name}'s torch",
                detail=f"torch is not installed, but this machine has {len(cards)} x {cards[0].name}",
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
                detail=f"{driver} supports CUDA up to {cuda}, but torch {torch} is built for CUDA {built_for}, which "
                f"needs driver {oldest} or newer",
                fix=f"update the driver to {oldest} or newer, e.g.: apt install nvidia-driver-{oldest}",
            )
        else:
            yield ok(what="NVIDIA driver", detail=f"{driver}, CUDA up to {cuda}; torch {torch}")

    def flash_attention(self, wanted: SpecifierSet) -> Finding:
        """Check that flash-attn is installed."""
        if (have := version("flash-attn")) is not None:
            return ok(what="flash-attn", detail=have)
        return warn(
            what="flash-attn",
            detail="not installed: the trainer uses torch's attention (sdpa) on padded rows",
            fix=f"pip install --no-build-isolation 'flash-attn{wanted}'",
        )

    def memory(self, cards: Sequence[Gpu]) -> Iterator[Finding]:
        """Check that no other process uses the GPUs."""
        for number, card in enumerate(cards):
            what, detail = f"GPU {number}", f"{card.name}, {card.free / 1024:.1f} of {card.total / 1024:.1f} GiB free"
            if card.free < ENOUGH_FREE * card.total:
                yield warn(
                    what=what,
                    detail=f"{detail}; {self.title} takes a share of the total memory",
                    fix="nvidia-smi  (end other processes), or exclude this GPU with CUDA_VISIBLE_DEVICES",
                )
            else:
                yield ok(what=what, detail=detail)


def cuda_of_torch(torch: str) -> str | None:
    """Return the CUDA major version that the installed torch is built for; None if it is built for CPUs.

    A wheel has it in its version (``+cu130``, ``+cpu``) or, on PyPI, in the CUDA packages that it requires; otherwise
    return "unknown".
    """
    if local := torch.partition("+")[2]:
        found = re.fullmatch(r"cu(\d\d)\d", local)
        return found.group(1) if found else None
    needs = "\n".join(importlib.metadata.requires("torch") or ())
    found = re.search(r"^(?:nvidia-[\w-]+-cu|cuda-(?:toolkit|bindings)[^=\n]*==)(\d\d)", needs, re.MULTILINE)
    return found.group(1) if found else "unknown"
