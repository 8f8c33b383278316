"""A trained model in a folder of its own: what transformers and vLLM load, and nothing that only a run needs.

Checkpoints are Hugging Face folders on every backbone, with what the run goes on from (optimizer, adapters, random
states) beside the model.  Invariant: an exported folder is complete, or not there.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner import AgentRegistry, load_config
from astuner.contracts.errors import CheckpointError
from astuner_models.serving import chat_template, find_checkpoint, policy_folder
from astuner_objectives.manifest import require_whole

if TYPE_CHECKING:
    from astuner import Config

FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py")
"""What a model folder consists of: weights, configuration, chat template, tokenizer, code of the model's own."""
LEFT_OUT = ("manifest.json",)
"""The local backbone's list of all files of a checkpoint, which would not be true of the copy."""
_TEMPLATE = "chat_template.jinja"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was exported."""

    checkpoint: Path | None
    """None: the configured model, before training."""
    models: Mapping[str, Path]
    """Policy -> its folder."""
    bytes: int


def export(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    to: str | Path,
    checkpoint: str = "best",
    force: bool = False,
    backbone: str | None = None,
    disabled_plugins: Sequence[str] = (),
) -> Exported:
    """Copy the model of a checkpoint to ``to``; where several policies train, each to a folder of its name in there.

    :param checkpoint: ``best`` (validated) or ``latest`` of the run, ``base`` (the configured model), or a folder.
    :param force: replace what was exported to ``to`` before.
    :raises CheckpointError: there is no such checkpoint, it is not complete, or the copy cannot be written there.
    """
    config = load_config(path, overrides, backbone=backbone, disabled_plugins=disabled_plugins)
    found = find_checkpoint(config, checkpoint)
    sources = _sources(config, found)
    target = Path(to).expanduser().resolve()
    _check_target(target, set(sources.values()), force)
    alone = len(set(sources.values())) == 1
    places = {policy: "" if alone else policy for policy in sources}
    temporary, aside = (target.with_name(f".{target.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    try:
        for policy, folder in sources.items():
            _copy(config, policy, folder, temporary / places[policy])
        if target.exists():
            target.rename(aside)
        temporary.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    except OSError as e:
        raise CheckpointError(
            f"cannot export to {target}: {e}; free space or choose another --to; a run that goes on may also have "
            "deleted the checkpoint meanwhile, then type the command again"
        ) from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return Exported(checkpoint=found, models={p: target / place for p, place in places.items()}, bytes=size)


def problem(folder: Path) -> str:
    """Why a folder is not a complete model; empty when it is."""
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            return f"{name} is missing"
    where: Mapping[str, str] = {}
    shards = {"model.safetensors"}
    if (folder / _INDEX).is_file():
        try:
            where = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            shards = set(where.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            return f"{_INDEX} cannot be read: {type(e).__name__}: {e}"
    held: dict[str, str] = {}
    for shard in sorted(shards):
        if not (folder / shard).is_file():
            return f"{shard} is missing"
        try:
            held |= dict.fromkeys(_tensors(folder / shard), shard)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            return f"{shard} is damaged: {e}"
    for name, shard in where.items():
        if held.get(name) != shard:
            return f"{shard} lacks {name}, which {_INDEX} says is there"
    if adapters := [name for name in held if ".lora_" in name]:
        return f"it holds adapters beside their base ({adapters[0]}), which nobody loads as one model"
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


def _check_target(target: Path, sources: set[Path], force: bool) -> None:
    """:raises CheckpointError: something would be lost."""
    for source in sources:
        if target == source or source.is_relative_to(target) or target.is_relative_to(source):
            raise CheckpointError(
                f"--to {target}: that is where the model comes from ({source}); choose another folder"
            )
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target.is_dir() and _is_export(target)):
        raise CheckpointError(
            f"--to {target} is there already and holds other things than a model; choose a new folder"
        )
    if not force:
        raise CheckpointError(
            f"--to {target} is there already; choose a new folder, or replace the model in it: --force"
        )


def _is_export(folder: Path) -> bool:
    """Whether nothing but models is in a folder: one, or one in each folder below it."""
    if (folder / "config.json").is_file():
        return all(p.is_file() and _belongs(p.name) for p in folder.iterdir())
    return all(p.is_dir() and (p / "config.json").is_file() and _is_export(p) for p in folder.iterdir())


def _belongs(name: str) -> bool:
    return name not in LEFT_OUT and not name.startswith(".") and any(fnmatch.fnmatch(name, p) for p in FILES)


def _copy(config: Config, policy: str, source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and _belongs(file.name):
            shutil.copyfile(file, target / file.name)
    template = chat_template(config)
    if template is not None and config.model_of(policy).path == config.astuner.model.path:  # as it was trained
        (target / _TEMPLATE).write_text(template, encoding="utf-8")
    if why := problem(target):
        raise CheckpointError(f"the copy of {source} is not complete, and was removed: {why}; type the command again")


def _tensors(file: Path) -> set[str]:
    """The tensors in a file of safetensors: the length of its header in 8 bytes, the header as JSON, the numbers.

    :raises ValueError: it is no such file, or is not as long as its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size - 8:
            raise ValueError("it was cut off")
        header: dict[str, Any] = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    expected = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if size != expected:
        raise ValueError(f"it has {size} bytes instead of {expected}")
    return set(header)
