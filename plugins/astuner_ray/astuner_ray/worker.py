"""What a Ray worker needs to run episodes: the imports of the run's process, and the experiment's files.

Folders come behind everything installed, as in the run's process: nothing of a person's shadows a package.  Where a
cluster has several nodes, a copy of the experiment file's folder travels with the run, under its own name, and
`relocate` says where it is on the node at hand.  On the run's own node nothing moves, so what was too large to send is
found there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import importlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import RunError

if TYPE_CHECKING:
    from astuner import Config

VARIABLE = "ASTUNER_RAY_WORKER"
"""What `set_up` is told, as JSON."""
LIMIT = 100 * 2**20
"""Bytes of the experiment's folder that are sent to other nodes (Ray itself refuses 512 MiB)."""
LEFT_OUT = (".*", "__pycache__", "launcher_record", "checkpoints", "wandb", "swanlog", "venv", "*.egg-info")
"""Names of folders and files that stay behind, beside those of run folders."""

_brought: Path | None = None
"""Where Ray has put the files that travel with the run, in a worker."""


def runtime_env(
    config: Config, switches: Mapping[str, str], files: Path | None = None, *, home: str = "", set_up: str = ""
) -> dict[str, Any]:
    """The runtime environment of a run's workers; everybody on the cluster can read it.

    :param switches: variables that are no secret.
    :param files: the folder that travels, see `files_for_other_nodes`; None: all workers are on this machine.
    :param home: the node that has the original of these.
    :param set_up: a function, ``module.name``, that each worker calls when it can import what this process can.
    """
    base = str(config.base_dir.resolve())
    told: dict[str, Any] = {"paths": [*_added(), base], "base": base, "set_up": set_up}
    environment: dict[str, Any] = {"worker_process_setup_hook": f"{__name__}.set_up"}
    if files is not None:
        told |= {"home": home, "folder": config.base_dir.resolve().name}
        environment["working_dir"] = str(files)
    return {**environment, "env_vars": {**switches, VARIABLE: json.dumps(told)}}


def set_up() -> None:
    """Ray calls this first in each worker."""
    global _brought
    told = json.loads(os.environ[VARIABLE])
    if "home" in told:
        _brought = Path.cwd()  # Ray starts a worker in the folder that it has brought
        told["paths"].append(str(_brought / told["folder"]))
    sys.path += [p for p in dict.fromkeys(told["paths"]) if p not in sys.path and Path(p).is_dir()]
    module, _, name = told["set_up"].rpartition(".")
    if module:
        getattr(importlib.import_module(module), name)()


def relocate(config: Config) -> Config:
    """The config as it is to be used in this process: with the experiment's folder where this node has it."""
    brought = None if _brought is None else experiment_folder()
    return config if brought is None else dataclasses.replace(config, path=brought / config.path.name)


@functools.lru_cache(maxsize=1)
def experiment_folder() -> Path | None:
    """The folder of the experiment file, where this worker's node has it; None in a process that is no worker."""
    told = json.loads(os.environ.get(VARIABLE, "{}"))
    if not told:
        return None
    if _brought is not None:
        import ray

        if ray.get_runtime_context().get_node_id() != told["home"]:
            return _brought / str(told["folder"])
    return Path(told["base"])


@contextlib.contextmanager
def files_for_other_nodes(config: Config) -> Iterator[Path]:
    """A folder with a copy of the experiment's, under its own name and without what stays behind, until the block ends.

    :raises RunError: it is larger than `LIMIT`; says what is large.
    """
    source, runs = config.base_dir.resolve(), config.run_dir.parent.resolve()
    sizes: dict[str, int] = {}

    def stays(folder: str, names: list[str]) -> set[str]:
        out = {n for n in names if any(fnmatch.fnmatch(n, p) for p in LEFT_OUT) or Path(folder, n).resolve() == runs}
        for path in (Path(folder, n) for n in names if n not in out):
            if path.is_file():
                sizes[str(path.relative_to(source))] = path.stat().st_size
            elif not path.is_dir():
                out.add(path.name)  # a socket, or a link to nothing
        if sum(sizes.values()) > LIMIT:
            largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
            raise RunError(
                f"the experiment's folder {source} is too large to travel to the cluster's other nodes, which takes at "
                f"most {LIMIT >> 20} MiB; largest: "
                + ", ".join(f"{name} ({sizes[name] / 2**20:.0f} MiB)" for name in largest)
                + "; move such files elsewhere, to a folder that every node has if workflows read them"
            )
        return out

    with tempfile.TemporaryDirectory(prefix="astuner-files-") as folder:
        shutil.copytree(source, Path(folder, source.name), ignore=stays)
        yield Path(folder)


def _added() -> list[str]:
    """What is importable here beside the interpreter's own folders."""
    own = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths = [Path(p).absolute() for p in sys.path if p]
    return [str(p) for p in paths if p.is_dir() and not any(p.is_relative_to(folder) for folder in own)]
