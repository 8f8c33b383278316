"""Give Ray workers the imports of the run's process and the experiment's files.

Folders are appended after installed packages, as in the run's process, so user code never shadows a package.  On a
cluster with several nodes, a copy of the experiment file's folder travels with the run under its own name, and
`relocate` returns its location on the current node.  On the run's own node the original folder is used, so files that
are too large to send are found there.
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
"""Environment variable with the arguments of `set_up`, as JSON."""
LIMIT = 100 * 2**20
"""Bytes of the experiment's folder that are sent to other nodes (Ray refuses 512 MiB)."""
LEFT_OUT = (".*", "__pycache__", "launcher_record", "checkpoints", "wandb", "swanlog", "venv", "*.egg-info")
"""Names of folders and files that are not sent, in addition to run folders."""

_brought: Path | None = None
"""In a worker: where Ray placed the files that travel with the run."""


def runtime_env(
    config: Config, switches: Mapping[str, str], files: Path | None = None, *, home: str = "", set_up: str = ""
) -> dict[str, Any]:
    """Return the runtime environment of a run's workers; all users of the cluster can read it.

    :param switches: Variables without secrets.
    :param files: Folder that travels, see `files_for_other_nodes`; None: all workers are on this machine.
    :param home: Node with the original folder.
    :param set_up: Function, ``module.name``, that each worker calls once its imports work.
    """
    base = str(config.base_dir.resolve())
    told: dict[str, Any] = {"paths": [*_added(), base], "base": base, "set_up": set_up}
    environment: dict[str, Any] = {"worker_process_setup_hook": f"{__name__}.set_up"}
    if files is not None:
        told |= {"home": home, "folder": config.base_dir.resolve().name}
        environment["working_dir"] = str(files)
    return {**environment, "env_vars": {**switches, VARIABLE: json.dumps(told)}}


def set_up() -> None:
    """Set up a worker; Ray calls this first in each one."""
    global _brought
    told = json.loads(os.environ[VARIABLE])
    if "home" in told:
        _brought = Path.cwd()  # Ray starts a worker in the folder that it transferred
        told["paths"].append(str(_brought / told["folder"]))
    sys.path += [p for p in dict.fromkeys(told["paths"]) if p not in sys.path and Path(p).is_dir()]
    module, _, name = told["set_up"].rpartition(".")
    if module:
        getattr(importlib.import_module(module), name)()


def relocate(config: Config) -> Config:
    """Return the config with the experiment's folder as this node has it."""
    brought = None if _brought is None else experiment_folder()
    return config if brought is None else dataclasses.replace(config, path=brought / config.path.name)


@functools.lru_cache(maxsize=1)
def experiment_folder() -> Path | None:
    """Return the folder of the experiment file on this worker's node; None outside of workers."""
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
    """Yield a folder with a filtered copy of the experiment's folder, under its own name, until the block ends.

    :raises RunError: It is larger than `LIMIT`; the message lists the largest files.
    """
    source, runs = config.base_dir.resolve(), config.run_dir.parent.resolve()
    sizes: dict[str, int] = {}

    def stays(folder: str, names: list[str]) -> set[str]:
        out = {n for n in names if any(fnmatch.fnmatch(n, p) for p in LEFT_OUT) or Path(folder, n).resolve() == runs}
        for path in (Path(folder, n) for n in names if n not in out):
            if path.is_file():
                sizes[str(path.relative_to(source))] = path.stat().st_size
            elif not path.is_dir():
                out.add(path.name)  # a socket, or a broken link
        if sum(sizes.values()) > LIMIT:
            largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
            raise RunError(
                f"the experiment's folder {source} is larger than {LIMIT >> 20} MiB, the limit for sending it to the "
                "cluster's other nodes; largest files: "
                + ", ".join(f"{name} ({sizes[name] / 2**20:.0f} MiB)" for name in largest)
                + ". Move them elsewhere, or to a folder on every node if workflows read them"
            )
        return out

    with tempfile.TemporaryDirectory(prefix="astuner-files-") as folder:
        shutil.copytree(source, Path(folder, source.name), ignore=stays)
        yield Path(folder)


def _added() -> list[str]:
    """Return folders that are importable here in addition to the interpreter's own."""
    own = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths = [Path(p).absolute() for p in sys.path if p]
    return [str(p) for p in paths if p.is_dir() and not any(p.is_relative_to(folder) for folder in own)]
