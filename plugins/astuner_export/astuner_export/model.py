"""Export a trained model: a folder that transformers and vLLM load, or a GGUF file that llama.cpp loads.

Checkpoints of all backbones are Hugging Face folders, with the training state (optimizer, adapters, random state) next
to the model. Invariant: an export is complete and matches the trainer's model (`parity`), or does not exist.
"""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner import AgentRegistry, load_config
from astuner.contracts.errors import CheckpointError, ConfigError
from astuner_export.gguf_file import MAGIC, load_gguf, write_gguf
from astuner_export.parity import BOUNDS, UNCHECKED, Parity, Reference, find_prompts, load
from astuner_export.weights import INDEX, contradicts_tie, convert, header, shards, stored_dtype, weight_map
from astuner_models.serving import chat_template, find_checkpoint, policy_folder
from astuner_objectives.manifest import require_whole
from astuner_record.replacing import remove_leftovers, replacing

if TYPE_CHECKING:
    from astuner import Config

FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py")
"""Files of a model folder: weights, configuration, chat template, tokenizer, and custom model code."""
TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken")
"""Files that contain a tokenizer's vocabulary."""
LEFT_OUT = ("manifest.json",)
"""File list of a checkpoint of the local backbone, which would be wrong for the copy."""
FORMS = ("hf", "gguf")
"""A Hugging Face folder, or a file for llama.cpp."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
"""``auto``: the data type of the checkpoint."""
_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export."""

    checkpoint: Path | None
    """Exported checkpoint. None: the base model."""
    models: Mapping[str, Path]
    """Policy -> its folder or file."""
    dtypes: Mapping[str, str]
    """Policy -> data type of its weights."""
    parity: Mapping[str, Parity]
    """Policy -> difference from the trainer's model; empty if it was not checked."""
    bytes: int


def export(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    to: str | Path,
    form: str = "hf",
    dtype: str = "auto",
    check: bool = True,
    checkpoint: str = "best",
    force: bool = False,
    backbone: str | None = None,
    disabled_plugins: Sequence[str] = (),
) -> Exported:
    """Export the model of a checkpoint to ``to``. If several policies are trained, each goes to a subfolder.

    :param form: One of `FORMS`.
    :param dtype: One of `DTYPES`.
    :param check: Load the export, and compare its logits with the trainer's model.
    :param checkpoint: ``best`` (validated) or ``latest`` of the run, ``base`` (the configured model), or a folder.
    :param force: Replace an earlier export in ``to``.
    :raises ConfigError: The form or data type is unknown.
    :raises CheckpointError: The checkpoint does not exist or is incomplete, the export differs from the trainer's
        model, or the target cannot be written. The target is then unchanged.
    :raises MissingDependency: A package for the export or the check is not installed.
    """
    for asked, known in ((form, FORMS), (dtype, DTYPES)):
        if asked not in known:
            raise ConfigError(f"Export format {asked!r} is not supported. Use one of {', '.join(known)}.")
    config = load_config(path, overrides, backbone=backbone, disabled_plugins=disabled_plugins)
    found = find_checkpoint(config, checkpoint)
    sources = _sources(config, found)
    target = Path(to).expanduser().resolve()
    alone, gguf = len(set(sources.values())) == 1, form == "gguf"
    single = gguf and alone
    remove_leftovers(target)
    _check_target(target, set(sources.values()), force, "file" if single else "files" if gguf else "folder")
    places = {policy: Path() if alone else Path(policy + ".gguf" * gguf) for policy in sources}
    dtypes: dict[str, str] = {}
    parity: dict[str, Parity] = {}
    try:
        with replacing(target) as temporary:
            done: dict[Path, str] = {}
            for policy, folder in sources.items():
                new = temporary / places[policy]
                if new in done:  # policies of an older run may share a folder
                    dtypes[policy], parity[policy] = dtypes[done[new]], parity[done[new]]
                    continue
                done[new] = policy
                stored = stored_dtype(folder)
                dtypes[policy] = stored if dtype == "auto" else dtype
                if dtypes[policy] not in BOUNDS:
                    raise CheckpointError(
                        f"{folder} contains weights in {stored}. Use --dtype {' or '.join(sorted(BOUNDS))}."
                    )
                reference = _reference(config, policy, folder) if check else None
                write = _write_gguf if gguf else _write_folder
                reload = write(config, policy, folder, new, dtypes[policy], stored)
                if reference is not None:
                    parity[policy] = _compared(reference, reload, folder, dtypes[policy], stored)
    except OSError as e:
        raise CheckpointError(
            f"Cannot export to {target}: {e}. Free disk space or choose another target; if an active run deleted the "
            "checkpoint meanwhile, run the command again."
        ) from e
    files = [target] if target.is_file() else [file for file in target.rglob("*") if file.is_file()]
    return Exported(
        checkpoint=found,
        models={p: target / place for p, place in places.items()},
        dtypes=dtypes,
        parity=parity,
        bytes=sum(file.stat().st_size for file in files),
    )


def _reference(config: Config, policy: str, folder: Path) -> Reference:
    def base() -> tuple[str, str | None]:
        return config.locate_model(policy=policy), config.model_of(policy).revision

    return Reference(folder, base, find_prompts(config.run_dir, policy, folder))


def _compared(reference: Reference, reload: Callable[[], Any], folder: Path, dtype: str, stored: str) -> Parity:
    """Compare an export with the trainer's model.

    :raises CheckpointError: They differ.
    """
    rounded = [stored] * reference.merged + [dtype] * (dtype not in ("float32", stored))
    found = reference.compare(reload, folder, rounded=max(rounded, key=lambda name: BOUNDS[name], default=""))
    if not found.holds:
        how = "Use --dtype float32" if rounded else "Choose another --checkpoint"
        raise CheckpointError(
            f"The export of {folder} differs from the trainer's model and was removed: {found}. {how}, {UNCHECKED}."
        )
    return found


def problem(folder: Path) -> str:
    """Return why a folder is not a complete model, or an empty string if it is."""
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            return f"{name} is missing"
    if not any(fnmatch.fnmatch(file.name, one) for file in folder.iterdir() for one in TOKENIZERS):
        return f"its tokenizer is missing ({', '.join(TOKENIZERS)}); copy it from the base model"
    try:
        where, files = weight_map(folder), shards(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return f"{INDEX} cannot be read: {type(e).__name__}: {e}"
    held: dict[str, str] = {}
    for shard in files:
        if not shard.is_file():
            return f"{shard.name} is missing"
        try:
            held |= dict.fromkeys(header(shard), shard.name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            return f"{shard.name} is damaged: {e}"
    for name, file_name in where.items():
        if held.get(name) != file_name:
            return f"{file_name} lacks {name}, which {INDEX} lists"
    if adapters := [name for name in held if ".lora_" in name]:
        return f"it contains separate adapters ({adapters[0]}), which cannot be loaded as one model"
    if contradicts_tie(folder):
        return "config.json sets tie_word_embeddings, but lm_head.weight differs from the embedding; set it to false"
    return ""


def _sources(config: Config, checkpoint: Path | None) -> dict[str, Path]:
    """Return policy -> model folder to copy, for the trained policies."""
    sources = {}
    for policy in AgentRegistry.of(config.astuner).trained_policies:
        if checkpoint is None:
            name = config.locate_model(policy=policy)
            if not Path(name).is_dir():
                raise CheckpointError(
                    f"The base model is {name} on the Hugging Face Hub and is unchanged. Load it by name instead of "
                    "exporting it."
                )
            folder: Path | None = Path(name)
        else:
            folder = policy_folder(checkpoint, policy)
        if folder is None:
            raise CheckpointError(f"{checkpoint} contains no model of the trained policy {policy!r}.")
        require_whole(folder)
        if why := problem(folder):
            raise CheckpointError(f"Cannot export {folder}: {why}.")
        home = folder.resolve().parents[1]  # files in Hugging Face's cache are links to blobs there
        if checkpoint and (strays := [f.name for f in folder.iterdir() if not f.resolve().is_relative_to(home)]):
            raise CheckpointError(f"Cannot export {folder}: {strays[0]} links to a file outside. Copy the file there.")
        sources[policy] = folder.resolve()
    return sources


def _check_target(target: Path, sources: set[Path], force: bool, kind: str) -> None:
    """Check that an export would not overwrite other files.

    :param kind: Kind of the export: a model ``folder``, a GGUF ``file``, or a folder of ``files``.
    :raises CheckpointError: Files would be lost.
    """
    for source in sources:
        if target == source or source.is_relative_to(target) or target.is_relative_to(source):
            raise CheckpointError(f"{target} is the source of the export ({source}). Choose another target.")
    if kind == "file" and target.is_dir():
        raise CheckpointError(f"{target} is a folder, but GGUF is a single file. Use --out {target}/model.gguf")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    ours = {"file": _is_gguf, "files": _are_gguf, "folder": _is_export}[kind]
    if not ours(target):
        what = "exists and contains more than a model"
        raise CheckpointError(f"{target} {what}. Choose a new {'file' if kind == 'file' else 'folder'}.")
    if not force:
        raise CheckpointError(f"{target} exists. Choose a new target, or replace the model with --force.")


def _is_gguf(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


def _are_gguf(folder: Path) -> bool:
    return folder.is_dir() and all(map(_is_gguf, folder.iterdir()))


def _is_export(folder: Path) -> bool:
    """Return whether a folder contains only models: one, or one in each subfolder."""
    if not folder.is_dir():
        return False
    if (folder / "config.json").is_file():
        return all(p.is_file() and _belongs(p.name) for p in folder.iterdir())
    return all(p.is_dir() and (p / "config.json").is_file() and _is_export(p) for p in folder.iterdir())


def _belongs(name: str) -> bool:
    return name not in LEFT_OUT and not name.startswith(".") and any(fnmatch.fnmatch(name, p) for p in FILES)


def _write_folder(
    config: Config, policy: str, source: Path, target: Path, dtype: str, stored: str
) -> Callable[[], Any]:
    _copy(config, policy, source, target, skip_weights=dtype != stored)
    if dtype != stored:
        convert(source, target, dtype)
    if why := problem(target):
        raise CheckpointError(f"The copy of {source} is incomplete and was removed: {why}. Run the command again.")
    return partial(load, target)


def _write_gguf(config: Config, policy: str, source: Path, target: Path, dtype: str, stored: str) -> Callable[[], Any]:
    target.parent.mkdir(parents=True, exist_ok=True)
    template = _template(config, policy)
    write_gguf(source, target, dtype=dtype, name=config.run_dir.name, chat_template=template)
    return partial(load_gguf, target, source)


def _copy(config: Config, policy: str, source: Path, target: Path, *, skip_weights: bool) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and _belongs(file.name) and not (skip_weights and file.suffix == ".safetensors"):
            shutil.copyfile(file, target / file.name)
    if (template := _template(config, policy)) is not None:
        (target / _TEMPLATE).write_text(template, encoding="utf-8")


def _template(config: Config, policy: str) -> str | None:
    """Return the chat template that the policy was trained with, if it is not the model's default."""
    own = config.model_of(policy).path == config.astuner.model.path
    return chat_template(config) if own else None
