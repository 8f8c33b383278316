"""What every machine of a cluster must see, asked of each of them before anything starts there.

An engine finds out in the middle of its start, or when it first saves; then the message is about a file, and not about
the machine that lacks it.
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
"""Seconds that a machine has to answer; most of them go into starting a process."""


def require(model: str, writes: Path | None) -> None:
    """See that all machines of the cluster, which this process is connected to, have the model and the run's folder.

    :param model: a folder or a name on the hub; machines where episodes may run read it, so all.
    :param writes: a folder of this machine into which those with GPUs write; None: there is none.
    :raises RunError: one of them has not, or does not answer; says which, and what to type.
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


_UNABLE = "no process of the run can work there; install the same environment at the same path"
_SILENT = f"no answer within {{seconds:g}} s: {_UNABLE}"


def _look(model: str, files: Mapping[str, int], mark: Path | None) -> list[str]:
    """What the machine at hand lacks; it runs there.

    :param files: the files of a model that is a folder, and their sizes in bytes.
    :param mark: a file just made in a folder that must be the same one here.
    """
    problems = []
    here = _sizes(model)
    if absent := sorted(name for name, size in files.items() if here.get(name) != size):
        what = f"{absent[0]} is another one there, or is not there" if here else "no such folder"
        problems.append(
            f"the model {model}: {what}; copy it to this path on every machine, put it on a disk that all share, or "
            "write the name of a model on the hub (astuner.model.path)"
        )
    if not files and (reason := why_no_model(model)):
        problems.append(reason)
    if mark and not (mark.is_file() and os.access(mark.parent, os.W_OK)):
        what = "a file that was just made in it is not there" if not mark.is_file() else "it may not be written"
        problems.append(
            f"the run folder {mark.parent}: {what}; each GPU writes its part of a checkpoint there, so put it on a "
            "disk that all machines share, at the same path: --run-dir FOLDER"
        )
    return problems


def _sizes(folder: str) -> dict[str, int]:
    """The files of a folder, with their sizes in bytes; none for one that is not there."""
    there = Path(folder)
    return {p.name: p.stat().st_size for p in there.iterdir() if p.is_file()} if there.is_dir() else {}


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
