"""What VERL's configuration depends on beside the experiment file: the model's context, GPUs, how much there is to do.

Invariant: the facts fit each other (`Facts.of` refuses lengths, GPUs and batches that contradict one another), so what
the table computes from them can be run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.config.places import Place
from astuner.errors import ConfigError
from astuner.run_dir import RunDir

if TYPE_CHECKING:
    from astuner.config import Config
    from astuner.config.schema import Astuner

MICRO_BATCH_TOKENS = 16384
"""Tokens of one forward and backward pass on a GPU where nothing is written: VERL's own default."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that `astuner_verl.table` looks at; made by `Facts.of`."""

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
        cls,
        config: Config,
        *,
        total_steps: int | None = None,
        validation_tasks: int = 0,
        gpus: int | None = None,
        run_dir: RunDir | None = None,
    ) -> Facts:
        """The facts of one experiment; reads the model's ``config.json``, which may have to be downloaded.

        :param gpus: in each machine, where the cluster is known; None takes what is written, else what is in this
            machine, else 1.
        :raises ConfigError: everything that does not fit together, each with its place.
        """
        model = config.locate_model()
        described = model_config(model)
        facts = cls(
            config=config,
            model=model,
            described=described,
            max_model_len=_max_model_len(config, model, described),
            gpus=_gpus(config) if gpus is None else gpus,
            total_steps=total_steps,
            validation_tasks=validation_tasks,
            run_dir=run_dir or RunDir(config.run_dir),
        )
        wrong = [
            (config.origins.get(f"astuner.{key}", Place(str(config.path))), key, text) for key, text in _wrong(facts)
        ]
        if wrong:
            raise ConfigError([f"{place}: astuner.{key} {text}" for place, key, text in wrong])
        return facts

    @property
    def a(self) -> Astuner:
        """The experiment's settings."""
        return self.config.astuner

    def is_written(self, key: str) -> bool:
        """Whether ``key`` (dotted, below ``astuner.``) was written, or implied by what was."""
        return f"astuner.{key}" in self.config.origins

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


def model_config(model: str) -> Mapping[str, Any]:
    """What the ``config.json`` of a folder says, or of a name on the hub.

    :raises ConfigError: it cannot be read.
    """
    file = Path(model) / "config.json"
    try:
        if file.is_file():
            found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return found
        from transformers import AutoConfig

        asked: Mapping[str, Any] = AutoConfig.from_pretrained(model).to_dict()
        return asked
    except (OSError, ValueError) as e:  # not JSON is a ValueError too
        reason = " ".join(str(e).split())[:200]
        raise ConfigError(f"astuner.model.path: the config of {model} cannot be read: {reason}") from e


def _said(described: Mapping[str, Any], name: str) -> int | None:
    """A number of the decoder, which models with more than text describe in a section of its own."""
    found = described.get(name) or (described.get("text_config") or {}).get(name)
    return None if found is None else int(found)


def _max_model_len(config: Config, model: str, described: Mapping[str, Any]) -> int:
    data, written = config.astuner.data, config.astuner.rollout.max_model_len
    if written is None and data.max_prompt_length and data.max_response_length:
        written = data.max_prompt_length + data.max_response_length
    if written is not None:
        return written
    context = _said(described, "max_position_embeddings")
    if context is None:
        raise ConfigError(f"the config of {model} has no max_position_embeddings; write astuner.rollout.max_model_len")
    return context


def _gpus(config: Config) -> int:
    written = config.astuner.trainer_common.n_gpus_per_node
    if written is not None:
        return written
    try:
        import torch
    except ImportError:
        return 1
    return torch.cuda.device_count() or 1


def _wrong(facts: Facts) -> Iterator[tuple[str, str]]:
    """What does not fit together: the key to blame, and the message."""
    data, rollout, common = facts.a.data, facts.a.rollout, facts.a.trainer_common
    context, length = _said(facts.described, "max_position_embeddings"), facts.max_model_len
    if context is not None and length > context:
        which = (
            f"is {length}"
            if rollout.max_model_len
            else f"is not written, and the lengths of astuner.data make {length}"
        )
        yield "rollout.max_model_len", f"{which}, but the model was made for {context} tokens; write at most {context}"
    if data.max_prompt_length and data.max_prompt_length >= length:
        yield (
            "data.max_prompt_length",
            f"is {data.max_prompt_length}, which leaves no room to answer in a context of {length} tokens; "
            f"write less, or a larger astuner.rollout.max_model_len",
        )
    if rollout.temperature == 0:
        yield "rollout.temperature", "is 0, and greedy decoding leaves nothing to learn from; write a value above 0"
    if facts.gpus < 1:
        yield "trainer_common.n_gpus_per_node", f"is {facts.gpus}, and verl needs one at least"
        return
    world, sharing = facts.gpus * common.nnodes, common.ulysses_sequence_parallel_size
    for key, share, who in (
        ("rollout.tensor_model_parallel_size", rollout.tensor_model_parallel_size, "rollout engines"),
        ("trainer_common.ulysses_sequence_parallel_size", sharing, "groups that share sequences"),
    ):
        if world % share:
            yield (
                key,
                f"is {share}, but {common.nnodes} x {facts.gpus} = {world} GPUs cannot be cut into {who} of {share}",
            )
    if facts.micro_batch_tokens * sharing < length:
        yield (
            "trainer_common.micro_batch_tokens",
            f"is {facts.micro_batch_tokens}, but a sequence of the whole context has {length} tokens and must fit into "
            f"one pass; write at least {math.ceil(length / sharing)}, or a smaller astuner.rollout.max_model_len",
        )
    if not float(facts.a.model.lora.alpha).is_integer():
        yield "model.lora.alpha", f"is {facts.a.model.lora.alpha:g}, and verl takes whole numbers"
