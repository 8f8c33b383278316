"""What Trinity's configuration depends on beside the experiment file.

GPUs are for rollouts or for training, never for both, and how many rollout engines there are decides it; so does
Trinity's mode, which a person writes in Trinity's words.  What they wrote there is read here, because the rest follows
from it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from astuner import Config
from astuner_ray.native import facts
from astuner_ray.native.compose import platform as find_platform
from astuner_ray.native.compose import without_flash_attention
from astuner_ray.native.gpu_memory import gib, of_facts
from astuner_ray.native.keys import written

VERL = "trainer.trainer_config"
"""What Trinity's trainer hands to VERL."""
ENGINE = "explorer.rollout_model"
ENGINE_SHARE = 0.9
"""Trinity's ``gpu_memory_utilization`` where nothing is written."""
ENGINES = f"{ENGINE}.engine_num"
HELPERS = "explorer.auxiliary_models"
RUNNERS = "explorer.runner_per_model"
STALENESS = "algorithm.sample_strategy_args.max_staleness"
INFLIGHT = "explorer.max_inflight_batches"
OFFSET = "synchronizer.sync_offset"
SYNC = "synchronizer.sync_method"
MERGING = f"{VERL}.model.external_lib"
MERGED = "astuner_trinity.merged"
"""What VERL imports, so that engines get the weights with the adapters in them."""
WHOLE = {
    RUNNERS: 1,
    STALENESS: 0,
    INFLIGHT: 1,
    ENGINES: 1,
    f"{ENGINE}.data_parallel_size": 1,
    f"{ENGINE}.pipeline_parallel_size": 1,
    "synchronizer.sync_interval": 1,
    OFFSET: 0,
    "trainer.max_token_len_per_gpu": 1,
}
"""Trinity's keys that the facts are computed from: whole numbers, and the least that each can be."""
PARTS = ("explore", "train")
"""Modes of two commands that share a run: the first has its log and rolls out, the second trains.  Trinity is told
``both``: its actors find each other in Ray's cluster, whoever has started them.
"""
MODES = ("both", *PARTS)
"""What can be written as Trinity's mode; `_INSTEAD` has what to do in place of its others."""
STYLES = ("fixed", "explorer_driven", "trainer_driven", "fully_async")
OLD_STYLES = {"dynamic_by_explorer": "explorer_driven", "dynamic_by_trainer": "trainer_driven"}
_INSTEAD = {
    "bench": "`astuner eval` measures checkpoints",
    "serve": "`astuner run --with feedback` serves users, and learns from what they rate",
    # seen on a CPU; on a GPU: Trinity's issue 602
    "colocate": "it never starts in Trinity 0.6.0, whose engine and trainer each ask Ray for the one GPU: "
    "`--backbone verl` shares GPUs",
}
_LIMIT = 3600
"""Seconds that one part waits for another at least: Trinity's own default between explorer and trainer."""
_SLACK = 60
"""Seconds more than ASTuner's own limits: a group ends by those, with a reason, before Trinity ends it without."""

WITHOUT_FLASH_ATTENTION = {
    "trainer.trainer_config.model.override_config.attn_implementation": "sdpa",
    "trainer.use_remove_padding": False,
}
"""What Trinity needs where flash-attn is not installed: torch's own attention, which wants padded rows."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """What a machine asks of Trinity; as it stands, GPUs on which nothing is missing."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Trinity's dotted keys that it needs."""
    worker_setup: str = ""
    """``module.function`` that every process calls before it imports Trinity (Ray's ``worker_process_setup_hook``)."""
    logical_gpus: int | None = None
    """How many GPUs Ray is told of where there are none."""


def platform(env: Mapping[str, str] = os.environ) -> Platform:
    """The platform that ``TRINITY_PLATFORM`` names; GPUs where it names none.

    :raises ConfigError: nobody brings the one that it names.
    """
    on_gpus = {"settings": without_flash_attention(WITHOUT_FLASH_ATTENTION)}
    return Platform(**find_platform(Facts.BACKBONE, engine_has_others=False, on_gpus=on_gpus, env=env))


@dataclass(frozen=True, kw_only=True)
class Facts(facts.Facts):
    """All that `astuner_trinity.table` looks at; made by `Facts.of`."""

    BACKBONE: ClassVar[str] = "trinity"

    @classmethod
    def find_gpus(cls, config: Config) -> int:
        lent = platform().logical_gpus
        said = config.astuner.trainer_common.n_gpus_per_node
        return lent if said is None and lent is not None else super().find_gpus(config)

    # ------------------------------------------------------------------------------------------------- Trinity's words

    @property
    def own(self) -> Mapping[str, Any]:
        """Trinity's own keys that the person wrote, dotted; without a ``mode`` of `PARTS`, and names of models."""
        own = {key: value for key, value in super().own.items() if not (key == "mode" and value in PARTS)}
        if isinstance(own.get(HELPERS), list):
            own[HELPERS] = [_without_name(model) for model in own[HELPERS]]
        return own

    @property
    def helper_names(self) -> Sequence[object]:
        """What the auxiliary models are called, in their order; None: it has only its number."""
        models = super().own.get(HELPERS)
        return [model.get("name") for model in models if isinstance(model, dict)] if isinstance(models, list) else []

    @property
    def sync_style(self) -> str:
        """Who decides when the engines get new weights, in today's words of Trinity's."""
        style = str(self.own.get("synchronizer.sync_style") or STYLES[0]).lower()
        return OLD_STYLES.get(style, style)

    @property
    def sync_interval(self) -> int:
        """Steps between new weights."""
        return self._whole("synchronizer.sync_interval", 1)

    @property
    def sync_offset(self) -> int:
        """Steps that rollouts are ahead of training."""
        return self._whole(OFFSET, 0)

    @property
    def max_staleness(self) -> int | None:
        """Versions that the weights of a rollout may be behind those that it trains; None: as the queue makes it.

        Fully asynchronous rollouts would run ahead without end, so there it is as many batches as are rolled out at
        once, where nothing is written.
        """
        inflight = self._whole(INFLIGHT, 2)
        return self._whole(STALENESS, inflight) if self.sync_style == "fully_async" else None

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one pass on one GPU."""
        return self._whole("trainer.max_token_len_per_gpu", super().micro_batch_tokens)

    # ------------------------------------------------------------------------------------------------------------ GPUs

    @property
    def world(self) -> int:
        """GPUs of all machines."""
        return self.gpus * self.a.trainer_common.nnodes

    @property
    def engine_gpus(self) -> int:
        """GPUs of one rollout engine."""
        parallel = math.prod(self._whole(f"{ENGINE}.{kind}_parallel_size", 1) for kind in ("data", "pipeline"))
        return self.a.rollout.tensor_model_parallel_size * parallel

    @property
    def helper_gpus(self) -> int:
        """GPUs of the auxiliary models, which are never trained."""
        return sum(math.prod(_sizes(model)) for model in self.own.get(HELPERS) or [])

    @property
    def engines(self) -> int:
        """Rollout engines; where nobody says it, as many as leave training half of the GPUs and whole machines."""
        if self.own.get(ENGINES) is not None:
            return self._whole(ENGINES, 1)
        return self._engines_that_fit() or 1

    @property
    def rollout_gpus(self) -> int:
        """GPUs of rollout engines and auxiliary models."""
        return self.engines * self.engine_gpus + self.helper_gpus

    @property
    def reserved(self) -> tuple[int, int]:
        """GPUs and CPUs that this command's processes reserve with Ray: VERL has room for three workers on each of the
        trainer's GPUs, an engine takes a CPU for each machine, and one is free for those that need it to start only."""
        engines = self.rollout_gpus
        if part_of(self.config):  # the trainer is the other command's
            return engines, engines + 1
        return self.world, 3 * self.training_gpus + engines + 1

    @property
    def training_gpus(self) -> int:
        """GPUs of the trainer."""
        return self.world - self.rollout_gpus

    @property
    def data_parallel(self) -> int:
        """Into how many parts a batch is cut: groups of GPUs that hold sequences together."""
        return self.training_gpus // self.a.trainer_common.ulysses_sequence_parallel_size

    def _engines_that_fit(self) -> int:
        half = max(self.world // 2, self.engine_gpus + self.helper_gpus)
        most = (half - self.helper_gpus) // self.engine_gpus
        good = (n for n in range(most, 0, -1) if self._can_train(self.world - n * self.engine_gpus - self.helper_gpus))
        return next(good, 0)

    def _can_train(self, gpus: int) -> bool:
        """Whether a trainer can have so many: some of one machine, or all of several; whole groups for sequences."""
        shared = self.a.trainer_common.ulysses_sequence_parallel_size
        return gpus > 0 and gpus % shared == 0 and (gpus < self.gpus or gpus % self.gpus == 0)

    # -------------------------------------------------------------------------------------------------- groups and time

    @property
    def drawn(self) -> int:
        """Groups that a step begins; training takes the first ``train_batch_size`` of them."""
        return math.ceil(self.a.data.train_batch_size * self.a.rollout.oversample)

    @property
    def runners_per_engine(self) -> int:
        """Processes for each engine that host one group of episodes at a time."""
        rollout = self.a.rollout
        wanted = math.ceil(rollout.max_env_worker / rollout.num_repeat / self.engines)
        return self._whole(RUNNERS, max(1, min(wanted, math.ceil(self.drawn / self.engines))))

    def processes(self, runners: int) -> dict[str, int]:
        """The actors of a run -> how many; vLLM's engines have processes of their own below them.

        :param runners: Trinity's workflow runners, of all engines, each with a process in which episodes run.
        """
        return {
            "training": self.training_gpus,
            "rollout engines": self.engines,
            "workflow runners": runners,
            "running episodes": runners,
            "of Trinity's others": 7,  # explorer, trainer, coordinator, synchronizer, queue, checkpoints; our mailbox
        }

    @property
    def episodes_per_runner(self) -> int:
        """How many episodes run at once in each of these processes."""
        return math.ceil(self.a.rollout.max_env_worker / (self.engines * self.runners_per_engine))

    @property
    def episode_seconds(self) -> float:
        """The longest that ASTuner's own limits let an episode take, retries and waiting for its world included."""
        a = self.a
        attempt = a.rollout.episode_timeout + a.env_service.timeout + a.env_service.busy_timeout
        return (a.rollout.max_retries + 1) * (attempt + a.task_judge.judge_timeout)

    @property
    def group_seconds(self) -> int:
        """After this, Trinity ends a group, or the one drawn in its place: ASTuner's own limits must have failed."""
        rollout, algorithm = self.a.rollout, self.a.trainer_common.algorithm
        draws = algorithm.max_draws if algorithm.dynamic_sampling else 1
        episodes = max(draws * self._waves(rollout.num_repeat), self._waves(rollout.val_kwargs.num_repeat))
        return math.ceil(episodes * self.episode_seconds) + _SLACK

    @property
    def patience(self) -> int:
        """Seconds that one part waits for another: all groups of a step at their worst, and a validation beside."""
        runners = self.engines * self.runners_per_engine
        rounds = math.ceil(self.drawn / runners) + math.ceil(self.validation_tasks / runners)
        return max(_LIMIT, rounds * self.group_seconds)

    def _waves(self, episodes: int) -> int:
        """How many episodes of a group come one after another."""
        return math.ceil(episodes / self.episodes_per_runner)

    # ---------------------------------------------------------------------------------------------- what does not fit

    def wrong(self) -> Iterator[tuple[str, str]]:
        yield from super().wrong()
        if unreadable := list(self._unreadable()):
            yield from unreadable
            return
        yield from self._wrong_gpus()
        yield from self._wrong_adapters()
        if too_few := self.sequence_fits(self.micro_batch_tokens):
            said = self.own.get("trainer.max_token_len_per_gpu") is not None
            tokens = "trinity.trainer.max_token_len_per_gpu" if said else "astuner.trainer_common.micro_batch_tokens"
            yield tokens, too_few
        for key in (OFFSET,) if self.sync_style == "fully_async" else (INFLIGHT, STALENESS):
            if key in self.own:
                only = f"with {STYLES[-1]}" if key == OFFSET else f"but with {STYLES[-1]}"
                yield f"trinity.{key}", f"means nothing {only} as trinity.synchronizer.sync_style; leave it out"
        if self.max_staleness is not None and self.sync_interval > self.max_staleness + 1:
            yield (
                "trinity.synchronizer.sync_interval",
                f"is {self.sync_interval}, so rollouts would wait for weights that training, which waits for rollouts, "
                f"hands out too late; write {self.max_staleness + 1} at most, or a larger trinity.{STALENESS}",
            )
        if self.drawn > self.a.data.train_batch_size and self.sync_style == "fixed":
            yield (
                "astuner.rollout.oversample",
                f"is {self.a.rollout.oversample:g}, and while rollouts and training take turns Trinity waits for all "
                f"groups; leave it out, or write trinity.synchronizer.sync_style: {' or '.join(STYLES[1:])}",
            )

    def _unreadable(self) -> Iterator[tuple[str, str]]:
        """What is written in Trinity's words, and cannot be computed with."""
        for key, least in WHOLE.items():
            value = self.own.get(key, least)
            if not (type(value) is int and value >= least):
                yield f"trinity.{key}", f"should be a whole number from {least}, got {value!r}"
        for key, value, possible in (
            ("mode", str(self.own.get("mode") or MODES[0]), MODES),
            ("synchronizer.sync_style", self.sync_style, STYLES),
        ):
            if value not in possible:
                instead = f"{_INSTEAD[value]}; " if key == "mode" and value in _INSTEAD else ""
                yield f"trinity.{key}", f"is {value!r}; {instead}write one of {', '.join(possible)}"
        helpers = self.own.get(HELPERS) or []
        if not isinstance(helpers, list) or not all(isinstance(model, dict) for model in helpers):
            yield f"trinity.{HELPERS}", "should be a list with a section for each model"
        elif any(type(n) is not int or n < 1 for model in helpers for n in _sizes(model)):
            yield f"trinity.{HELPERS}", "should say engine_num and *_parallel_size as whole numbers from 1"
        names = [name for name in self.helper_names if name is not None]
        variables = [str(name).upper() for name in names]
        if len(set(variables)) < len(names) or not all(re.fullmatch(r"[A-Z][A-Z0-9_]*", name) for name in variables):
            yield f"trinity.{HELPERS}", f"should give each a name of its own, of letters, digits and _, got {names}"

    def _wrong_adapters(self) -> Iterator[tuple[str, str]]:
        lora = self.a.model.lora
        if not lora.rank:
            return
        if not float(lora.alpha).is_integer():
            yield "astuner.model.lora.alpha", f"is {lora.alpha:g}, and verl takes whole numbers"
        if str(self.own.get(SYNC)).lower() == "memory":
            yield (
                f"trinity.{SYNC}",
                "is memory, by which Trinity sends the model and its adapters apart, and engines take whole weights; "
                "write nccl or checkpoint, or leave it out",
            )
        if self.own.get(MERGING) not in (None, MERGED):
            yield (
                f"trinity.{MERGING}",
                f"is {self.own[MERGING]!r}, and with astuner.model.lora it is {MERGED}, or engines would get the "
                "weights without the adapters; leave it out, or train all weights",
            )

    def _wrong_gpus(self) -> Iterator[tuple[str, str]]:
        count, engine, world = "astuner.trainer_common.n_gpus_per_node", self.engine_gpus, self.world
        shared = self.a.trainer_common.ulysses_sequence_parallel_size
        engines = f"trinity.{ENGINES}" if self.own.get(ENGINES) is not None else count
        there = f"{self.a.trainer_common.nnodes} x {self.gpus} = {world} GPUs"
        takes = f"{self.engines} x {engine} for rollouts"
        if self.helper_gpus:
            takes = f"{takes} and {self.helper_gpus} for auxiliary models"
        if self.gpus < 1:
            yield count, f"is {self.gpus}, and trinity needs one at least"
        elif world < 2:
            yield (
                count,
                "is 1, or there is one GPU here or none, and trinity needs two: one for rollouts, one for training; "
                "write how many the cluster's machines have, or take --backbone verl, which shares one (without any "
                "GPU: --backbone local)",
            )
        elif engine > self.gpus and engine % self.gpus:
            yield (
                "astuner.rollout.tensor_model_parallel_size",
                f"makes rollout engines of {engine} GPUs, which are neither a part of a machine's {self.gpus} nor "
                "whole machines",
            )
        elif self.rollout_gpus >= world:
            yield (
                engines,
                f"makes {takes}, but there are {there}, and training needs some too; write fewer engines, or more GPUs",
            )
        elif self.training_gpus % shared:
            yield (
                "astuner.trainer_common.ulysses_sequence_parallel_size",
                f"is {shared}, but {takes} leave {self.training_gpus} of {there} for training, which cannot be cut "
                f"into groups of {shared} that share sequences; write another number of engines as trinity.{ENGINES}",
            )
        elif not self._can_train(self.training_gpus):
            yield (
                engines,
                f"makes {takes}, which leave {self.training_gpus} of {there} for training; Trinity trains on GPUs of "
                "one machine or on whole machines, so write another number of engines",
            )

    def memory_plan(self) -> Mapping[str, str]:
        """Lines of the plan; the memory, an estimate, only for a model whose shape its config says in the usual words.

        Rollout engines and training have GPUs of their own: an engine may fill ``gpu_memory_utilization`` of its GPUs
        with weights and cache, and the trainer's state and activations have theirs to themselves.
        """
        helpers = f", {self.helper_gpus} for auxiliary models" if self.helper_gpus else ""
        rollouts = f"{self.engines} x {self.engine_gpus} for rollouts{helpers}"
        lines = {"GPUs": f"{self.world}: {rollouts}, {self.training_gpus} for training"}
        found = of_facts(self, gpus=self.training_gpus)
        if found is None:
            return lines
        share = float(self.own.get(f"{ENGINE}.gpu_memory_utilization") or ENGINE_SHARE)
        conversation = self.max_model_len * found.kv_per_token
        engine = (found.rollout_weights + conversation) / share
        lines["a rollout engine"] = (
            f"in {share:g} of each of its GPUs: {gib(found.rollout_weights)} weights + {gib(conversation)} for each "
            f"conversation of {self.max_model_len:,} tokens, so {gib(engine)} at least"
        )
        lines["an update"] = found.of_update(self.micro_batch_tokens)
        return lines

    def _whole(self, key: str, default: int) -> int:
        value = self.own.get(key)
        return value if type(value) is int else default


def part_of(config: Config) -> str:
    """Which of two commands of one run this is, of `PARTS`; empty: the only one."""
    mode = written(config, Facts.BACKBONE).get("mode")
    return str(mode) if mode in PARTS else ""


def helper_environ(servers: Sequence[tuple[str, str]], names: Sequence[object]) -> dict[str, str]:
    """The variables by which judges find the auxiliary models: by number, and by name where one has a name.

    :param servers: of each its URL and what it calls the model.
    """
    found: dict[str, str] = {}
    for i, (url, model) in enumerate(servers):
        named = [str(names[i]).upper()] if i < len(names) and names[i] is not None else []
        for which in (str(i), *named):
            found |= {f"ASTUNER_AUXILIARY_{which}_URL": url, f"ASTUNER_AUXILIARY_{which}_MODEL": model}
    return found


def _without_name(model: Any) -> Any:
    return {key: value for key, value in model.items() if key != "name"} if isinstance(model, dict) else model


def _sizes(model: dict[str, Any]) -> Iterator[Any]:
    for name in ("engine_num", "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"):
        yield model.get(name, 1)
