"""What is kept of a checkpoint that was let through, and which one serves.

An entry holds the model's files as further names of the same files (hard links; copies where the disk has none), so a
run that deletes its older checkpoints does not touch it and it takes no space while they are there.  Checkpoints are
written once; the entry's own ``manifest.json`` tells if a file was changed after all.

Invariant: an entry is complete, and only then named by ``promoted.json``.
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
    """A checkpoint that was looked at and is whole."""

    folder: Path
    models: Mapping[str, Path]
    """Policy that trains -> its model's folder."""
    weights: str
    """SHA-256 of all weights."""

    @classmethod
    def of(cls, config: Config, folder: Path) -> Candidate:
        """
        :raises CheckpointError: it is damaged, not complete, or lacks a policy.
        :raises ConfigError: it is of another model than the experiment's.
        """
        folder, models = folder.resolve(), {}
        if (folder / MANIFEST).is_file() and (why := damage(folder)):
            raise CheckpointError(
                f"{folder} is damaged: {why}; choose another checkpoint: --checkpoint NAME, or remove its {MANIFEST} "
                "if you changed it"
            )
        for policy in AgentRegistry.of(config.astuner).trained_policies:
            model = policy_folder(folder, policy)
            if model is None:
                raise CheckpointError(f"{folder} holds no model of the policy {policy!r}, which trains")
            if why := problem(model):
                raise CheckpointError(f"{model} is not complete: {why}; choose another checkpoint: --checkpoint NAME")
            _check_kind(config, policy, model)
            models[policy] = model
        return cls(folder=folder, models=models, weights=weights_of(models))


def weights_of(models: Mapping[str, Path]) -> str:
    """SHA-256 of the weights of these model folders."""
    digest = hashlib.sha256()
    for policy, folder in sorted(models.items()):
        for file in sorted(folder.glob("*.safetensors")):
            digest.update(f"{policy}/{file.name}/{file.stat().st_size}\n".encode())
            with file.open("rb") as opened:
                while piece := opened.read(1 << 22):
                    digest.update(piece)
    return digest.hexdigest()


def _check_kind(config: Config, policy: str, model: Path) -> None:
    """The experiment's model may have been changed since the checkpoint was trained."""
    base = config.locate_model(policy=policy)
    if not (Path(base) / "config.json").is_file():
        return  # a name on the hub; nothing is fetched for this
    files = Path(base) / "config.json", model / "config.json"
    try:
        theirs, ours = ({**json.loads(file.read_text(encoding="utf-8"))} for file in files)
    except (OSError, ValueError, TypeError) as e:
        raise CheckpointError(f"a config.json of {base} or {model} cannot be read: {e}") from e
    for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        if theirs.get(key) != ours.get(key):
            raise ConfigError(
                f"{model} is of another model than the experiment's: {key} is {ours.get(key)}, and {theirs.get(key)} "
                f"in {base}; name the model that it comes from: astuner.model.path=…"
            )


def now_is(config: Config, now: Promotions | None, candidate: Candidate) -> None:
    """:raises ConfigError: the candidate is what serves already."""
    entry = now.entries[now.serving] if now and now.serving else None
    bases = {policy: Path(config.locate_model(policy=policy)) for policy in candidate.models}
    if entry is not None and entry["weights"] == candidate.weights:
        what = f"promoted as {now.serving if now else ''}"
    elif entry is None and all(base.is_dir() for base in bases.values()) and weights_of(bases) == candidate.weights:
        what = "the model before training"
    else:
        return
    raise ConfigError(
        f"{candidate.folder} is what serves already ({what}): its weights are the same; name another checkpoint: "
        "--checkpoint NAME"
    )


@contextlib.contextmanager
def changing(run_dir: Path, expected: Promotions | None) -> Iterator[Promotions]:
    """What is promoted, for who changes it: one process at a time.

    :param expected: as it was when this one began.
    :raises RunError: another one changes it, or has meanwhile.
    """
    folder = promoted_folder(run_dir)
    again = "somebody else has promoted meanwhile, or gone back; nothing was changed: look at --list and type it again"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock_file(folder / ".lock"):
            for left in folder.glob(".promoted.*.tmp"):  # of one that was killed
                left.unlink()
            if Promotions.read(run_dir) != expected:
                raise RunError(f"{folder}: {again}")
            yield expected or Promotions(folder=folder)
    except LockTaken as e:
        raise RunError(f"{folder}: another astuner promote is at it (pid {e.pid}); wait for it") from None
    except OSError as e:
        raise RunError(
            f"nothing was changed in {folder}, and what served before still does: {e}; free space, or have permission "
            "to write there; a run that goes on may also have deleted the checkpoint meanwhile"
        ) from e


def promote(
    config: Config, candidate: Candidate, expected: Promotions | None, card: str, told: Mapping[str, Any]
) -> Path:
    """Keep a candidate, and have it serve.

    :param expected: what was promoted when it was measured.
    :param card: the text of its card.
    :param told: what the history says of it.
    :returns: its folder.
    """
    with changing(config.run_dir, expected) as now:
        number = f"{max(map(int, now.entries), default=0) + 1:04d}"
        name = candidate.folder.name
        entry, temporary = now.folder / number, now.folder / f".{number}.tmp"
        for left in (entry, temporary):  # of one that was killed
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
    """Have what served before serve again.

    :returns: its folder; None: the model before training.
    :raises ConfigError: there is nothing to go back to.
    :raises CheckpointError: that one is damaged.
    """
    if expected is None or expected.serving is None:
        raise ConfigError(
            f"there is nothing to go back to: {'nothing was promoted yet' if expected is None else 'the base serves'}; "
            f"promote a checkpoint: astuner promote {config.path}"
        )
    before = expected.entries[expected.serving]["before"]
    folder = expected.model(before)
    if folder is not None and (why := damage(folder)):
        raise CheckpointError(f"{folder}, which served before, is damaged: {why}; what serves now goes on")
    with changing(config.run_dir, expected) as now:
        _changed(now, before, "back", now.entries).write()
    return folder


def _changed(now: Promotions, to: str | None, by: str, entries: Mapping[str, Mapping[str, Any]]) -> Promotions:
    changes = (*now.changes, {"at": timestamp(), "by": by, "to": to})
    return replace(now, serving=to, entries=entries, changes=changes)


def timestamp() -> str:
    """Now, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _link(config: Config, candidate: Candidate, target: Path) -> None:
    """What a model consists of, and the licence of the one that it comes from."""
    for policy, model in candidate.models.items():
        to = target / model.relative_to(candidate.folder)
        to.mkdir(parents=True, exist_ok=True)
        home = model.parents[1]
        for file in model.iterdir():
            if not file.is_file() or file.name in LEFT_OUT or not any(fnmatch(file.name, p) for p in FILES):
                continue
            if not file.resolve().is_relative_to(home):
                raise CheckpointError(f"{model}: {file.name} is a link out of it; put the file there")
            try:
                os.link(file.resolve(), to / file.name)
            except OSError:  # another disk, or one without links
                shutil.copyfile(file, to / file.name)
        for licence in licences(config, policy):
            shutil.copyfile(licence, to / licence.name)


def licences(config: Config, policy: str) -> list[Path]:
    """The files with the licence of a policy's model before training, where that is a folder."""
    base = Path(config.locate_model(policy=policy))
    found = base.iterdir() if base.is_dir() else ()
    return sorted(file for file in found if file.is_file() and any(fnmatch(file.name.upper(), p) for p in LICENCES))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
