"""Inputs of Trinity's configuration from outside the experiment file.

A GPU is used either for rollouts or for training; the number of rollout engines determines the split.  Trinity's mode
has further consequences.  Users set both with Trinity's own keys, so this module reads them.
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
"""Section that Trinity's trainer passes to VERL."""
ENGINE = "explorer.rollout_model"
ENGINE_SHARE = 0.9
"""Trinity's default of ``gpu_memory_utilization``."""
ENGINES = f"{ENGINE}.engine_num"
HELPERS = "explorer.auxiliary_models"
RUNNERS = "explorer.runner_per_model"
STALENESS = "algorithm.sample_strategy_args.max_staleness"
INFLIGHT = "explorer.max_inflight_batches"
OFFSET = "synchronizer.sync_offset"
SYNC = "synchronizer.sync_method"
MERGING = f"{VERL}.model.external_lib"
MERGED = "astuner_trinity.merged"
"""Module that VERL imports, so that engines receive weights with merged adapters."""
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
"""Trinity's integer keys from which facts are computed, with their least values."""
PARTS = ("explore", "train")
"""Modes of two commands that share a run: the first owns the run and rolls out, the second trains.  Trinity itself runs
in mode ``both``: its actors find each other in Ray's cluster, regardless of the process that started them.
"""
MODES = ("both", *PARTS)
"""Accepted values of Trinity's mode; `_INSTEAD` explains alternatives to the others."""
STYLES = ("fixed", "explorer_driven", "trainer_driven", "fully_async")
OLD_STYLES = {"dynamic_by_explorer": "explorer_driven", "dynamic_by_trainer": "trainer_driven"}
_INSTEAD = {
    "bench": "run `astuner eval` to measure checkpoints",
    "serve": "run `astuner run --with feedback` to serve users and learn from their ratings",
    # seen on a CPU; on a GPU: Trinity's issue 602
    "colocate": "Trinity 0.6.0 cannot start it, because engine and trainer each request the only GPU from Ray: "
    "`--backbone verl` shares GPUs",
}
_LIMIT = 3600
"""Least seconds that one part waits for another: Trinity's default between explorer and trainer."""
_SLACK = 60
"""Extra seconds over ASTuner's own limits, which end a group with a reason before Trinity ends it without one."""

WITHOUT_FLASH_ATTENTION = {
    "trainer.trainer_config.model.override_config.attn_implementation": "sdpa",
    "trainer.use_remove_padding": False,
}
"""Trinity settings without flash-attn: torch's attention, which needs padded rows."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Requirements of a machine; the default describes GPUs with all packages installed."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Trinity's dotted keys that the machine needs."""
    worker_setup: str = ""
    """``module.function`` to call in every process before it imports Trinity (Ray's ``worker_process_setup_hook``)."""
    logical_gpus: int | None = None
    """GPUs to declare in Ray on a machine without GPUs."""


def platform(env: Mapping[str, str] = os.environ) -> Platform:
    """Return the platform in ``TRINITY_PLATFORM``; GPUs if it is not set.

    :raises ConfigError: No installed package provides it.
    """
    on_gpus = {"settings": without_flash_attention(WITHOUT_FLASH_ATTENTION)}
    return Platform(**find_platform(Facts.BACKBONE, engine_has_others=False, on_gpus=on_gpus, env=env))


@dataclass(frozen=True, kw_only=True)
class Facts(facts.Facts):
    """Facts for `astuner_trinity.table`, created by `Facts.of`."""

    BACKBONE: ClassVar[str] = "trinity"

    @classmethod
    def find_gpus(cls, config: Config) -> int:
        lent = platform().logical_gpus
        said = config.astuner.trainer_common.n_gpus_per_node
        return lent if said is None and lent is not None else super().find_gpus(config)

    # ------------------------------------------------------------------------------------------------ Trinity's keys

    @property
    def own(self) -> Mapping[str, Any]:
        """Trinity's own keys that the user wrote, dotted; without a ``mode`` of `PARTS` and names of models."""
        own = {key: value for key, value in super().own.items() if not (key == "mode" and value in PARTS)}
        if isinstance(own.get(HELPERS), list):
            own[HELPERS] = [_without_name(model) for model in own[HELPERS]]
        return own

    @property
    def helper_names(self) -> Sequence[object]:
        """Names of the auxiliary models in their order; None for a model without a name."""
        models = super().own.get(HELPERS)
        return [model.get("name") for model in models if isinstance(model, dict)] if isinstance(models, list) else []

    @property
    def sync_style(self) -> str:
        """Trinity's ``sync_style`` under its current name; it determines when engines get new weights."""
        style = str(self.own.get("synchronizer.sync_style") or STYLES[0]).lower()
        return OLD_STYLES.get(style, style)

    @property
    def sync_interval(self) -> int:
        """Training steps between updates of the engines' weights."""
        return self._whole("synchronizer.sync_interval", 1)

    @property
    def sync_offset(self) -> int:
        """Steps by which rollouts are ahead of training."""
        return self._whole(OFFSET, 0)

    @property
    def max_staleness(self) -> int | None:
        """Most versions by which a rollout's weights may lag behind the trained ones; None: limited by the queue.

        Only ``fully_async`` has this limit, because its rollouts would otherwise run ahead without end. Default: the
        number of batches in flight.
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
        """GPUs of the auxiliary models, which are not trained."""
        return sum(math.prod(_sizes(model)) for model in self.own.get(HELPERS) or [])

    @property
    def engines(self) -> int:
        """Number of rollout engines; by default as many as leave half of the GPUs, or full machines, for training."""
        if self.own.get(ENGINES) is not None:
            return self._whole(ENGINES, 1)
        return self._engines_that_fit() or 1

    @property
    def rollout_gpus(self) -> int:
        """GPUs of rollout engines and auxiliary models."""
        return self.engines * self.engine_gpus + self.helper_gpus

    @property
    def reserved(self) -> tuple[int, int]:
        """GPUs and CPUs that this command's processes reserve in Ray.

        VERL reserves CPUs for three workers per training GPU, an engine takes a CPU per machine, and one CPU stays free
        for processes that need it only to start.
        """
        engines = self.rollout_gpus
        if part_of(self.config):  # the other command reserves the trainer's
            return engines, engines + 1
        return self.world, 3 * self.training_gpus + engines + 1

    @property
    def training_gpus(self) -> int:
        """GPUs of the trainer."""
        return self.world - self.rollout_gpus

    @property
    def data_parallel(self) -> int:
        """Number of parts of a batch: groups of GPUs that share sequences."""
        return self.training_gpus // self.a.trainer_common.ulysses_sequence_parallel_size

    def _engines_that_fit(self) -> int:
        half = max(self.world // 2, self.engine_gpus + self.helper_gpus)
        most = (half - self.helper_gpus) // self.engine_gpus
        good = (n for n in range(most, 0, -1) if self._can_train(self.world - n * self.engine_gpus - self.helper_gpus))
        return next(good, 0)

    def _can_train(self, gpus: int) -> bool:
        """Return whether Trinity can train on this number of GPUs: within a machine or on full machines, in groups."""
        shared = self.a.trainer_common.ulysses_sequence_parallel_size
        return gpus > 0 and gpus % shared == 0 and (gpus < self.gpus or gpus % self.gpus == 0)

    # -------------------------------------------------------------------------------------------------- groups and time

    @property
    def drawn(self) -> int:
        """Groups that a step starts; training uses the first ``train_batch_size`` of them."""
        return math.ceil(self.a.data.train_batch_size * self.a.rollout.oversample)

    @property
    def runners_per_engine(self) -> int:
        """Processes per engine; each runs one group of episodes at a time."""
        rollout = self.a.rollout
        wanted = math.ceil(rollout.max_env_worker / rollout.num_repeat / self.engines)
        return self._whole(RUNNERS, max(1, min(wanted, math.ceil(self.drawn / self.engines))))

    def processes(self, runners: int) -> dict[str, int]:
        """Return the actors of a run and their number; vLLM's engines have further child processes.

        :param runners: Trinity's workflow runners of all engines, each with a process in which episodes run.
        """
        return {
            "training": self.training_gpus,
            "rollout engines": self.engines,
            "workflow runners": runners,
            "running episodes": runners,
            "of Trinity's others": 7,  # explorer, trainer, coordinator, synchronizer, queue, checkpoints, mailbox
        }

    @property
    def episodes_per_runner(self) -> int:
        """Episodes that run concurrently in each of these processes."""
        return math.ceil(self.a.rollout.max_env_worker / (self.engines * self.runners_per_engine))

    @property
    def episode_seconds(self) -> float:
        """Longest duration of an episode under ASTuner's limits, including retries and waiting for an environment."""
        a = self.a
        attempt = a.rollout.episode_timeout + a.env_service.timeout + a.env_service.busy_timeout
        return (a.rollout.max_retries + 1) * (attempt + a.task_judge.judge_timeout)

    @property
    def group_seconds(self) -> int:
        """Seconds after which Trinity ends a group and its replacements, in case ASTuner's own limits fail."""
        rollout, algorithm = self.a.rollout, self.a.trainer_common.algorithm
        draws = algorithm.max_draws if algorithm.dynamic_sampling else 1
        episodes = max(draws * self._waves(rollout.num_repeat), self._waves(rollout.val_kwargs.num_repeat))
        return math.ceil(episodes * self.episode_seconds) + _SLACK

    @property
    def patience(self) -> int:
        """Seconds that one part waits for another: the longest time for all groups of a step and a validation."""
        runners = self.engines * self.runners_per_engine
        rounds = math.ceil(self.drawn / runners) + math.ceil(self.validation_tasks / runners)
        return max(_LIMIT, rounds * self.group_seconds)

    def _waves(self, episodes: int) -> int:
        """Return how many episodes of a group run one after another."""
        return math.ceil(episodes / self.episodes_per_runner)

    # -------------------------------------------------------------------------------------------- inconsistent settings

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
                yield f"trinity.{key}", f"has no effect {only} as trinity.synchronizer.sync_style; remove it"
        if self.max_staleness is not None and self.sync_interval > self.max_staleness + 1:
            yield (
                "trinity.synchronizer.sync_interval",
                f"is {self.sync_interval}, so rollouts would wait for weights that training, which waits for rollouts, "
                f"provides too late; use at most {self.max_staleness + 1}, or raise trinity.{STALENESS}",
            )
        if self.drawn > self.a.data.train_batch_size and self.sync_style == "fixed":
            yield (
                "astuner.rollout.oversample",
                f"is {self.a.rollout.oversample:g}, but with alternating rollouts and training Trinity waits for all "
                f"groups; remove it, or set trinity.synchronizer.sync_style: {' or '.join(STYLES[1:])}",
            )

    def _unreadable(self) -> Iterator[tuple[str, str]]:
        """Yield values of Trinity's keys that facts cannot be computed from."""
        for key, least in WHOLE.items():
            value = self.own.get(key, least)
            if not (type(value) is int and value >= least):
                yield f"trinity.{key}", f"should be an integer of at least {least}, got {value!r}"
        for key, value, possible in (
            ("mode", str(self.own.get("mode") or MODES[0]), MODES),
            ("synchronizer.sync_style", self.sync_style, STYLES),
        ):
            if value not in possible:
                instead = f"{_INSTEAD[value]}; " if key == "mode" and value in _INSTEAD else ""
                yield f"trinity.{key}", f"is {value!r}; {instead}use one of {', '.join(possible)}"
        helpers = self.own.get(HELPERS) or []
        if not isinstance(helpers, list) or not all(isinstance(model, dict) for model in helpers):
            yield f"trinity.{HELPERS}", "should be a list with a section for each model"
        elif any(type(n) is not int or n < 1 for model in helpers for n in _sizes(model)):
            yield f"trinity.{HELPERS}", "should have integers of at least 1 as engine_num and *_parallel_size"
        names = [name for name in self.helper_names if name is not None]
        variables = [str(name).upper() for name in names]
        if len(set(variables)) < len(names) or not all(re.fullmatch(r"[A-Z][A-Z0-9_]*", name) for name in variables):
            yield f"trinity.{HELPERS}", f"should have unique names of letters, digits and _, got {names}"

    def _wrong_adapters(self) -> Iterator[tuple[str, str]]:
        lora = self.a.model.lora
        if not lora.rank:
            return
        if not float(lora.alpha).is_integer():
            yield "astuner.model.lora.alpha", f"is {lora.alpha:g}, but verl accepts integers only"
        if str(self.own.get(SYNC)).lower() == "memory":
            yield (
                f"trinity.{SYNC}",
                "is memory, but Trinity then sends model and adapters separately, and engines need merged weights; "
                "use nccl or checkpoint, or remove it",
            )
        if self.own.get(MERGING) not in (None, MERGED):
            yield (
                f"trinity.{MERGING}",
                f"is {self.own[MERGING]!r}, but astuner.model.lora needs {MERGED}, because engines would otherwise get "
                "weights without the adapters; remove it, or train all weights",
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
            yield count, f"is {self.gpus}, but trinity needs at least one GPU"
        elif world < 2:
            yield (
                count,
                "is 1, or this machine has at most one GPU, but trinity needs two: one for rollouts, one for training; "
                "set the number of GPUs of the cluster's machines, or use --backbone verl, which shares one GPU "
                "(without a GPU: --backbone local)",
            )
        elif engine > self.gpus and engine % self.gpus:
            yield (
                "astuner.rollout.tensor_model_parallel_size",
                f"makes rollout engines of {engine} GPUs, which fit neither into one machine with {self.gpus} nor onto "
                "full machines",
            )
        elif self.rollout_gpus >= world:
            yield (
                engines,
                f"makes {takes}, but there are {there} and training needs some too; use fewer engines or more GPUs",
            )
        elif self.training_gpus % shared:
            yield (
                "astuner.trainer_common.ulysses_sequence_parallel_size",
                f"is {shared}, but {takes} leave {self.training_gpus} of {there} for training, which cannot be cut "
                f"into groups of {shared} that share sequences; set another number of engines as trinity.{ENGINES}",
            )
        elif not self._can_train(self.training_gpus):
            yield (
                engines,
                f"makes {takes}, which leave {self.training_gpus} of {there} for training; Trinity trains on GPUs of "
                "one machine or on full machines, so set another number of engines",
            )

    def memory_plan(self) -> Mapping[str, str]:
        """Return the plan lines on GPUs and memory, an estimate; without memory if the config does not give the shape.

        Rollout engines and training use different GPUs: an engine may fill ``gpu_memory_utilization`` of its GPUs with
        weights and cache, and the trainer's state and activations have theirs exclusively.
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
            f"in {share:g} of each of its GPUs: {gib(found.rollout_weights)} weights + {gib(conversation)} per "
            f"conversation of {self.max_model_len:,} tokens, so at least {gib(engine)}"
        )
        lines["an update"] = found.of_update(self.micro_batch_tokens)
        return lines

    def _whole(self, key: str, default: int) -> int:
        value = self.own.get(key)
        return value if type(value) is int else default


def part_of(config: Config) -> str:
    """Return the role of this command from `PARTS` if two commands share a run; empty for a single command."""
    mode = written(config, Facts.BACKBONE).get("mode")
    return str(mode) if mode in PARTS else ""


def helper_environ(servers: Sequence[tuple[str, str]], names: Sequence[object]) -> dict[str, str]:
    """Return the variables through which judges find the auxiliary models, by number and by name.

    :param servers: URL and served model name of each.
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
