"""The origin of a run: command, time, machine and versions, recorded when it begins.

``origin.json`` has an entry for every start of a run, the first one and each resume, so a report can be written at any
later time on any machine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from astuner import RunDir
from astuner.contracts.diagnosis import nvidia_smi
from astuner.contracts.installed import readable
from astuner.contracts.shell import shell_text
from astuner_report.run_report.files import has, read_json

_PACKAGES = ("torch", "transformers", "tokenizers", "peft", "vllm", "sglang", "ray", "verl", "trinity-rft", "numpy")
"""Packages, in addition to ASTuner's, that a result may depend on."""
_PATIENCE = 10.0
"""Timeout of git in seconds."""


def begin(run_dir: RunDir, *, command: Sequence[str], config_file: Path, plan: Mapping[str, str], energy: str) -> None:
    """Add an entry for a start of the run.

    :param command: the command that resumes or repeats it, as a list of words.
    :param energy: a description of how energy is measured.
    """
    start = {
        "started": round(time.time(), 3),
        "command": shell_text(command),
        "folder": os.getcwd(),
        "plan": dict(plan),
        "config_sha256": hashlib.sha256(run_dir.resolved.read_bytes()).hexdigest(),
        "project": _project(config_file.absolute().parent),
        "versions": _versions(),
        "machine": _machine(),
        "energy": energy,
    }
    damage: list[str] = []
    starts = read(run_dir, damage)
    if damage:  # keep the damaged file and continue the run
        run_dir.origin.replace(run_dir.origin.with_name(f"{run_dir.origin.name}.damaged"))
    run_dir.write_json(run_dir.origin, {"starts": [*starts, start]})


def end(run_dir: RunDir, error: BaseException | None = None) -> None:
    """Add to the newest entry how it ended: normally, or with ``error``."""
    starts = read(run_dir, [])
    if not starts:
        return  # a folder of an older version, or a damaged file
    starts[-1] |= {"ended": round(time.time(), 3), "error": f"{type(error).__name__}: {error}" if error else ""}
    run_dir.write_json(run_dir.origin, {"starts": starts})


def read(run_dir: RunDir, damage: list[str]) -> list[dict[str, Any]]:
    """Return the starts of a run, the oldest first; empty if none is recorded or the file is damaged."""
    found = read_json(run_dir.origin, damage, _check)
    return [] if found is None else list(found["starts"])


def _check(found: Any) -> None:
    kinds = {"command": str, "config_sha256": str, "energy": str, "machine": dict, "plan": dict, "versions": dict}
    if not all(has(start, **kinds) and start["started"] >= 0 for start in found["starts"]):
        raise ValueError("invalid entry")


def _project(folder: Path) -> dict[str, Any] | None:
    """Return the git commit of the experiment's project; None without a repository, or if git is missing or slow."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changed is None else bool(changed)}


def _git(folder: Path, *arguments: str) -> str | None:
    if shutil.which("git") is None:
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def _versions() -> dict[str, str]:
    """Return the versions of Python, ASTuner, its plugins and relevant packages."""
    found = {"python": platform.python_version()}
    plugins = {entry.dist.name for entry in readable("astuner") if entry.dist}
    for name in ("astuner-core", *sorted(plugins - {"astuner-core"}), *_PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except (importlib.metadata.PackageNotFoundError, UnicodeDecodeError):
            continue
    return found


def _machine() -> Mapping[str, Any]:
    try:
        shown = nvidia_smi("--query-gpu=name,memory.total", "--format=csv,noheader") or ""
    except TimeoutError:
        shown = "nvidia-smi does not answer"
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [line.strip() for line in shown.splitlines() if line.strip()],
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
