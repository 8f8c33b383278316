"""Checkpoints: a model in a standard format, and the state that a run needs to resume.

``step-000120/`` is a Hugging Face folder (``AutoModelForCausalLM.from_pretrained`` loads it; LoRA is merged in),
plus ``adapter/`` with LoRA, plus ``resume/``:

- ``trainer.safetensors``  optimizer moments, float32 masters, counters
- ``random.safetensors``   random states of torch (CPU and GPUs) and numpy; Python's is in ``state.json``
- ``state.json``           the caller's state: step, data position, ledger, …

A run with several policies has such a folder for each policy that learns, ``step-000120/<policy>/``, with its own
``resume/trainer.safetensors``; random states and ``state.json`` belong to the run and are in ``step-000120/resume/``.

Nothing is pickled, so opening a checkpoint runs no code.  A folder is written under a temporary name, flushed to disk,
given a manifest with checksums, and renamed.  It appears only through the rename, so a process that is killed at any
other moment leaves the earlier folders and leftovers that no reader accepts.

Invariants: a folder whose manifest matches its files is complete; a failed or killed write leaves the earlier
checkpoints untouched.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from astuner import process_start_time
from astuner.contracts.errors import CheckpointError
from astuner_local.modeling import no_progress_bar
from astuner_local.trainer import lora
from astuner_local.trainer.trainer import PolicyTrainer
from astuner_objectives.manifest import MANIFEST, problem, write_manifest

_TRAINER = "trainer.safetensors"
_NAME = re.compile(r"step-(\d+)(\.old-\d+)?$")
_RUBBISH = re.compile(r"\.(tmp|old)-(\d+)$")


WHOLE = ""
"""Name of the policy in a run with a single policy: its folder is the checkpoint itself."""


class Part(NamedTuple):
    """Saved objects of one policy."""

    trainer: PolicyTrainer
    tokenizer: Any


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk. `path` can be used as a model path."""

    path: Path
    step: int
    state: Mapping[str, Any]
    """State passed to `save_checkpoint`."""


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the folder of the checkpoint of ``step``; a folder of this name is complete."""
    return directory / f"step-{step:06d}"


def save_checkpoint(directory: Path, *, step: int, parts: Mapping[str, Part], state: Mapping[str, Any]) -> Path:
    """Write ``directory/step-NNNNNN`` and return it; replaces a checkpoint of the same step.

    :param parts: Objects by policy name, or `WHOLE` for a single policy. All of them are saved, or none.
    :param state: JSON-serializable state.
    :raises CheckpointError: It cannot be written (disk full, no permission); earlier checkpoints are untouched.
    """
    target = checkpoint_path(directory, step)
    document = json.dumps({"step": step, "python_random": random.getstate(), "state": dict(state)}, indent=1)
    with _explained(directory, target):
        directory.mkdir(parents=True, exist_ok=True)
        remove_rubbish(directory)
        with new_folder(target) as folder:
            for name, part in parts.items():
                _save_part(part, folder / name)
            resume = folder / "resume"
            resume.mkdir(exist_ok=True)
            save_file(_random_state(), resume / "random.safetensors")
            (resume / "state.json").write_text(document + "\n", encoding="utf-8")
    return target


def read_checkpoint(path: Path) -> Checkpoint:
    """Check a folder and read its state, without loading weights.

    :raises CheckpointError: It is not a complete checkpoint; the message has the reason and names a usable one.
    """
    if why := problem(path) if path.is_dir() else "the folder does not exist":
        usable = latest_checkpoint(path.parent)
        instead = f"the newest complete one is {usable}" if usable else f"there is no complete one in {path.parent}"
        raise CheckpointError(f"cannot resume from {path}: {why}; {instead}")
    try:
        document = json.loads((path / "resume" / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot resume from {path}: resume/state.json is not readable: {error}") from error
    return Checkpoint(path=path, step=document["step"], state=document["state"])


def restore(checkpoint: Checkpoint, trainers: Mapping[str, PolicyTrainer]) -> None:
    """Restore weights, optimizers and random states in place: users of the models' tensors see the change.

    :param trainers: Trainers by policy name, or `WHOLE` for a single policy.
    :raises CheckpointError: The checkpoint belongs to another model, or to other policies.
    """
    saved = _policies_in(checkpoint.path)
    if saved != trainers.keys():
        raise CheckpointError(
            f"cannot resume from {checkpoint.path}: it contains {_named(saved)}, but this run trains "
            f"{_named(trainers.keys())}; resume with the astuner.agents of the checkpoint"
        )
    resume = checkpoint.path / "resume"
    try:
        for name, trainer in trainers.items():
            folder = checkpoint.path / name
            if lora.is_lora(trainer.model):
                lora.load_adapter(trainer.model, folder / "adapter")
            else:
                _load_weights(trainer.model, folder)
            trainer.load_state_dict(load_file(folder / "resume" / _TRAINER))
        document = json.loads((resume / "state.json").read_text(encoding="utf-8"))
        _set_random_state(load_file(resume / "random.safetensors"), document["python_random"])
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot resume from {checkpoint.path}: {error}; to resume from an older one, move that folder away"
        ) from error


def saved_states(*directories: Path) -> Iterator[tuple[Path, str]]:
    """Yield checkpoints with their problem (empty if intact), highest step first, then in the order of directories.

    A checkpoint is verified when it is yielded.
    """
    found = [entry for directory in directories for entry in _found(directory)]
    for _, path in sorted(found, key=lambda entry: entry[0], reverse=True):
        yield path, problem(path)


def is_there(directory: Path) -> bool:
    """Return whether ``directory`` contains a checkpoint with a state, judging by names without reading it."""
    return any((path / "resume" / "state.json").is_file() for _, path in _found(directory))


def latest_checkpoint(directory: Path) -> Path | None:
    """Return the complete checkpoint of the highest step, ignoring incomplete ones."""
    return next((path for path, why in saved_states(directory) if not why), None)


def prune(directory: Path, keep: int | None, *, step: int | None = None, spare: Path | None = None) -> None:
    """Delete all but the newest `keep` complete checkpoints (None: keep all), and leftovers of killed processes.

    :param step: Step of the checkpoint just written. Later ones, from before a resume at an earlier step, are damaged:
        they do not count, and stay for inspection until that step is saved again.
    :param spare: Checkpoint to keep regardless of its age.
    :raises CheckpointError: A folder cannot be deleted.
    """
    if not directory.is_dir():
        return
    with _explained(directory, directory):
        remove_rubbish(directory)
        found = sorted((at, path) for at, path in _found(directory) if step is None or at[0] <= step)
        complete = [path for _, path in reversed(found) if is_complete(path, contents=False)]
        for path in complete[keep:] if keep is not None else ():
            if path != spare:
                remove(path)


def _found(directory: Path) -> list[tuple[tuple[int, bool], Path]]:
    """Return folders named like checkpoints, with (step, whether it is not one that was being replaced)."""
    if not directory.is_dir():
        return []
    matches = [(_NAME.match(path.name), path) for path in directory.iterdir() if path.is_dir()]
    return [((int(m[1]), m[2] is None), path) for m, path in matches if m]


@contextmanager
def _explained(directory: Path, target: Path) -> Iterator[None]:
    """Convert errors of a full or read-only disk to a message that explains how to fix it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        existing = next(p for p in (directory, *directory.parents) if p.exists())
        free = shutil.disk_usage(existing).free / 2**30
        previous = latest_checkpoint(directory)
        kept = f"the newest complete checkpoint is still {previous}" if previous else "there is no earlier checkpoint"
        raise CheckpointError(
            f"cannot write {target}: {error} ({free:.1f} GiB free). Free space, fix the permissions of {directory}, or "
            f"keep fewer checkpoints with trainer_common.max_checkpoints; {kept}"
        ) from error


def _policies_in(folder: Path) -> set[str]:
    if (folder / "resume" / _TRAINER).is_file():
        return {WHOLE}
    return {path.parent.parent.name for path in folder.glob(f"*/resume/{_TRAINER}")}


def _named(policies: Collection[str]) -> str:
    if set(policies) == {WHOLE}:
        return "one policy"
    return f"the policies {', '.join(sorted(policies))}" if policies else "no policy"


def _save_part(part: Part, folder: Path) -> None:
    _save_model(part.trainer.model, folder)
    part.tokenizer.save_pretrained(str(folder))
    (folder / "resume").mkdir()
    state = {k: v.detach().contiguous() for k, v in part.trainer.state_dict().items()}
    save_file(state, folder / "resume" / _TRAINER)


def _save_model(model: Any, folder: Path) -> None:
    with no_progress_bar():
        if lora.is_lora(model):
            # only the adapters; without the argument peft asks the hub whether the vocabulary was resized
            model.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)
            merged, base = lora.merged_state_dict(model), model.get_base_model()
            base.save_pretrained(str(folder), state_dict=merged)
            if base.config.tie_word_embeddings and lora.is_lora_layer(base.get_input_embeddings()):
                _untie(folder)
        else:
            model.save_pretrained(str(folder))


def _untie(folder: Path) -> None:
    """Record in ``config.json`` that embedding and head differ, because only the embedding has adapters.

    Programs that tie them according to the config (vLLM, llama.cpp) would otherwise load a different model.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "tie_word_embeddings": False}, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def _load_weights(model: Any, folder: Path) -> None:
    """Copy all shards into the model's own tensors; tied weights are stored once."""
    own = dict(model.named_parameters())
    missing = set(own)
    for shard in sorted(folder.glob("model*.safetensors")):
        for name, tensor in load_file(shard).items():
            if name not in own or own[name].shape != tensor.shape:
                raise CheckpointError(
                    f"{shard} has {name} of shape {tuple(tensor.shape)}, which does not fit this model; resume with "
                    "the astuner.model of the checkpoint"
                )
            own[name].copy_(tensor)
            missing.discard(name)
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} weights of this model (first: {min(missing)}); resume with the "
            "astuner.model of the checkpoint"
        )


def _random_state() -> dict[str, Tensor]:
    twister: Any = np.random.get_state(legacy=False)
    rest = [float(twister["state"]["pos"]), float(twister["has_gauss"]), float(twister["gauss"])]
    state = {
        "torch": torch.get_rng_state(),
        "numpy_keys": torch.from_numpy(twister["state"]["key"].astype(np.int64)),
        "numpy_rest": torch.tensor(rest, dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state |= {f"cuda{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return state


def _set_random_state(state: Mapping[str, Tensor], python_random: Any) -> None:
    version, internal, gauss = python_random
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    position, has_gauss, cached = state["numpy_rest"].tolist()
    keys = state["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    for i in range(torch.cuda.device_count()):
        if f"cuda{i}" in state:
            torch.cuda.set_rng_state(state[f"cuda{i}"], i)


# ------------------------------------------------------------------------------------------ atomic folders


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write into; when the block ends it becomes `folder`, replacing an existing one.

    An exception in the block leaves nothing.  While an old folder is being replaced it is named
    ``<name>.old-<pid>``, and still counts as complete (`is_complete`).
    """
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    remove(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        write_manifest(temporary)
        _flush(*temporary.rglob("*"), temporary)
    except BaseException:
        remove(temporary)
        raise
    aside = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    if folder.exists():
        remove(aside)
        folder.rename(aside)
    temporary.rename(folder)
    _flush(folder.parent)
    remove(aside)


def is_complete(folder: Path, *, contents: bool = True) -> bool:
    """Return whether a folder is complete; without `contents`, check sizes only, which is fast."""
    return folder.is_dir() and not problem(folder, contents=contents)


def remove(folder: Path) -> None:
    """Delete a folder so that it never looks complete: the manifest is deleted first."""
    (folder / MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def remove_rubbish(parent: Path) -> None:
    """Delete partial folders of killed processes; keep a folder that was being replaced if its successor is missing."""
    for folder in parent.iterdir():
        match = _RUBBISH.search(folder.name)
        if match is None:
            continue
        pid = int(match[2])
        if pid != os.getpid() and process_start_time(pid) is not None:  # this process's own folders are leftovers too
            continue
        replaced = folder.with_name(folder.name[: match.start()])
        if match[1] == "tmp" or is_complete(replaced) or not is_complete(folder):
            remove(folder)


def _flush(*paths: Path) -> None:
    """Flush files and folders to disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
