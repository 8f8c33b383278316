"""What an engine's configuration depends on beside the experiment file: the model's context, GPUs, how much to do.

Invariant: the facts fit each other (`Facts.of` refuses lengths, GPUs and batches that contradict one another), so what
a table computes from them can be run.
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
"""Tokens of one forward and backward pass on a GPU where nothing is written: VERL's own default."""

_Facts = TypeVar("_Facts", bound="Facts")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that a table looks at; made by `Facts.of`. A backbone's own facts extend it."""

    BACKBONE: ClassVar[str]
    """The backbone's name, and that of its section in the experiment file."""

    config: Config
    model: str
    """The model's folder, or its Hugging Face name."""
    described: Mapping[str, Any]
    """What the model's ``config.json`` says."""
    max_model_len: int
    """Context in tokens, prompt and responses together."""
    gpus: int
    """GPUs (or what stands for them) in each machine."""
    total_steps: int | None
    """Steps of the whole run; None while the tasks are not read."""
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
        """The facts of one experiment; reads the model's ``config.json``, which may have to be downloaded.

        :param gpus: in each machine, where the cluster is known; None takes what is written, else what is in this
            machine, else 1.
        :raises ConfigError: everything that does not fit together, each with its place.
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
        """The facts of an experiment whose tasks are read for them; raises as `of`, and as who reads them."""
        tasks = read_tasks(config)
        steps = planned_steps(config, len(tasks.train))
        return cls.of(config, total_steps=steps, validation_tasks=len(tasks.validation))

    @classmethod
    def of_run(cls: type[_Facts], run: Run) -> _Facts:
        """The facts of a run; raises as `of`."""
        tasks = len(run.validation_tasks)
        return cls.of(run.config, total_steps=run.total_steps, validation_tasks=tasks, run_dir=run.run_dir)

    @classmethod
    def find_gpus(cls, config: Config) -> int:
        """GPUs of this machine, unless the experiment says how many."""
        said = config.astuner.trainer_common.n_gpus_per_node
        return gpus_here() if said is None else said

    def wrong(self) -> Iterator[tuple[str, str]]:
        """What does not fit together: the whole key to blame, and the message."""
        data, rollout = self.a.data, self.a.rollout
        context, length = _said(self.described, "max_position_embeddings"), self.max_model_len
        if context is not None and length > context:
            which = (
                f"is {length}"
                if rollout.max_model_len
                else f"is not written, and the lengths of astuner.data make {length}"
            )
            yield (
                "astuner.rollout.max_model_len",
                f"{which}, but the model was made for {context} tokens; write at most {context}",
            )
        if data.max_prompt_length and data.max_prompt_length >= length:
            yield (
                "astuner.data.max_prompt_length",
                f"is {data.max_prompt_length}, which leaves no room to answer in a context of {length} tokens; "
                f"write less, or a larger astuner.rollout.max_model_len",
            )

        lora = self.a.model.lora
        if lora.rank and (outer := _vocabulary_layers(lora.target_modules)):
            yield (
                "astuner.model.lora.target_modules",
                f"names {outer}, and {self.BACKBONE} merges adapters of hidden layers only; leave it out, or write "
                "all-linear",
            )

    @property
    def a(self) -> AstunerSection:
        """The experiment's settings."""
        return self.config.astuner

    @property
    def own(self) -> Mapping[str, Any]:
        """The engine's own keys that the person wrote below its section, dotted."""
        return written(self.config, self.BACKBONE)

    def is_written(self, key: str) -> bool:
        """Whether ``key`` (dotted, below ``astuner.``) was written, or implied by what was."""
        return f"astuner.{key}" in self.config.origins

    def place(self, key: str) -> Place:
        """Where a whole key (``astuner.…``, or one of the engine's own with its section) was written."""
        root, _, below = key.partition(".")
        if root == self.BACKBONE:
            return place_of(self.config, root, below)
        return self.config.origins.get(key, Place(str(self.config.path)))

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding.

        :raises ConfigError: its config does not say.
        """
        found = _said(self.described, "vocab_size")
        if found is None:
            raise ConfigError(f"astuner.model.path: the config of {self.model} names no vocab_size")
        return found

    @property
    def prompt_length(self) -> int:
        """Longest first prompt in tokens."""
        return self.a.data.max_prompt_length or self.max_model_len - 1

    @property
    def response_length(self) -> int:
        """Most tokens after the first prompt."""
        return min(self.a.data.max_response_length or self.max_model_len, self.max_model_len - 1)

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one pass on one GPU; the GPUs that share a sequence hold it together."""
        share = math.ceil(self.max_model_len / self.a.trainer_common.ulysses_sequence_parallel_size)
        return self.a.trainer_common.micro_batch_tokens or max(share, MICRO_BATCH_TOKENS)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per step of the run."""
        return self.a.trainer_common.mini_batch_num * self.a.trainer_common.ppo_epochs

    def sequence_fits(self, tokens: int) -> str:
        """Why ``tokens`` in one pass on one GPU are too few for a whole sequence; empty if they are not."""
        sharing = self.a.trainer_common.ulysses_sequence_parallel_size
        if tokens * sharing >= self.max_model_len:
            return ""
        return (
            f"is {tokens}, but a sequence of the whole context has {self.max_model_len} tokens and must fit into one "
            f"pass; write at least {math.ceil(self.max_model_len / sharing)}, or a smaller "
            "astuner.rollout.max_model_len"
        )


def model_config(model: str, *, trust_remote_code: bool = False) -> Mapping[str, Any]:
    """What the ``config.json`` of a folder says, or of a name on the hub.

    :raises ConfigError: it cannot be read.
    :raises RunError: it is not on this machine, and the hub does not answer.
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
    except (OSError, ValueError) as e:  # not JSON is a ValueError too
        reason = " ".join(str(e).split())[:200]
        raise ConfigError(f"astuner.model.path: the config of {model} cannot be read: {reason}") from e


def gpus_here() -> int:
    """GPUs of this machine; 1 where there is none, or none that can be counted."""
    try:
        import torch
    except ImportError:
        return 1
    return torch.cuda.device_count() or 1


def _said(described: Mapping[str, Any], name: str) -> int | None:
    """A number of the decoder, which models with more than text describe in a section of its own."""
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
        raise ConfigError(f"the config of {model} has no max_position_embeddings; write astuner.rollout.max_model_len")
    return context


def _vocabulary_layers(target_modules: str | Sequence[str]) -> str:
    """Return which of embedding and head ``lora.target_modules`` names; a string is a pattern, as in peft."""
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
