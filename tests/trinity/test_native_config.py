"""What Trinity is told: every row of the table arrives in Trinity's own `Config`, checked and completed by Trinity."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from astuner import RunDir, load_config
from astuner.cli import main
from astuner.contracts.errors import ConfigError, RunError
from astuner.contracts.secrets import REMOVED
from astuner_ray.native import facts
from astuner_ray.native.table import UNSET, Row
from astuner_trinity.facts import RUNNERS, STALENESS, VERL, platform
from astuner_trinity.native import FILE, Facts, Native, compose, every_key
from astuner_trinity.table import EXPERIENCES, TABLE, VALUES

ROWS, LOCKED, why_locked = TABLE.rows, TABLE.locked, TABLE.why_locked
KEYS = Path(inspect.getfile(Facts)).with_name("keys.yaml")

ROOT = Path(__file__).resolve().parents[2]
QUICK_START = ROOT / "astuner_core" / "tests" / "data" / "seeds" / "quick_start.yaml"
MATH_AGENT = ROOT / "examples" / "math_agent" / "math_agent.yaml"
EXAMPLES = sorted((ROOT / "examples" / "trinity").glob("*.yaml"))
ENGINE, ACTOR, REF = "explorer.rollout_model", f"{VERL}.actor", f"{VERL}.ref"
QUEUE, OPERATORS = EXPERIENCES, "data_processor.experience_pipeline.operators"
ASYNC = "trinity.synchronizer.sync_style=fully_async"
TASKS = 1000
HUB = {"vocab_size": 152064, "max_position_embeddings": 131072}
"""What the ``config.json`` of any model on the hub says; no hub can be reached from a test."""


@pytest.fixture(scope="module", autouse=True)
def no_hub() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        read = facts.model_config
        patch.setattr(facts, "model_config", lambda model, **_: read(model) if Path(model).is_dir() else HUB)
        yield


def facts_of(overrides: Sequence[str] = (), *, path: Path = QUICK_START, gpus: int = 8) -> Facts:
    from astuner.runs.tasks import planned_steps

    config = load_config(path, overrides, backbone="trinity")
    return Facts.of(config, total_steps=planned_steps(config, TASKS), validation_tasks=1, gpus=gpus)


def told(
    overrides: Sequence[str] = (), *, path: Path = QUICK_START, gpus: int = 8, machine: Mapping[str, Any] | None = None
) -> Native:
    return compose(facts_of(overrides, path=path, gpus=gpus), machine or {})


def taken(folder: Path, overrides: Sequence[str] = (), **known: Any) -> Any:
    """Trinity's `Config` of it, with Trinity's files below ``folder``."""
    machine = known.pop("machine", None) or {}
    found = facts_of(overrides, **known)
    return compose(replace(found, run_dir=RunDir(folder)), machine).load(folder / "trinity")


@pytest.fixture(scope="module")
def trinity_has(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...], int], Any]:
    """Trinity's `Config` of the seeds' quick start with overrides; it takes a second, so each is made once."""
    return functools.cache(lambda overrides, gpus=8: taken(tmp_path_factory.mktemp("run"), overrides, gpus=gpus))


@pytest.fixture(scope="module")
def usual(trinity_has: Callable[..., Any]) -> Any:
    """The seeds' quick start as Trinity has it."""
    return trinity_has(())


def value(config: Any, key: str) -> Any:
    at = config
    for name in key.split("."):
        at = at[int(name)] if name.isdigit() else at.get(name) if isinstance(at, Mapping) else getattr(at, name)
    return at.value if isinstance(at, Enum) else at


def a(*pairs: str) -> list[str]:
    return [f"astuner.{pair}" for pair in pairs]


# --------------------------------------------------------------------------------------------------- every row arrives

OPTIM = f"{ACTOR}.optim.override_optimizer_config"
LOSS = "algorithm.policy_loss_fn_args"
TEMPLATE = ROOT / "plugins" / "astuner_local" / "astuner_local" / "tiny" / "chat_template.jinja"
NO_LENGTHS = a("rollout.max_model_len=null", "data.max_prompt_length=1", "data.max_response_length=9")


def step_of(episode: float, *, waves: int = 1, groups: int = 16) -> int:
    """What Trinity waits: rounds of groups of the quick start, and its one validation task."""
    return (math.ceil(264 / groups) + 1) * group_of(episode, waves=waves)


def group_of(episode: float, *, waves: int = 1) -> int:
    """Seconds of a group, some episodes of which come one after another, and a minute."""
    return math.ceil(waves * episode) + 60


EPISODE = 3 * (600 + 300 + 600 + 60)
"""Seconds of an episode at its worst: two retries; its time, its environment's start and its room, its judge."""
CASES: list[tuple[str, list[str], Any]] = [
    ("ray_namespace", a("project_name=mine"), "astuner/mine/quick_start"),
    ("ray_namespace", a("experiment_name=mine"), "astuner/math_agent/mine"),
    ("trainer.total_steps", a("trainer_common.total_steps=77"), 77),
    ("trainer.total_steps", a("trainer_common.total_epochs=3"), math.ceil(3 * TASKS / 264)),
    ("buffer.total_steps", a("trainer_common.total_steps=77"), 77),
    ("buffer.total_steps", a("trainer_common.total_epochs=3"), math.ceil(3 * TASKS / 264)),
    ("buffer.total_epochs", a("trainer_common.total_epochs=3"), 3),
    ("trainer.save_interval", a("trainer_common.save_freq=13"), 13),
    ("cluster.node_num", [*a("trainer_common.nnodes=2"), f"trinity.{ENGINE}.engine_num=8"], 2),
    ("cluster.gpu_per_node", a("trainer_common.n_gpus_per_node=4"), 4),
    ("model.model_path", a("model.path=Qwen/Qwen3-0.6B"), "Qwen/Qwen3-0.6B"),
    ("model.trust_remote_code", a("model.trust_remote_code=true"), True),
    ("model.custom_chat_template", a(f"model.chat_template={TEMPLATE}"), TEMPLATE.read_text()),
    (f"{ENGINE}.dtype", a("model.dtype=float16"), "float16"),
    (f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", a("model.dtype=float32"), "fp32"),
    (f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", a("model.dtype=bfloat16"), "bf16"),
    (f"{REF}.fsdp_config.mixed_precision.param_dtype", a("model.dtype=float16"), "fp16"),
    (
        f"{VERL}.model.enable_gradient_checkpointing",
        a("trainer_common.activation_checkpointing=false"),
        False,
    ),
    ("model.lora_configs.0.lora_rank", a("model.lora.rank=16"), 16),
    ("model.lora_configs.0.lora_alpha", a("model.lora.rank=16", "model.lora.alpha=64"), 64),
    (
        "model.lora_configs.0.target_modules",
        a("model.lora.rank=16", "model.lora.target_modules=[q_proj, v_proj]"),
        r"(.*\.)?(q_proj|v_proj)",
    ),
    (f"{VERL}.model.external_lib", a("model.lora.rank=16"), "astuner_trinity.merged"),
    ("model.max_model_len", a("rollout.max_model_len=12000"), 12000),
    ("model.max_model_len", a("rollout.max_model_len=null", "data.max_prompt_length=2000"), 12000),
    ("model.max_model_len", a("rollout.max_model_len=null", "data.max_response_length=4000"), 7000),
    ("model.max_response_tokens", a("data.max_response_length=2000"), 2000),
    ("model.max_response_tokens", a("data.max_response_length=30000", "rollout.max_model_len=12000"), 11999),
    ("model.max_response_tokens", NO_LENGTHS, 9),
    ("model.max_prompt_tokens", a("data.max_response_length=2000"), 11000),
    ("model.max_prompt_tokens", a("rollout.max_model_len=12000"), 2000),
    ("model.max_prompt_tokens", NO_LENGTHS, 1),
    (f"{ENGINE}.max_response_tokens", a("rollout.max_model_len=12000"), 12000),
    (f"{ENGINE}.max_response_tokens", NO_LENGTHS, 10),
    ("buffer.batch_size", a("data.train_batch_size=16"), 16),
    ("buffer.batch_size", ["astuner.rollout.oversample=1.5", "trinity.synchronizer.sync_style=fully_async"], 396),
    (
        "explorer.over_rollout.ratio",
        [*a("rollout.oversample=1.5", "data.train_batch_size=8"), "trinity.synchronizer.sync_style=explorer_driven"],
        1 - 7.5 / 12,
    ),
    ("buffer.train_batch_size", a("data.train_batch_size=16"), 64),
    ("buffer.train_batch_size", a("rollout.num_repeat=6"), 6 * 264),
    ("algorithm.repeat_times", a("rollout.num_repeat=6"), 6),
    ("buffer.explorer_input.tasksets.0.repeat_times", a("rollout.num_repeat=6"), 6),
    ("model.temperature", a("rollout.temperature=0.9"), 0.9),
    ("buffer.explorer_input.tasksets.0.rollout_args.temperature", a("rollout.temperature=0.9"), 0.9),
    ("model.top_p", a("rollout.top_p=0.5"), 0.5),
    ("model.top_k", a("rollout.top_k=20"), 20),
    ("explorer.runner_per_model", a("rollout.max_env_worker=100"), 13),
    ("explorer.runner_per_model", a("rollout.num_repeat=8"), 4),
    ("explorer.runner_per_model", a("data.train_batch_size=3"), 2),
    *(
        case
        for override, group, step in (
            (a("rollout.episode_timeout=700"), group_of(EPISODE + 300), step_of(EPISODE + 300)),
            (a("rollout.max_retries=0"), group_of(EPISODE / 3), step_of(EPISODE / 3)),
            (a("task_judge.judge_timeout=160"), group_of(EPISODE + 300), step_of(EPISODE + 300)),
            # two runners with 32 episodes each
            (a("rollout.num_repeat=65"), group_of(EPISODE, waves=3), step_of(EPISODE, waves=3, groups=2)),
            (a("rollout.max_env_worker=4"), group_of(EPISODE, waves=2), step_of(EPISODE, waves=2, groups=2)),
            # four episodes in each runner
            (a("rollout.val_kwargs.num_repeat=9"), group_of(EPISODE, waves=3), step_of(EPISODE, waves=3)),
            (
                a("trainer_common.algorithm.dynamic_sampling=true", "trainer_common.algorithm.max_draws=3"),
                group_of(EPISODE, waves=3),
                step_of(EPISODE, waves=3),
            ),
        )
        for case in (
            ("explorer.max_timeout", override, group),
            (f"{QUEUE}.max_read_timeout", override, float(step)),
            ("synchronizer.sync_timeout", override, step),
        )
    ),
    (f"{QUEUE}.max_read_timeout", a("data.train_batch_size=16"), float(2 * group_of(EPISODE))),
    ("synchronizer.sync_timeout", a("data.train_batch_size=16"), 2 * group_of(EPISODE)),
    (f"{ENGINE}.tensor_parallel_size", a("rollout.tensor_model_parallel_size=2"), 2),
    (f"{ENGINE}.extra_engine_args.max_num_seqs", a("rollout.max_num_seqs=33"), 33),
    (f"{ENGINE}.seed", a("seed=5"), 5),
    (f"{ACTOR}.data_loader_seed", a("seed=5"), 5),
    (f"{ACTOR}.fsdp_config.seed", a("seed=5"), 5),
    (f"{ACTOR}.ppo_epochs", a("trainer_common.ppo_epochs=2"), 2),
    ("algorithm.optimizer.lr", a("trainer_common.optim.lr=3e-5"), 3e-5),
    ("algorithm.optimizer.weight_decay", a("trainer_common.optim.weight_decay=0.1"), 0.1),
    ("algorithm.optimizer.clip_grad", a("trainer_common.optim.grad_clip=0.5"), 0.5),
    ("trainer.grad_clip", a("trainer_common.optim.grad_clip=0.5"), 0.5),
    (OPTIM, a("trainer_common.optim.optimizer=muon"), {"optimizer": "muon"}),
    (OPTIM, a("trainer_common.optim.betas=[0.8, 0.99]"), {"betas": [0.8, 0.99]}),
    (OPTIM, a("trainer_common.optim.momentum=0.8"), {"momentum": 0.8}),
    (OPTIM, a("trainer_common.optim.lr_scheduler=linear"), {"lr_scheduler": "linear"}),
    (OPTIM, a("trainer_common.optim.lr_warmup_steps=7"), {"lr_warmup_steps": 7}),
    (OPTIM, a("trainer_common.optim.min_lr_ratio=0.1"), {"min_lr_ratio": 0.1}),
    (OPTIM, a("trainer_common.total_steps=7"), {"total_steps": 7}),
    (
        OPTIM,
        a("trainer_common.total_steps=7", "trainer_common.mini_batch_num=2"),
        {"total_steps": 14, "updates_per_step": 2},
    ),
    (
        OPTIM,
        a("trainer_common.total_steps=7", "trainer_common.ppo_epochs=3"),
        {"total_steps": 21, "updates_per_step": 3},
    ),
    ("trainer.param_offload", a("trainer_common.fsdp_config.param_offload=true"), True),
    ("trainer.optimizer_offload", a("trainer_common.fsdp_config.optimizer_offload=true"), True),
    ("trainer.ulysses_sequence_parallel_size", a("trainer_common.ulysses_sequence_parallel_size=3"), 3),
    ("algorithm.advantage_fn_args", a("trainer_common.mini_batch_num=4"), {"multiple": 24}),
    ("algorithm.advantage_fn_args", a("trainer_common.ulysses_sequence_parallel_size=3"), {"multiple": 2}),
    (
        "algorithm.algorithm_type",
        a("trainer_common.use_kl_loss=true"),
        "astuner_trinity.algorithm.EpisodeAlgorithmWithReference",
    ),
    (f"{LOSS}.settings.algorithm.loss", a("trainer_common.algorithm.loss=gspo"), "gspo"),
    (f"{LOSS}.settings.algorithm.loss_agg_mode", a("trainer_common.algorithm.loss_agg_mode=token-mean"), "token-mean"),
    (f"{LOSS}.settings.algorithm.clip_ratio_low", a("trainer_common.algorithm.clip_ratio_low=0.1"), 0.1),
    (f"{LOSS}.settings.algorithm.clip_ratio_high", a("trainer_common.algorithm.clip_ratio_high=0.28"), 0.28),
    (
        f"{LOSS}.settings.algorithm.rollout_is",
        a("trainer_common.algorithm.rollout_is=token-mask"),
        "token-mask",
    ),
    (f"{LOSS}.settings.algorithm.rollout_is_threshold", a("trainer_common.algorithm.rollout_is_threshold=3"), 3.0),
    (f"{LOSS}.settings.use_kl_loss", a("trainer_common.use_kl_loss=true"), True),
    (f"{LOSS}.settings.kl_loss_coef", a("trainer_common.kl_loss_coef=0.02"), 0.02),
    (f"{LOSS}.settings.kl_loss_type", a("trainer_common.kl_loss_type=k2"), "k2"),
    ("algorithm.entropy_loss_fn_args", a("trainer_common.entropy_coeff=0.02"), {"entropy_coef": 0.02}),
    (
        "algorithm.bypass_old_logprobs",
        a(
            "trainer_common.algorithm.rollout_is=token-mask",
            "trainer_common.mini_batch_num=2",
            "trainer_common.ppo_epochs=3",
        ),
        False,
    ),
]
"""Trinity's key, what a person writes, and what Trinity must then have there."""


@pytest.mark.parametrize(
    ("key", "overrides", "expected"), CASES, ids=lambda part: part if isinstance(part, str) else ""
)
def test_a_key_of_ours_reaches_trinity(
    key: str, overrides: list[str], expected: Any, usual: Any, trinity_has: Callable[..., Any]
) -> None:
    # the number of GPUs is what the cluster has, unless it is what is tested
    gpus = 4 if any("n_gpus_per_node" in o for o in overrides) else 8
    if key == OPTIM:  # a section, of which the case names what it changes
        expected = {**value(usual, key), **expected}
    assert value(trinity_has(tuple(overrides), gpus), key) == expected
    assert _or_none(usual, key) != expected, "the case shows nothing: this is what Trinity has anyway"


def _or_none(config: Any, key: str) -> Any:
    try:
        return value(config, key)
    except (AttributeError, TypeError):  # a section that is not there
        return None


BESIDE = {
    "checkpoint_root_dir": ("experiment_dir", "experiment_name"),
    f"{ENGINE}.engine_num": (
        "trainer_common.n_gpus_per_node",
        "trainer_common.nnodes",
        "rollout.tensor_model_parallel_size",
    ),
    f"{ENGINE}.engine_type": ("rollout.name",),
    "trainer.max_token_len_per_gpu": (
        "trainer_common.micro_batch_tokens",
        "rollout.max_model_len",
        "data.max_prompt_length",
        "data.max_response_length",
        "trainer_common.ulysses_sequence_parallel_size",
    ),
}
"""Rows that have tests of their own below: the seeds' file sets them in Trinity's words."""


def test_every_row_and_every_key_of_a_row_has_a_case() -> None:
    shown = {(key, o.partition("=")[0].removeprefix("astuner.")) for key, overrides, _ in CASES for o in overrides}
    missing = [
        (row.native, ours)
        for row in ROWS
        for ours in row.ours
        if ours not in BESIDE.get(row.native, ())
        and not any(k == ours and (key == row.native or key.startswith(f"{row.native}.")) for key, k in shown)
    ]
    assert missing == []


@pytest.mark.parametrize("row", [r for r in ROWS if not r.ours and r.native != STALENESS], ids=lambda row: row.native)
def test_what_is_the_same_in_every_experiment_reaches_trinity(row: Row[Facts], usual: Any) -> None:
    found, expected = value(usual, row.native), row.value(facts_of())
    if isinstance(expected, list):  # of sections that Trinity completes
        found = [{name: getattr(item, name) for name in wanted} for item, wanted in zip(found, expected, strict=True)]
    assert found == expected


def test_trinitys_files_are_in_the_run_folder(tmp_path: Path) -> None:
    config = taken(tmp_path / "run")
    assert Path(config.checkpoint_job_dir) == tmp_path / "run" / "resume" / "trinity"
    found = told(a("experiment_dir=/runs", "experiment_name=mine")).values
    assert found["checkpoint_root_dir"] == "/runs/mine"
    assert {Path(config.log.save_dir), Path(config.monitor.cache_dir), Path(config.buffer.cache_dir)} == {
        tmp_path / "run" / "resume" / "trinity" / name for name in ("log", "monitor", "buffer")
    }


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (("rollout.max_model_len=64",), 16384),
        (("rollout.max_model_len=64", "trainer_common.micro_batch_tokens=14000"), 14000),
        (("rollout.max_model_len=20000",), 20000),
        (("rollout.max_model_len=null", "data.max_prompt_length=9000", "data.max_response_length=9000"), 18000),
        (("rollout.max_model_len=60000", "trainer_common.ulysses_sequence_parallel_size=2"), 30000),
    ],
)
def test_how_many_tokens_are_in_a_pass(overrides: Sequence[str], tokens: int, tmp_path: Path) -> None:
    found = taken(tmp_path, a(*overrides), path=written(tmp_path, ""))
    assert found.trainer.max_token_len_per_gpu == tokens


def test_trinitys_own_word_for_it_wins(usual: Any, tmp_path: Path) -> None:
    key = "trainer.max_token_len_per_gpu"
    assert value(usual, key) == 13000, "as the seeds' file says"
    assert value(taken(tmp_path, [f"trinity.{key}=20000"]), key) == 20000


@pytest.mark.parametrize(
    ("machines", "gpus", "overrides", "engines", "trains"),
    [
        (1, 2, (), 1, 1),
        (1, 8, (), 4, 4),
        (1, 8, a("rollout.tensor_model_parallel_size=2"), 2, 4),
        (1, 8, a("rollout.tensor_model_parallel_size=4"), 1, 4),
        (1, 3, (), 1, 2),
        (1, 7, a("trainer_common.ulysses_sequence_parallel_size=2"), 3, 4),
        (3, 8, (), 8, 16),  # training takes whole machines
        (2, 8, a("rollout.tensor_model_parallel_size=8"), 1, 8),
        (2, 8, ["trinity.explorer.rollout_model.data_parallel_size=2"], 4, 8),
        (1, 8, ["trinity.explorer.auxiliary_models=[{model_path: judge/model, tensor_parallel_size: 2}]"], 2, 4),
        (1, 8, ["trinity.explorer.rollout_model.engine_num=6"], 6, 2),
    ],
)
def test_gpus_are_shared_out(
    machines: int, gpus: int, overrides: Sequence[str], engines: int, trains: int, tmp_path: Path
) -> None:
    always_written = [f"astuner.trainer_common.nnodes={machines}", "astuner.data.train_batch_size=64"]
    found = facts_of([*always_written, *overrides], path=MATH_AGENT, gpus=gpus)
    assert (found.engines, found.training_gpus) == (engines, trains)
    config = compose(replace(found, run_dir=RunDir(tmp_path)), {}).load(tmp_path)
    assert config.explorer.rollout_model.engine_num == engines
    assert (config.cluster.rollout_gpu_num + config.cluster.auxiliary_model_gpu_num) == found.rollout_gpus
    assert config.cluster.trainer_gpu_num == trains
    assert (config.mode, config.synchronizer.sync_method.value) == ("both", "nccl")


def test_oversampling_waits_for_exactly_the_batch() -> None:
    """Trinity computes how many groups it waits for, in floating point."""
    for size in (1, 3, 7, 8, 100, 264, 1000):
        for share in (1.01, 1.1, 1.25, 1.3333, 1.5, 2, 3):
            wanted = a(f"data.train_batch_size={size}", f"rollout.oversample={share}")
            values = told([*wanted, ASYNC]).values
            drawn, ratio = values["buffer"]["batch_size"], values["explorer"]["over_rollout"].get("ratio", 0.0)
            assert math.ceil(drawn * (1 - ratio)) == size
            assert drawn == math.ceil(size * share)


def test_rows_and_locked_keys_are_trinitys() -> None:
    known = every_key()
    names = [row.native for row in ROWS]
    assert VALUES.keys() <= set(names)

    def is_known(key: str) -> bool:
        return key in known or any(key.startswith(f"{free}.") and known[free] is dict for free in known)

    theirs = [*names, *LOCKED]
    assert [k for k in theirs if not is_known(k) and k != f"{ENGINE}.extra_engine_args.max_num_seqs"] == [
        f"{VERL}.actor_rollout_ref",  # which Trinity takes as well, and a person may write in its stead
        f"{VERL}.critic",
        f"{VERL}.rollout",
    ]
    assert [key for key in LOCKED if key in names] == [], "a row says itself that it is locked"


def test_what_trinity_leaves_out_in_silence_is_locked() -> None:
    from trinity.trainer.verl.config import FROZEN_KEYS

    assert [key for key in FROZEN_KEYS if not why_locked(f"{VERL}.{key}")] == []


def test_what_trinity_says_is_not_to_be_set_is_locked() -> None:
    from trinity.common import config

    text = inspect.getsource(config)
    assert text.count("DO NOT SET") > 20, "Trinity says it in other words now"
    inner = ("checkpoint_job_dir", "explorer.rollout_model.nnodes", "buffer.cache_dir", "log.save_dir")
    assert [key for key in inner if not why_locked(key)] == []


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"\bastuner_trinity\.\w+\.[A-Z]\w+", KEYS.read_text(encoding="utf-8"))))
)
def test_the_classes_that_trinity_imports_by_name_exist(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert isinstance(getattr(import_module(module), name), type)


def test_what_trinity_makes_of_the_classes(usual: Any) -> None:
    """Trinity makes them with arguments from the configuration, in other processes."""
    from trinity.algorithm import ENTROPY_LOSS_FN, POLICY_LOSS_FN

    algorithm = usual.algorithm
    assert POLICY_LOSS_FN.get(algorithm.policy_loss_fn)(backend="verl", **algorithm.policy_loss_fn_args).select_keys
    assert ENTROPY_LOSS_FN.get(algorithm.entropy_loss_fn)(**algorithm.entropy_loss_fn_args) is not None


def test_a_persons_operators_come_before_the_credit(trinity_has: Callable[..., Any]) -> None:
    from trinity.buffer.operators.experience_operator import create_operators
    from trinity.buffer.pipelines.experience_pipeline import ExperiencePipeline

    config = trinity_has((f"trinity.{OPERATORS}=[{{name: reward_filter, args: {{threshold: 0.5}}}}]",))
    pipeline = ExperiencePipeline.__new__(ExperiencePipeline)  # without the queue, which is an actor
    pipeline.auxiliary_models = {}
    pipeline.operators = create_operators(config.data_processor.experience_pipeline.operators, {})
    pipeline._set_algorithm_operators(config.algorithm)
    assert [type(operator).__name__ for operator in pipeline.operators][1:] == ["CreditOperator"]
    assert len(pipeline.operators) == 2


def test_operators_that_leave_nothing_of_a_batch_are_an_error() -> None:
    from astuner_trinity.experiences import CreditOperator

    with pytest.raises(RunError, match=f"trinity.{OPERATORS} removed all experiences of a batch"):
        asyncio.run(CreditOperator(multiple=1).process([]))


# --------------------------------------------------------------------------------------------- what trinity itself says

EXPERIMENTS: dict[str, tuple[Path, list[str]]] = {
    "the example": (MATH_AGENT, []),
    "the seeds' quick start": (QUICK_START, []),
    "KL in the loss": (QUICK_START, a("trainer_common.use_kl_loss=true")),
    "an entropy bonus": (QUICK_START, a("trainer_common.entropy_coeff=0.01")),
    "a rollout correction": (QUICK_START, a("trainer_common.algorithm.rollout_is=sequence-mask")),
    "long sequences": (
        QUICK_START,
        [*a("trainer_common.ulysses_sequence_parallel_size=3", "rollout.max_model_len=39000")],
    ),
    "float32": (QUICK_START, a("model.dtype=float32", "trainer_common.fsdp_config.param_offload=true")),
    "one step ahead": (QUICK_START, ["trinity.synchronizer.sync_offset=1"]),
    "fully asynchronous": (QUICK_START, [ASYNC, f"trinity.{STALENESS}=1"]),
    "by an older name": (QUICK_START, ["trinity.synchronizer.sync_style=dynamic_by_explorer"]),
    "trinity's own keys": (
        QUICK_START,
        [
            f"trinity.{ENGINE}.gpu_memory_utilization=0.8",
            f"trinity.{ENGINE}.extra_engine_args.kv_cache_dtype=fp8",
            f"trinity.{ACTOR}.fsdp_config.forward_prefetch=true",
            "trinity.explorer.auxiliary_models=[{model_path: judge/model, engine_num: 1}]",
            "trinity.explorer.dynamic_timeout.enable=true",
            "trinity.explorer.env_vars={MINE: '1'}",
        ],
    ),
    **{path.stem: (path, []) for path in EXAMPLES},
}


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("machine", ["gpu", "cpu"])
def test_trinity_takes_it(name: str, machine: str, tmp_path: Path) -> None:
    path, overrides = EXPERIMENTS[name]
    gpus = load_config(path, backbone="trinity").astuner.trainer_common.n_gpus_per_node or 8
    settings = platform().settings if machine == "cpu" else {}
    config = taken(tmp_path, overrides, path=path, gpus=gpus, machine=settings)
    assert config.buffer.explorer_input.tasksets[0].ray_namespace == config.ray_namespace, "Trinity has completed it"
    assert config.synchronizer.sync_method.value == {"cpu": "memory", "gpu": "nccl"}[machine]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([f"trinity.{ACTOR}.no_such_field=1"], "Trinity rejects this configuration: .*no_such_field"),
        ([f"trinity.{VERL}.model.no_such_field=1"], r"model\.no_such_field is not a key of VERL"),
        ([f"trinity.{REF}.fsdp_config.no_such_field=1"], "ref.fsdp_config: .*no_such_field"),
        (["trinity.explorer.over_rollout.ratio=0.5"], "write astuner.rollout.oversample"),
        (
            [f"trinity.{OPERATORS}=[{{name: no.such.Operator}}]"],
            "Trinity rejects this configuration: Cannot dynamically import Operator from no.such",
        ),
    ],
)
def test_what_trinity_does_not_take_is_an_error_before_anything_starts(
    overrides: list[str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        taken(tmp_path, overrides)


def test_what_trinity_would_change_in_silence_is_an_error(tmp_path: Path) -> None:
    machine = {"explorer.concurrent_mode": "asynchronous", RUNNERS: 1000}  # who writes an experiment may not say that
    with pytest.raises(ConfigError, match=f"Trinity would change trinity.{RUNNERS}: 1000 to 132"):
        taken(tmp_path, machine=machine)


def test_the_copy_for_a_person_is_theirs_alone_and_can_be_read_again(tmp_path: Path) -> None:
    from trinity.common.config import load_config as trinity_load

    folder = tmp_path / "trinity"
    folder.mkdir()
    (folder / FILE).write_text("older")
    (folder / FILE).chmod(0o644)
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages }} ${not.a.reference}")
    config = taken(tmp_path, a(f"model.chat_template={template}"))
    assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600
    assert config.model.custom_chat_template == template.read_text()
    assert trinity_load(str(folder / FILE)).buffer.batch_size == 264


# ------------------------------------------------------------------------------------------------- the person's section


def written(tmp_path: Path, section: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(f"astuner:\n  model:\n    path: some/model\n  rollout:\n    max_model_len: 64\n{section}")
    return path


def test_a_key_of_trinitys_wins_over_ours_and_is_reported() -> None:
    composed = told([f"trinity.{ENGINE}.seed=7", f"trinity.{ENGINE}.gpu_memory_utilization=0.7"])
    assert composed.values["explorer"]["rollout_model"]["seed"] == 7
    assert composed.values["explorer"]["rollout_model"]["gpu_memory_utilization"] == 0.7
    assert composed.notes == (f"command line: trinity.{ENGINE}.seed: 7 replaces 0, which came from astuner.seed",)


def test_the_keys_of_the_seeds_replace_nothing() -> None:
    composed = told()
    assert composed.notes == ()
    assert composed.values["explorer"]["rollout_model"]["engine_num"] == 2
    assert composed.values["trainer"]["max_token_len_per_gpu"] == 13000


def test_keys_are_nested_or_dotted(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f"trinity:\n  trainer:\n    balance_batch: false\n  {ENGINE}.enforce_eager: true\n  explorer:\n"
        f"  {VERL}.model.override_config:\n    attn_implementation: sdpa\n",
    )
    values = told(path=path).values
    assert values["trainer"]["balance_batch"] is False
    assert values["explorer"]["rollout_model"]["enforce_eager"] is True
    assert values["trainer"]["trainer_config"]["model"]["override_config"] == {"attn_implementation": "sdpa"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            "trinity:\n  explorer:\n    rollout_model:\n      gpu_memory_utilisation: 0.7\n",
            f"mine.yaml:9:7: trinity.{ENGINE}.gpu_memory_utilisation is not a key of Trinity; "
            f"did you mean {ENGINE}.gpu_memory_utilization?",
        ),
        (
            "trinity:\n  rollout_model.gpu_memory_utilization: 0.7\n",
            f"trinity.rollout_model.gpu_memory_utilization is not a key of Trinity; did you mean "
            f"{ENGINE}.gpu_memory_utilization?",
        ),
        ("trinity:\n  trainer.zzz: 1\n", "mine.yaml:7:3: trinity.trainer.zzz is not a key of Trinity"),
        (
            "trinity:\n  trainer:\n    balance_batch: 3\n",
            "mine.yaml:8:5: trinity.trainer.balance_batch should be true or false, got 3",
        ),
        (
            "trinity:\n  synchronizer.sync_method: rsync\n",
            "mine.yaml:7:3: trinity.synchronizer.sync_method should be one of nccl, checkpoint, memory, got 'rsync'",
        ),
        (
            "trinity:\n  explorer.max_inflight_batches: many\n",
            "trinity.explorer.max_inflight_batches should be an integer of at least 1, got 'many'",
        ),
        (
            "trinity:\n  explorer.runner_prepare_concurrency: many\n",
            "mine.yaml:7:3: trinity.explorer.runner_prepare_concurrency should be an integer, got 'many'",
        ),
        (
            "trinity:\n  explorer.auxiliary_models:\n  - model_pth: x\n",
            "trinity.explorer.auxiliary_models is not accepted by Trinity: Key 'model_pth' not in",
        ),
        ("trinity:\n  explorer: 4\n", "mine.yaml:7:3: trinity.explorer is a section of Trinity; write keys below it"),
        (
            f"trinity:\n  {ACTOR}: 4\n",
            f"mine.yaml:7:3: trinity.{ACTOR} is a section of VERL; write keys below it",
        ),
        (f"trinity:\n  {VERL}.rewards.x: 4\n", f"trinity.{VERL}.rewards.x is not a key of Trinity"),
        (
            "trinity:\n  buffer:\n    batch_size: 4\n",
            "mine.yaml:8:5: trinity.buffer.batch_size is set by ASTuner: write astuner.data.train_batch_size and "
            "astuner.rollout.oversample instead",
        ),
        (
            "trinity:\n  trainer.trainer_type: tinker\n",
            "mine.yaml:7:3: trinity.trainer.trainer_type is set by ASTuner: the loss, the optimizer",
        ),
        (
            "trinity:\n  model.lora_configs: [{lora_rank: 8}]\n",
            "mine.yaml:7:3: trinity.model.lora_configs is set by ASTuner: write astuner.model.lora",
        ),
        (
            f"trinity:\n  {ACTOR}.optim.lr: 1.0\n",
            f"trinity.{ACTOR}.optim.lr is set by ASTuner: write astuner.trainer_common.optim instead",
        ),
        (
            "trinity:\n  trainer.sav_interval: 3\n",
            "trinity.trainer.sav_interval is not a key of Trinity; trainer.save_interval is, but it is set by ASTuner: "
            "write astuner.trainer_common.save_freq instead",
        ),
    ],
)
def test_a_wrong_key_is_an_error_with_its_place(tmp_path: Path, section: str, message: str) -> None:
    with pytest.raises(ConfigError) as e:
        told(path=written(tmp_path, section))
    assert message in str(e.value)


def test_wrong_keys_come_all_at_once_in_their_order(tmp_path: Path) -> None:
    path = written(tmp_path, "trinity:\n  trainer:\n    trainer_type: tinker\n    zzz: 3\n")
    with pytest.raises(ConfigError) as e:
        told(["trinity.stages=[]"], path=path)
    assert [problem.partition(": ")[0] for problem in e.value.problems] == [
        f"{path}:8:5",
        f"{path}:9:5",
        "command line",
    ]


def test_secrets_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    section = "trinity:\n  explorer.env_vars:\n    API_KEY: hunter2\n    HF_TOKEN: ${oc.env:MY_TOKEN}\n"
    composed = told(path=written(tmp_path, section))
    assert composed.values["explorer"]["env_vars"] == {"API_KEY": "hunter2", "HF_TOKEN": "hunter2"}
    shown = composed.as_dict()
    assert shown["explorer"]["env_vars"] == {"API_KEY": REMOVED, "HF_TOKEN": REMOVED}
    assert "hunter2" not in json.dumps([shown, composed.notes])


def test_everything_is_shown_as_plain_data_with_trinitys_defaults() -> None:
    shown = json.loads(json.dumps(told(["trinity.synchronizer.sync_style=fully_async"]).as_dict()))
    assert (shown["synchronizer"]["sync_style"], shown["synchronizer"]["sync_method"]) == ("fully_async", "nccl")
    assert shown["explorer"]["rollout_model"]["gpu_memory_utilization"] == 0.9
    assert shown["buffer"]["explorer_input"]["tasksets"][0]["name"] == "train"


# ------------------------------------------------------------------------------------------------ platforms and facts


MACHINE = {
    f"{ENGINE}.dtype": "float32",
    f"{ACTOR}.fsdp_config.mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32"},
    f"{REF}.fsdp_config.mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32"},
    "synchronizer.sync_method": "memory",
}
"""What a machine without GPUs might need."""


def test_adapters_never_travel_apart_from_the_model() -> None:
    assert told(a("model.lora.rank=8")).values["synchronizer"]["sync_method"] == "nccl"
    assert told(a("model.lora.rank=8"), machine=MACHINE).values["synchronizer"]["sync_method"] == "checkpoint"


def test_what_the_platform_needs_wins_over_ours_and_is_said() -> None:
    composed = told(a("model.dtype=bfloat16"), machine=MACHINE)
    parts = (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config")
    assert composed.values["explorer"]["rollout_model"]["dtype"] == "float32"
    assert set(composed.notes) == {
        f"astuner.model.dtype: this platform needs {ENGINE}.dtype: float32 instead of bfloat16",
        *(
            f"astuner.model.dtype: this platform needs {part}.mixed_precision.param_dtype: fp32 instead of bf16"
            for part in parts
        ),
    }
    assert told(machine=MACHINE).notes == (), "what nobody wrote is replaced in silence"


def test_a_cpu_rounds_where_a_type_is_written_and_what_that_makes_of_rollouts_is_corrected() -> None:
    types = [f"{part}.fsdp_config.mixed_precision.param_dtype" for part in (ACTOR, REF)] + [f"{ENGINE}.dtype"]
    usual = told(machine=platform().settings)
    assert [value(usual.values, key) for key in types] == ["fp32", "fp32", "float32"]
    rounded = told(a("model.dtype=bfloat16", "trainer_common.ppo_epochs=2"), machine=platform().settings)
    assert [value(rounded.values, key) for key in types] == ["bf16", "bf16", "bfloat16"]
    one_step = told()  # of each batch has the old log-probabilities itself
    found = [
        (value(of.values, f"{LOSS}.settings.algorithm.rollout_is"), value(of.values, "algorithm.bypass_old_logprobs"))
        for of in (usual, rounded, one_step)
    ]
    assert found == [("none", True), ("token-truncate", False), ("token-truncate", True)]
    assert value(
        told(a("trainer_common.algorithm.rollout_is=none")).values, f"{LOSS}.settings.algorithm.rollout_is"
    ) == ("none")


def test_the_person_wins_over_the_platform() -> None:
    composed = told([f"trinity.{ENGINE}.dtype=bfloat16"], machine=MACHINE)
    assert composed.notes == (f"command line: trinity.{ENGINE}.dtype: bfloat16 replaces float32",)


def test_a_platform_lends_gpus() -> None:
    assert Facts.of(load_config(MATH_AGENT, backbone="trinity")).gpus == platform().logical_gpus == 2
    written_down = load_config(MATH_AGENT, a("trainer_common.n_gpus_per_node=3"), backbone="trinity")
    assert Facts.of(written_down).gpus == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (a("data.max_prompt_length=13000"), "astuner.data.max_prompt_length is 13000, which leaves no room to answer"),
        (a("model.path=tiny-calculator"), "astuner.rollout.max_model_len is 13000, but the context of the model"),
        (
            ["trinity.trainer.max_token_len_per_gpu=12999"],
            "trinity.trainer.max_token_len_per_gpu is 12999, but the longest sequence has 13000 tokens",
        ),
        (["trinity.trainer.max_token_len_per_gpu=null"], "should be an integer of at least 1, got None"),
        (
            ["trinity.synchronizer.sync_style=fully_async", "trinity.synchronizer.sync_offset=1"],
            "sync_offset has no effect",
        ),
        (["trinity.explorer.max_inflight_batches=3"], "trinity.explorer.max_inflight_batches has no effect but with"),
        ([f"trinity.{STALENESS}=3"], "max_staleness has no effect but with fully_async"),
        (
            [f"trinity.{ENGINE}.engine_num=8"],
            f"trinity.{ENGINE}.engine_num makes 8 x 1 for rollouts, but there are 1 x 8 = 8 GPUs and training needs",
        ),
        (
            a("trainer_common.nnodes=2"),
            "which leave 14 of 2 x 8 = 16 GPUs for training; Trinity trains on GPUs of one machine or on full",
        ),
        (
            a("trainer_common.ulysses_sequence_parallel_size=4"),
            "leave 6 of 1 x 8 = 8 GPUs for training, which cannot be cut into groups of 4 that share sequences",
        ),
        (
            a("trainer_common.nnodes=3", "rollout.tensor_model_parallel_size=12"),
            "makes rollout engines of 12 GPUs, which fit neither into one machine with 8 nor",
        ),
        (
            a("rollout.oversample=1.5"),
            "astuner.rollout.oversample is 1.5, but with alternating rollouts and training Trinity waits for all",
        ),
        (a("model.lora.rank=8", "model.lora.alpha=1.5"), "astuner.model.lora.alpha is 1.5, but verl accepts integers"),
        (
            [*a("model.lora.rank=8"), "trinity.synchronizer.sync_method=memory"],
            "trinity.synchronizer.sync_method is memory, but Trinity then sends model and adapters separately",
        ),
        (
            [*a("model.lora.rank=8"), f"trinity.{VERL}.model.external_lib=mine"],
            "external_lib is 'mine', but astuner.model.lora needs astuner_trinity.merged",
        ),
        (["trinity.mode=serve"], "trinity.mode is 'serve'; run `astuner run --with feedback`"),
        (["trinity.mode=bench"], "trinity.mode is 'bench'; run `astuner eval` to measure checkpoints; use one of both"),
        (["trinity.mode=colocate"], "trinity.mode is 'colocate'; Trinity 0.6.0 cannot start it"),
        (["trinity.synchronizer.sync_style=sometimes"], "is 'sometimes'; use one of fixed, explorer_driven"),
        ([f"trinity.{ENGINE}.engine_num=two"], "engine_num should be an integer of at least 1, got 'two'"),
        (["trinity.synchronizer.sync_interval=0"], "sync_interval should be an integer of at least 1, got 0"),
        (
            [ASYNC, "trinity.synchronizer.sync_interval=4"],
            "sync_interval is 4, so rollouts would wait for weights that training, which waits for rollouts, provides "
            "too late; use at most 3",
        ),
        (["trinity.explorer.auxiliary_models=judge"], "should be a list with a section for each model"),
        (["trinity.explorer.auxiliary_models=[{engine_num: no}]"], "should have integers of at least 1 as engine_num"),
    ],
)
def test_facts_that_do_not_fit_together_are_an_error(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        facts_of(overrides)
    assert message in str(e.value)


@pytest.mark.parametrize("mode", ["explore", "train"])
def test_two_commands_of_one_run_tell_trinity_what_one_command_tells_it(mode: str) -> None:
    assert told([f"trinity.mode={mode}"]).values == told([]).values


@pytest.mark.parametrize("gpus", [0, 1])
def test_too_few_gpus_are_an_error(gpus: int) -> None:
    says = (
        "is 0, but trinity needs at least one" if not gpus else "trinity needs two: one for rollouts, one for training"
    )
    with pytest.raises(ConfigError, match=f"astuner.trainer_common.n_gpus_per_node .*{says}"):
        facts_of(path=MATH_AGENT, gpus=gpus)


def test_while_the_tasks_are_not_read_no_steps_are_said() -> None:
    found = Facts.of(load_config(QUICK_START, backbone="trinity"), gpus=8)
    assert "total_steps" not in compose(found, {}).values["trainer"]
    assert next(row for row in ROWS if row.native == "trainer.total_steps").value(found) is UNSET


@pytest.mark.parametrize(
    ("overrides", "batches"),
    [
        ((), 1),
        (["trinity.synchronizer.sync_offset=1"], 2),
        (["trinity.synchronizer.sync_interval=3"], 3),
        ([ASYNC], 3),
        ([ASYNC, "trinity.explorer.max_inflight_batches=4"], 5),
        ([ASYNC, f"trinity.{STALENESS}=1"], 2),
    ],
)
def test_as_many_batches_may_wait_as_rollouts_are_ahead(overrides: Sequence[str], batches: int) -> None:
    values = told(overrides).values
    assert values["buffer"]["trainer_input"]["experience_buffer"]["capacity"] == batches
    arguments = {"max_staleness": batches - 1} if ASYNC in overrides else None
    assert values["algorithm"].get("sample_strategy_args") == arguments


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_command_shows_what_trinity_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--native", "--backbone", "trinity", "--json", "trinity.explorer.env_vars.API_KEY=hunter2"]
    with pytest.raises(SystemExit) as e:
        main(["config", "show", str(MATH_AGENT), *arguments])
    out, err = capsys.readouterr()
    assert not e.value.code, err
    shown = json.loads(out)
    assert shown["trainer"]["total_steps"] == 180
    assert shown["explorer"]["rollout_model"]["engine_type"] == "vllm"
    assert shown["explorer"]["env_vars"] == {"API_KEY": REMOVED}
