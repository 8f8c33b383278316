"""Inputs of an engine's configuration from outside the experiment file: model context, GPUs, amount of work.

Invariant: the facts are consistent (`Facts.of` refuses lengths, GPUs and batches that contradict one another), so a
configuration computed from them can run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from astuner import RunDir, planned_steps, read_tasks
from astuner.contracts.errors import ConfigError
from astuner.contracts.places import Place
from astuner_models.hub import require_model
from astuner_models.pretrained import load_pretrained
from astuner_ray.native.keys import place_of, written

if TYPE_CHECKING:
    from astuner import AstunerSection, Config
    from astuner.contracts.run import Run

MICRO_BATCH_TOKENS = 16384
"""Default tokens of one forward and backward pass on a GPU, as in VERL."""

_Facts = TypeVar("_Facts", bound="Facts")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Inputs of a table, created by `Facts.of`; backbones add their own facts in subclasses."""

    BACKBONE: ClassVar[str]
    """Name of the backbone and of its section in the experiment file."""

    config: Config
    model: str
    """Folder or Hugging Face name of the model."""
    described: Mapping[str, Any]
    """Content of the model's ``config.json``."""
    max_model_len: int
    """Context in tokens: prompt and responses together."""
    gpus: int
    """GPUs (or their replacements) per machine."""
    total_steps: int | None
    """Steps of the run; None before the tasks are read."""
    validation_tasks: int
    run_dir: RunDir

    @classmethod
    def of(
        cls: type[_Facts],
        config: Config,
        *,
        total_steps: int | None = None,
        validation_tasks: int = 0,
        gpus: int | None = None,
        run_dir: RunDir | None = None,
    ) -> _Facts:
        """Return the facts of an experiment; reads the model's ``config.json``, which may need a download.

        :param gpus: GPUs per machine, if the cluster is known; None: the configured number, else the GPUs of this
            machine, else 1.
        :raises ConfigError: All inconsistencies, each with its place.
        """
        model = config.locate_model()
        described = model_config(model, trust_remote_code=config.astuner.model.trust_remote_code)
        facts = cls(
            config=config,
            model=model,
            described=described,
            max_model_len=_max_model_len(config, model, described),
            gpus=cls.find_gpus(config) if gpus is None else gpus,
            total_steps=total_steps,
            validation_tasks=validation_tasks,
            run_dir=run_dir or RunDir(config.run_dir),
        )
        if wrong := [f"{facts.place(key)}: {key} {text}" for key, text in facts.wrong()]:
            raise ConfigError(wrong)
        return facts

    @classmethod
    def planned(cls: type[_Facts], config: Config) -> _Facts:
        """Read the tasks and return the facts of an experiment; raises as `of` and as the task reader."""
        tasks = read_tasks(config)
        steps = planned_steps(config, len(tasks.train))
        return cls.of(config, total_steps=steps, validation_tasks=len(tasks.validation))

    @classmethod
    def of_run(cls: type[_Facts], run: Run) -> _Facts:
        """Return the facts of a run; raises as `of`."""
        tasks = len(run.validation_tasks)
        return cls.of(run.config, total_steps=run.total_steps, validation_tasks=tasks, run_dir=run.run_dir)

    @classmethod
    def find_gpus(cls, config: Config) -> int:
        """Return the configured number of GPUs, else the GPUs of this machine."""
        said = config.astuner.trainer_common.n_gpus_per_node
        return gpus_here() if said is None else said

    def wrong(self) -> Iterator[tuple[str, str]]:
        """Yield inconsistencies as pairs of the key responsible and a message."""
        data, rollout = self.a.data, self.a.rollout
        context, length = _said(self.described, "max_position_embeddings"), self.max_model_len
        if context is not None and length > context:
            which = (
                f"is {length}"
                if rollout.max_model_len
                else f"is not set, and the lengths in astuner.data add up to {length} tokens"
            )
            yield (
                "astuner.rollout.max_model_len",
                f"{which}, but the context of the model is {context} tokens; use at most {context}",
            )
        if data.max_prompt_length and data.max_prompt_length >= length:
            yield (
                "astuner.data.max_prompt_length",
                f"is {data.max_prompt_length}, which leaves no room to answer in a context of {length} tokens; "
                f"lower it, or raise astuner.rollout.max_model_len",
            )

        lora = self.a.model.lora
        if lora.rank and (outer := _vocabulary_layers(lora.target_modules)):
            yield (
                "astuner.model.lora.target_modules",
                f"names {outer}, but {self.BACKBONE} merges adapters of hidden layers only; remove it, or use "
                "all-linear",
            )

    @property
    def a(self) -> AstunerSection:
        """The experiment's settings."""
        return self.config.astuner

    @property
    def own(self) -> Mapping[str, Any]:
        """The engine's own keys that the user wrote, dotted, below the section of the backbone."""
        return written(self.config, self.BACKBONE)

    def is_written(self, key: str) -> bool:
        """Return whether ``key`` (dotted, below ``astuner.``) was written, or implied by another key."""
        return f"astuner.{key}" in self.config.origins

    def place(self, key: str) -> Place:
        """Return where a full key (``astuner.…``, or an engine key with its section) was written."""
        root, _, below = key.partition(".")
        if root == self.BACKBONE:
            return place_of(self.config, root, below)
        return self.config.origins.get(key, Place(str(self.config.path)))

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding.

        :raises ConfigError: The model's config has no ``vocab_size``.
        """
        found = _said(self.described, "vocab_size")
        if found is None:
            raise ConfigError(f"astuner.model.path: the config of {self.model} has no vocab_size")
        return found

    @property
    def prompt_length(self) -> int:
        """Most tokens of the first prompt."""
        return self.a.data.max_prompt_length or self.max_model_len - 1

    @property
    def response_length(self) -> int:
        """Most tokens after the first prompt."""
        return min(self.a.data.max_response_length or self.max_model_len, self.max_model_len - 1)

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one pass on one GPU; GPUs that share a sequence each hold a part of it."""
        share = math.ceil(self.max_model_len / self.a.trainer_common.ulysses_sequence_parallel_size)
        return self.a.trainer_common.micro_batch_tokens or max(share, MICRO_BATCH_TOKENS)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per training step."""
        return self.a.trainer_common.mini_batch_num * self.a.trainer_common.ppo_epochs

    def sequence_fits(self, tokens: int) -> str:
        """Return why ``tokens`` per pass and GPU cannot hold the longest sequence; empty if they can."""
        sharing = self.a.trainer_common.ulysses_sequence_parallel_size
        if tokens * sharing >= self.max_model_len:
            return ""
        return (
            f"is {tokens}, but the longest sequence has {self.max_model_len} tokens and must fit into one pass; use at "
            f"least {math.ceil(self.max_model_len / sharing)}, or lower astuner.rollout.max_model_len"
        )


def model_config(model: str, *, trust_remote_code: bool = False) -> Mapping[str, Any]:
    """Return the ``config.json`` of a folder or of a name on the hub.

    :raises ConfigError: It cannot be read.
    :raises RunError: It is not on this machine, and the hub does not answer.
    """
    file = Path(model) / "config.json"
    try:
        if file.is_file():
            found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return found
        require_model(model)
        from transformers import AutoConfig

        asked: Mapping[str, Any] = load_pretrained(AutoConfig, model, trust_remote_code=trust_remote_code).to_dict()
        return asked
    except (OSError, ValueError) as e:  # invalid JSON raises ValueError
        reason = " ".join(str(e).split())[:200]
        raise ConfigError(f"astuner.model.path: the config of {model} cannot be read: {reason}") from e


def gpus_here() -> int:
    """Return the number of GPUs of this machine; 1 if there are none or they cannot be counted."""
    try:
        import torch
    except ImportError:
        return 1
    return torch.cuda.device_count() or 1


def _said(described: Mapping[str, Any], name: str) -> int | None:
    """Return a number of the decoder; multimodal models keep it in a section for text."""
    found = described.get(name) or (described.get("text_config") or {}).get(name)
    return None if found is None else int(found)


def _max_model_len(config: Config, model: str, described: Mapping[str, Any]) -> int:
    data, said = config.astuner.data, config.astuner.rollout.max_model_len
    if said is None and data.max_prompt_length and data.max_response_length:
        said = data.max_prompt_length + data.max_response_length
    if said is not None:
        return said
    context = _said(described, "max_position_embeddings")
    if context is None:
        raise ConfigError(f"the config of {model} has no max_position_embeddings; set astuner.rollout.max_model_len")
    return context


def _vocabulary_layers(target_modules: str | Sequence[str]) -> str:
    """Return whether ``lora.target_modules`` names the embedding or the head; a string is a pattern, as in peft."""
    layers = {"model.embed_tokens": "the embedding (embed_tokens)", "lm_head": "the vocabulary head (lm_head)"}
    if isinstance(target_modules, str):
        matches = [label for name, label in layers.items() if re.fullmatch(target_modules, name)]
    else:
        matches = [
            label
            for name, label in layers.items()
            if any(name == target or name.endswith(f".{target}") for target in target_modules)
        ]
    return " and ".join(matches)
