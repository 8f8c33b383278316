"""Check that every machine of a cluster has the model and the run folder before anything starts there.

Without this check, an engine fails in the middle of its start or at the first save, with a message about a file that
does not name the machine.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from astuner.contracts.errors import RunError
from astuner_models.hub import is_folder_name, why_no_model

PATIENCE = 60.0
"""Seconds to wait for a machine's answer; starting a process takes most of them."""


def require(model: str, writes: Path | None) -> None:
    """Check that all machines of the connected cluster have the model and the run folder.

    :param model: Folder, or name on the Hugging Face Hub; read on every machine where episodes may run.
    :param writes: Folder of this machine that machines with GPUs write to; None if there is none.
    :raises RunError: A machine lacks one of them or does not answer; the message names it and a fix.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    del nodes[ray.get_runtime_context().get_node_id()]
    mark = None if writes is None else writes / f".shared-{secrets.token_hex(8)}"
    files = _sizes(model) if is_folder_name(model) else {}
    wrong: dict[str, list[str]] = {}
    if mark:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    try:
        asked = {}
        for label, node in nodes.items():
            strategy = NodeAffinitySchedulingStrategy(label, soft=False)
            probe = ray.remote(_look).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
            asked[probe.remote(model, files, mark if node["Resources"].get("GPU") else None)] = node
        there, silent = ray.wait(list(asked), num_returns=len(asked), timeout=PATIENCE) if asked else ([], [])
        for one in silent:
            ray.cancel(one, force=True)
            wrong.setdefault(_SILENT.format(seconds=PATIENCE), []).append(_name(asked[one]))
        for one in there:
            try:
                found: Sequence[str] = ray.get(one)
            except RayError as e:
                found = [f"{_UNABLE}: {str(e).strip().splitlines()[-1]}"]
            for problem in found:
                wrong.setdefault(problem, []).append(_name(asked[one]))
    finally:
        if mark:
            mark.unlink()
    if wrong:
        said = "; ".join(f"on {' and '.join(sorted(where))}: {problem}" for problem, where in wrong.items())
        raise RunError(f"not every machine of the cluster has what the run needs: {said}")


_UNABLE = "no process of the run can start there; install the same environment at the same path"
_SILENT = f"no answer within {{seconds:g}} s: {_UNABLE}"


def _look(model: str, files: Mapping[str, int], mark: Path | None) -> list[str]:
    """Return the problems of the machine that this function runs on.

    :param files: Names and sizes in bytes of the files of a model folder.
    :param mark: File just created in a folder that must be shared with this machine.
    """
    problems = []
    here = _sizes(model)
    if absent := sorted(name for name, size in files.items() if here.get(name) != size):
        what = f"{absent[0]} differs or is missing" if here else "no such folder"
        problems.append(
            f"the model {model}: {what}; copy it to this path on every machine, use a shared disk, or set "
            "astuner.model.path to a name on the Hugging Face Hub"
        )
    if not files and (reason := why_no_model(model)):
        problems.append(reason)
    if mark and not (mark.is_file() and os.access(mark.parent, os.W_OK)):
        what = "a file just created in it is missing" if not mark.is_file() else "not writable"
        problems.append(
            f"the run folder {mark.parent}: {what}; every GPU writes part of a checkpoint there, so use a disk that "
            "all machines share at the same path: --run-dir FOLDER"
        )
    return problems


def _sizes(folder: str) -> dict[str, int]:
    """Return the sizes in bytes of a folder's files; empty if the folder does not exist."""
    there = Path(folder)
    return {p.name: p.stat().st_size for p in there.iterdir() if p.is_file()} if there.is_dir() else {}


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
