"""Keep promoted checkpoints, and record which one serves.

An entry contains hard links to the model's files (copies if the file system has no hard links). A run that deletes its
older checkpoints does not affect it, and it takes no space while they exist. Checkpoints are never modified after they
are written; the entry's own ``manifest.json`` reveals files that were modified nevertheless.

Invariant: ``promoted.json`` names only complete entries.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from astuner import AgentRegistry, Config, LockTaken, lock_file, policy_folder
from astuner.contracts.errors import CheckpointError, ConfigError, RunError
from astuner_export.model import FILES, LEFT_OUT, problem
from astuner_models.promoted import Promotions, promoted_folder
from astuner_objectives.manifest import MANIFEST, write_manifest
from astuner_objectives.manifest import problem as damage

CARD = "README.md"
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Verified checkpoint."""

    folder: Path
    models: Mapping[str, Path]
    """Trained policy -> folder of its model."""
    weights: str
    """SHA-256 of all weights."""

    @classmethod
    def of(cls, config: Config, folder: Path) -> Candidate:
        """Verify a checkpoint.

        :raises CheckpointError: It is damaged, incomplete, or lacks a policy.
        :raises ConfigError: Its model differs from the experiment's model.
        """
        folder, models = folder.resolve(), {}
        if (folder / MANIFEST).is_file() and (why := damage(folder)):
            raise CheckpointError(
                f"{folder} is damaged: {why}. Choose another checkpoint with --checkpoint NAME, or remove its "
                f"{MANIFEST} if you modified it intentionally."
            )
        for policy in AgentRegistry.of(config.astuner).trained_policies:
            model = policy_folder(folder, policy)
            if model is None:
                raise CheckpointError(f"{folder} contains no model of the trained policy {policy!r}.")
            if why := problem(model):
                raise CheckpointError(f"{model} is incomplete: {why}. Choose another one with --checkpoint NAME.")
            _check_kind(config, policy, model)
            models[policy] = model
        return cls(folder=folder, models=models, weights=weights_of(models))


def weights_of(models: Mapping[str, Path]) -> str:
    """Return the SHA-256 of the weights of these model folders."""
    digest = hashlib.sha256()
    for policy, folder in sorted(models.items()):
        for file in sorted(folder.glob("*.safetensors")):
            digest.update(f"{policy}/{file.name}/{file.stat().st_size}\n".encode())
            with file.open("rb") as opened:
                while piece := opened.read(1 << 22):
                    digest.update(piece)
    return digest.hexdigest()


def _check_kind(config: Config, policy: str, model: Path) -> None:
    """Check that a checkpoint matches the experiment's model, which may have been changed after training."""
    base = config.locate_model(policy=policy)
    if not (Path(base) / "config.json").is_file():
        return  # a model name on the Hub: do not download it for this check
    files = Path(base) / "config.json", model / "config.json"
    try:
        theirs, ours = ({**json.loads(file.read_text(encoding="utf-8"))} for file in files)
    except (OSError, ValueError, TypeError) as e:
        raise CheckpointError(f"Cannot read config.json of {base} or {model}: {e}") from e
    for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        if theirs.get(key) != ours.get(key):
            raise ConfigError(
                f"{model} differs from the experiment's model: {key} is {ours.get(key)}, but {theirs.get(key)} "
                f"in {base}. Set astuner.model.path to the model it was trained from."
            )


def now_is(config: Config, now: Promotions | None, candidate: Candidate) -> None:
    """Check that the candidate differs from the serving model.

    :raises ConfigError: It already serves.
    """
    entry = now.entries[now.serving] if now and now.serving else None
    bases = {policy: Path(config.locate_model(policy=policy)) for policy in candidate.models}
    if entry is not None and entry["weights"] == candidate.weights:
        what = f"promoted as {now.serving if now else ''}"
    elif entry is None and all(base.is_dir() for base in bases.values()) and weights_of(bases) == candidate.weights:
        what = "the base model"
    else:
        return
    raise ConfigError(
        f"{candidate.folder} is already serving ({what}): the weights are equal. Choose another checkpoint with "
        "--checkpoint NAME."
    )


@contextlib.contextmanager
def changing(run_dir: Path, expected: Promotions | None) -> Iterator[Promotions]:
    """Lock the promotions of a run, and yield them for modification.

    :param expected: State when this process started.
    :raises RunError: Another process holds the lock, or has changed the state.
    """
    folder = promoted_folder(run_dir)
    again = "another process promoted or rolled back meanwhile, so nothing was changed. Check --list and try again."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock_file(folder / ".lock"):
            for left in folder.glob(".promoted.*.tmp"):  # left by a killed process
                left.unlink()
            if Promotions.read(run_dir) != expected:
                raise RunError(f"{folder}: {again}")
            yield expected or Promotions(folder=folder)
    except LockTaken as e:
        raise RunError(f"{folder}: another astuner promote is running (pid {e.pid}). Wait for it to finish.") from None
    except OSError as e:
        raise RunError(
            f"Cannot write {folder}: {e}. Nothing changed and the previous model still serves. Check disk space and "
            "permissions; an active run may also have deleted the checkpoint."
        ) from e


def promote(
    config: Config, candidate: Candidate, expected: Promotions | None, card: str, told: Mapping[str, Any]
) -> Path:
    """Keep a candidate, and make it the serving model.

    :param expected: State when the candidate was measured.
    :param card: Text of the model card.
    :param told: Details for the history.
    :returns: Folder of the promoted model.
    """
    with changing(config.run_dir, expected) as now:
        number = f"{max(map(int, now.entries), default=0) + 1:04d}"
        name = candidate.folder.name
        entry, temporary = now.folder / number, now.folder / f".{number}.tmp"
        for left in (entry, temporary):  # left by a killed process
            shutil.rmtree(left, ignore_errors=True)
        try:
            _link(config, candidate, temporary / name)
            (temporary / name / CARD).write_text(card, encoding="utf-8")
            write_manifest(temporary / name)
            for path in (*temporary.rglob("*"), temporary):
                _flush(path)
            temporary.rename(entry)
            _flush(now.folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        about = {"name": name, "before": now.serving, "at": timestamp(), "source": str(candidate.folder), **told}
        about["weights"] = candidate.weights
        _changed(now, number, "promote", {**now.entries, number: about}).write()
        return entry / name


def back(config: Config, expected: Promotions | None) -> Path | None:
    """Make the previous model serve again.

    :returns: Folder of the model. None: the base model.
    :raises ConfigError: There is no previous model.
    :raises CheckpointError: The previous model is damaged.
    """
    if expected is None or expected.serving is None:
        raise ConfigError(
            f"There is no previous model: {'nothing was promoted' if expected is None else 'the base model serves'}. "
            f"To promote a checkpoint, run: astuner promote {config.path}"
        )
    before = expected.entries[expected.serving]["before"]
    folder = expected.model(before)
    if folder is not None and (why := damage(folder)):
        raise CheckpointError(f"The previous model {folder} is damaged: {why}. The current model keeps serving.")
    with changing(config.run_dir, expected) as now:
        _changed(now, before, "back", now.entries).write()
    return folder


def _changed(now: Promotions, to: str | None, by: str, entries: Mapping[str, Mapping[str, Any]]) -> Promotions:
    changes = (*now.changes, {"at": timestamp(), "by": by, "to": to})
    return replace(now, serving=to, entries=entries, changes=changes)


def timestamp() -> str:
    """Return the current time in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _link(config: Config, candidate: Candidate, target: Path) -> None:
    """Link the files of a model, and the license files of its base model."""
    for policy, model in candidate.models.items():
        to = target / model.relative_to(candidate.folder)
        to.mkdir(parents=True, exist_ok=True)
        home = model.parents[1]
        for file in model.iterdir():
            if not file.is_file() or file.name in LEFT_OUT or not any(fnmatch(file.name, p) for p in FILES):
                continue
            if not file.resolve().is_relative_to(home):
                raise CheckpointError(f"{model}: {file.name} links to a file outside. Copy the file there.")
            try:
                os.link(file.resolve(), to / file.name)
            except OSError:  # another file system, or no support for hard links
                shutil.copyfile(file, to / file.name)
        for licence in licences(config, policy):
            shutil.copyfile(licence, to / licence.name)


def licences(config: Config, policy: str) -> list[Path]:
    """Return the license files of a policy's base model, if that is a folder."""
    base = Path(config.locate_model(policy=policy))
    found = base.iterdir() if base.is_dir() else ()
    return sorted(file for file in found if file.is_file() and any(fnmatch(file.name.upper(), p) for p in LICENCES))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
