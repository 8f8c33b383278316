"""A trained model for others: a folder that transformers and vLLM load, or a GGUF file that llama.cpp loads.

Checkpoints are Hugging Face folders on every backbone, with what the run goes on from (optimizer, adapters, random
states) beside the model.  Invariant: what is exported is complete and says what the trainer's model says (`parity`), or
it is not there.
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
"""What a model folder consists of: weights, configuration, chat template, tokenizer, code of the model's own."""
TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken")
"""What holds a tokenizer's vocabulary."""
LEFT_OUT = ("manifest.json",)
"""The local backbone's list of all files of a checkpoint, which would not be true of the copy."""
FORMS = ("hf", "gguf")
"""A folder of Hugging Face's kind, or a file of llama.cpp's."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
"""``auto``: as it is in the checkpoint."""
_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was exported."""

    checkpoint: Path | None
    """None: the configured model, before training."""
    models: Mapping[str, Path]
    """Policy -> its folder, or its file."""
    dtypes: Mapping[str, str]
    """Policy -> what its weights are stored in."""
    parity: Mapping[str, Parity]
    """Policy -> how far it is from the trainer's model; empty where that was not checked."""
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
    """Write the model of a checkpoint to ``to``; where several policies train, each under its name in that folder.

    :param form: one of `FORMS`.
    :param dtype: one of `DTYPES`.
    :param check: load what was written and compare its logits with those of the trainer's model.
    :param checkpoint: ``best`` (validated) or ``latest`` of the run, ``base`` (the configured model), or a folder.
    :param force: replace what was exported to ``to`` before.
    :raises ConfigError: there is no such form or dtype.
    :raises CheckpointError: there is no such checkpoint, it is not complete, what was written does not say the same, or
        it cannot be written there. Nothing is left then, and what was there before stays.
    :raises MissingDependency: a package that writes or checks it is not installed.
    """
    for asked, known in ((form, FORMS), (dtype, DTYPES)):
        if asked not in known:
            raise ConfigError(f"a model is exported as one of {', '.join(known)}, not as {asked!r}")
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
                if new in done:  # policies that share the folder of an older run
                    dtypes[policy], parity[policy] = dtypes[done[new]], parity[done[new]]
                    continue
                done[new] = policy
                stored = stored_dtype(folder)
                dtypes[policy] = stored if dtype == "auto" else dtype
                if dtypes[policy] not in BOUNDS:
                    raise CheckpointError(
                        f"{folder} holds weights in {stored}: choose --dtype {' or '.join(sorted(BOUNDS))}"
                    )
                reference = _reference(config, policy, folder) if check else None
                write = _write_gguf if gguf else _write_folder
                reload = write(config, policy, folder, new, dtypes[policy], stored)
                if reference is not None:
                    parity[policy] = _compared(reference, reload, folder, dtypes[policy], stored)
    except OSError as e:
        raise CheckpointError(
            f"cannot export to {target}: {e}; free space or choose another place; a run that goes on may also have "
            "deleted the checkpoint meanwhile, then type the command again"
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
    """:raises CheckpointError: what was written says something else."""
    rounded = [stored] * reference.merged + [dtype] * (dtype not in ("float32", stored))
    found = reference.compare(reload, folder, rounded=max(rounded, key=lambda name: BOUNDS[name], default=""))
    if not found.holds:
        how = "choose --dtype float32" if rounded else "choose another --checkpoint"
        raise CheckpointError(
            f"what was exported of {folder} does not say what the trainer's model says, and was removed: {found}; "
            f"{how}, {UNCHECKED}"
        )
    return found


def problem(folder: Path) -> str:
    """Why a folder is not a complete model; empty when it is."""
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            return f"{name} is missing"
    if not any(fnmatch.fnmatch(file.name, one) for file in folder.iterdir() for one in TOKENIZERS):
        return f"its tokenizer is missing ({', '.join(TOKENIZERS)}); copy it there from the model that was trained"
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
            return f"{file_name} lacks {name}, which {INDEX} says is there"
    if adapters := [name for name in held if ".lora_" in name]:
        return f"it holds adapters beside their base ({adapters[0]}), which nobody loads as one model"
    if contradicts_tie(folder):
        return "config.json sets tie_word_embeddings, but lm_head.weight differs from the embedding; set it to false"
    return ""


def _sources(config: Config, checkpoint: Path | None) -> dict[str, Path]:
    """Policy -> the complete model folder to copy, for those that train."""
    sources = {}
    for policy in AgentRegistry.of(config.astuner).trained_policies:
        if checkpoint is None:
            name = config.locate_model(policy=policy)
            if not Path(name).is_dir():
                raise CheckpointError(
                    f"the model before training is {name} of Hugging Face, and nothing has changed it: give that name "
                    "to whatever loads it"
                )
            folder: Path | None = Path(name)
        else:
            folder = policy_folder(checkpoint, policy)
        if folder is None:
            raise CheckpointError(f"{checkpoint} holds no model of the policy {policy!r}, which trains")
        require_whole(folder)
        if why := problem(folder):
            raise CheckpointError(f"{folder} cannot be exported: {why}")
        home = folder.resolve().parents[1]  # in Hugging Face's cache, files are links to the blobs there
        if checkpoint and (strays := [f.name for f in folder.iterdir() if not f.resolve().is_relative_to(home)]):
            raise CheckpointError(f"{folder} cannot be exported: {strays[0]} is a link out of it; put the file there")
        sources[policy] = folder.resolve()
    return sources


def _check_target(target: Path, sources: set[Path], force: bool, kind: str) -> None:
    """:param kind: what is to be there: a ``folder`` of a model, a GGUF ``file``, or a folder of ``files``.
    :raises CheckpointError: something would be lost.
    """
    for source in sources:
        if target == source or source.is_relative_to(target) or target.is_relative_to(source):
            raise CheckpointError(f"{target}: that is where the model comes from ({source}); choose another place")
    if kind == "file" and target.is_dir():
        raise CheckpointError(f"{target} is a folder, and GGUF is one file; write --out {target}/model.gguf")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    ours = {"file": _is_gguf, "files": _are_gguf, "folder": _is_export}[kind]
    if not ours(target):
        what = "is there already and holds other things than a model"
        raise CheckpointError(f"{target} {what}; choose a new {'file' if kind == 'file' else 'folder'}")
    if not force:
        raise CheckpointError(f"{target} is there already; choose a new place, or replace the model there: --force")


def _is_gguf(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


def _are_gguf(folder: Path) -> bool:
    return folder.is_dir() and all(map(_is_gguf, folder.iterdir()))


def _is_export(folder: Path) -> bool:
    """Whether nothing but models is in a folder: one, or one in each folder below it."""
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
        raise CheckpointError(f"the copy of {source} is not complete, and was removed: {why}; type the command again")
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
    """The chat template that the policy was trained with, where it is not its model's own."""
    own = config.model_of(policy).path == config.astuner.model.path
    return chat_template(config) if own else None
