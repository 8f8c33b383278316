"""What VERL is told: every row of the table reaches VERL's own configuration, composed from its own files."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from astuner import load_config
from astuner.cli import main
from astuner.config import Config
from astuner.config.capabilities import CORE, check_capabilities
from astuner.config.checking import section_of
from astuner.config.schema import AstunerSection
from astuner.contracts.errors import ConfigError, RunError
from astuner.contracts.secrets import REMOVED, redact
from astuner_ray.native import compose as native_compose
from astuner_ray.native import facts
from astuner_ray.native.keys import EngineSection
from astuner_ray.native.table import UNSET, Row
from astuner_verl import native, reserved, separate
from astuner_verl.native import Facts, Native, check, compose, platform_settings
from astuner_verl.table import TABLE, VALUES

ROWS, LOCKED = TABLE.rows, TABLE.locked
CAPABILITIES, CONVERTED, OWN = TABLE.capabilities, TABLE.converted, TABLE.own

ROOT = Path(__file__).resolve().parents[2]
QUICK_START = ROOT / "astuner_core" / "tests" / "data" / "seeds" / "quick_start.yaml"
MATH_AGENT = ROOT / "examples" / "math_agent" / "math_agent.yaml"
ACTOR, MODEL, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "ref", "rollout"))
TASKS = 1000
ON_THE_HUB = ("Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen3-0.6B", "some/model")
HUB = {"vocab_size": 152064, "max_position_embeddings": 131072}
"""What their ``config.json`` says; no hub can be reached from a test."""


@pytest.fixture(scope="module", autouse=True)
def yaml_files_read_once() -> Iterator[None]:
    """VERL's own configuration is read from its files once, not in each of a hundred tests."""
    composed = native.defaults()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "defaults", lambda: copy.deepcopy(composed))
        read = facts.model_config
        patch.setattr(facts, "model_config", lambda model, **_: HUB if model in ON_THE_HUB else read(model))
        yield


def told(
    overrides: Sequence[str] = (), *, path: Path = QUICK_START, gpus: int = 8, platform: Mapping[str, Any] | None = None
) -> Native:
    from astuner.runs.tasks import planned_steps

    config = load_config(path, overrides, backbone="verl")
    steps = planned_steps(config, TASKS)
    return compose(Facts.of(config, total_steps=steps, validation_tasks=1, gpus=gpus), platform or {})


@functools.cache
def as_it_is() -> Native:
    return told()


def value(composed: Native, key: str) -> Any:
    found = OmegaConf.select(composed.config, key.removeprefix("+"))
    return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found


def a(*pairs: str) -> list[str]:
    return [f"astuner.{pair}" for pair in pairs]


# --------------------------------------------------------------------------------------------------- every row arrives

OPTIM = f"{ACTOR}.optim.override_optimizer_config"
TEMPLATE = ROOT / "plugins" / "astuner_local" / "astuner_local" / "tiny" / "chat_template.jinja"
LONG = a("rollout.max_model_len=20000", "data.max_prompt_length=300", "data.max_response_length=700")
CASES: list[tuple[str, list[str], Any]] = [
    ("trainer.project_name", a("project_name=mine"), "mine"),
    ("trainer.experiment_name", a("experiment_name=mine"), "mine"),
    ("trainer.total_training_steps", a("trainer_common.total_steps=77"), 77),
    ("trainer.total_training_steps", a("trainer_common.total_epochs=3"), math.ceil(3 * TASKS / 264)),
    ("trainer.total_epochs", a("trainer_common.total_epochs=3"), 3),
    ("trainer.save_freq", a("trainer_common.save_freq=13"), 13),
    ("trainer.test_freq", a("trainer_common.test_freq=13"), 13),
    ("trainer.val_before_train", a("trainer_common.val_before_train=false"), False),
    ("trainer.nnodes", a("trainer_common.nnodes=4"), 4),
    ("trainer.n_gpus_per_node", a("trainer_common.n_gpus_per_node=2"), 2),
    ("trainer.default_local_dir", a("experiment_dir=/runs"), "/runs/quick_start/resume"),
    ("trainer.default_local_dir", a("experiment_dir=/runs", "experiment_name=mine"), "/runs/mine/resume"),
    (f"{MODEL}.path", a("model.path=Qwen/Qwen3-0.6B"), "Qwen/Qwen3-0.6B"),
    (f"{MODEL}.lora_rank", a("model.lora.rank=16"), 16),
    (f"{MODEL}.lora_alpha", a("model.lora.alpha=64"), 64),
    (f"{MODEL}.target_modules", a("model.lora.target_modules=[q_proj, v_proj]"), ["q_proj", "v_proj"]),
    (f"{ROLLOUT}.dtype", a("model.dtype=float16"), "float16"),
    (f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype", a("model.dtype=float32"), "fp32"),
    (f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype", a("model.dtype=bfloat16"), "bf16"),
    (f"+{REF}.fsdp_config.mixed_precision.param_dtype", a("model.dtype=float16"), "fp16"),
    (f"{MODEL}.enable_gradient_checkpointing", a("trainer_common.activation_checkpointing=false"), False),
    (f"{ROLLOUT}.max_model_len", a("rollout.max_model_len=14000"), 14000),
    (f"{ROLLOUT}.max_model_len", a("rollout.max_model_len=null", "data.max_prompt_length=4000"), 14000),
    (f"{ROLLOUT}.max_model_len", a("rollout.max_model_len=null", "data.max_response_length=4000"), 7000),
    ("data.max_prompt_length", a("data.max_prompt_length=2000"), 2000),
    ("data.max_prompt_length", a("data.max_prompt_length=null", "rollout.max_model_len=12000"), 11999),
    (
        "data.max_prompt_length",
        [*a("data.max_prompt_length=null", "data.max_response_length=5"), *LONG[:1]],
        19999,
    ),
    ("data.max_response_length", a("data.max_response_length=2000"), 2000),
    ("data.max_response_length", a("data.max_response_length=30000", "rollout.max_model_len=12000"), 11999),
    (
        "data.max_response_length",
        a("rollout.max_model_len=null", "data.max_prompt_length=1", "data.max_response_length=9"),
        9,
    ),
    (f"{ROLLOUT}.prompt_length", a("data.max_prompt_length=2000"), 2000),
    (f"{ROLLOUT}.response_length", a("data.max_response_length=2000"), 2000),
    ("data.train_batch_size", a("data.train_batch_size=16"), 16),
    (f"{ROLLOUT}.n", a("rollout.num_repeat=6"), 6),
    (f"{ACTOR}.rollout_n", a("rollout.num_repeat=6"), 6),
    (f"{ROLLOUT}.temperature", a("rollout.temperature=0.9"), 0.9),
    (f"{ROLLOUT}.top_p", a("rollout.top_p=0.5"), 0.5),
    (f"{ROLLOUT}.top_k", a("rollout.top_k=20"), 20),
    (f"{ROLLOUT}.val_kwargs.temperature", a("rollout.val_kwargs.temperature=0.4"), 0.4),
    (f"{ROLLOUT}.val_kwargs.do_sample", a("rollout.val_kwargs.temperature=0.4"), True),
    (f"{ROLLOUT}.val_kwargs.top_p", a("rollout.val_kwargs.top_p=0.4"), 0.4),
    (f"{ROLLOUT}.val_kwargs.top_k", a("rollout.val_kwargs.top_k=4"), 4),
    (f"{ROLLOUT}.name", a("rollout.name=sglang"), "sglang"),
    (f"{ROLLOUT}.tensor_model_parallel_size", a("rollout.tensor_model_parallel_size=4"), 4),
    (f"{ROLLOUT}.max_num_seqs", a("rollout.max_num_seqs=33"), 33),
    (f"{ROLLOUT}.max_num_seqs", a("rollout.max_num_seqs=null"), 256),
    (f"{ROLLOUT}.seed", a("seed=5"), 5),
    (f"{ACTOR}.data_loader_seed", a("seed=5"), 5),
    (f"{ACTOR}.fsdp_config.seed", a("seed=5"), 5),
    (f"{ACTOR}.ppo_max_token_len_per_gpu", a("trainer_common.micro_batch_tokens=40000"), 40000),
    (f"{ACTOR}.ppo_max_token_len_per_gpu", a("rollout.max_model_len=20000"), 20000),
    (
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        a("rollout.max_model_len=null", "data.max_prompt_length=9000", "data.max_response_length=9000"),
        18000,
    ),
    (
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        a("rollout.max_model_len=60000", "trainer_common.ulysses_sequence_parallel_size=2"),
        30000,
    ),
    (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", a("trainer_common.micro_batch_tokens=40000"), 40000),
    (f"{REF}.log_prob_max_token_len_per_gpu", a("trainer_common.micro_batch_tokens=40000"), 40000),
    (f"{ACTOR}.ppo_epochs", a("trainer_common.ppo_epochs=2"), 2),
    (f"{ACTOR}.optim.lr", a("trainer_common.optim.lr=3e-5"), 3e-5),
    (f"{ACTOR}.optim.weight_decay", a("trainer_common.optim.weight_decay=0.1"), 0.1),
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
    (f"{ACTOR}.ppo_mini_batch_size", a("data.train_batch_size=16"), 16),
    (f"{MODEL}.trust_remote_code", a("model.trust_remote_code=true"), True),
    ("data.trust_remote_code", a("model.trust_remote_code=true"), True),
    (f"{MODEL}.custom_chat_template", a(f"model.chat_template={TEMPLATE}"), TEMPLATE.read_text()),
    (f"{ACTOR}.optim.clip_grad", a("trainer_common.optim.grad_clip=0.5"), 0.5),
    (f"{ACTOR}.grad_clip", a("trainer_common.optim.grad_clip=0.5"), 0.5),
    (f"{ACTOR}.fsdp_config.param_offload", a("trainer_common.fsdp_config.param_offload=true"), True),
    (f"{ACTOR}.fsdp_config.optimizer_offload", a("trainer_common.fsdp_config.optimizer_offload=true"), True),
    (f"{ACTOR}.ulysses_sequence_parallel_size", a("trainer_common.ulysses_sequence_parallel_size=4"), 4),
    (f"{REF}.ulysses_sequence_parallel_size", a("trainer_common.ulysses_sequence_parallel_size=4"), 4),
    (f"{ACTOR}.use_kl_loss", a("trainer_common.use_kl_loss=true"), True),
    (f"{ACTOR}.kl_loss_coef", a("trainer_common.kl_loss_coef=0.02"), 0.02),
    (f"{ACTOR}.kl_loss_type", a("trainer_common.kl_loss_type=k2"), "k2"),
    ("algorithm.use_kl_in_reward", a("trainer_common.algorithm.use_kl_in_reward=true"), True),
    ("algorithm.kl_penalty", a("trainer_common.kl_loss_type=k2"), "k2"),
    ("algorithm.kl_ctrl.kl_coef", a("trainer_common.kl_loss_coef=0.02"), 0.02),
    (f"{ACTOR}.entropy_coeff", a("trainer_common.entropy_coeff=0.02"), 0.02),
    (f"{ACTOR}.clip_ratio_low", a("trainer_common.algorithm.clip_ratio_low=0.1"), 0.1),
    (f"{ACTOR}.clip_ratio_high", a("trainer_common.algorithm.clip_ratio_high=0.28"), 0.28),
    (f"{ACTOR}.clip_ratio_high", a("trainer_common.algorithm.loss=dapo"), 0.28),  # as the loss's name implies
    (
        "algorithm.rollout_correction.bypass_mode",
        a(
            "trainer_common.algorithm.rollout_is=token-mask",
            "trainer_common.mini_batch_num=2",
            "trainer_common.ppo_epochs=3",
        ),
        False,
    ),
]
"""VERL's key, what a person writes, and what VERL must then have there."""


@pytest.mark.parametrize(
    ("key", "overrides", "expected"), CASES, ids=lambda part: part if isinstance(part, str) else ""
)
def test_a_key_of_ours_reaches_verl(key: str, overrides: list[str], expected: Any) -> None:
    # the number of GPUs is what the cluster has, unless it is what is tested
    gpus = 2 if any("n_gpus_per_node" in o for o in overrides) else 8
    changed = told(overrides, gpus=gpus)
    if key == OPTIM:  # a section, of which the case names what it changes
        expected = {**value(as_it_is(), key), **expected}
    assert value(changed, key) == expected
    assert value(as_it_is(), key) != expected, "the case shows nothing: this is what VERL has anyway"


def test_ray_is_told_of_as_many_cpus_as_verl_reserves() -> None:
    counted = {gpus: reserved.training_cpus(told(gpus=gpus).config) for gpus in (1, 2, 4, 8)}
    assert counted == {1: 13, 2: 16, 4: 22, 8: 34}  # 1 + 8 for its queue, 3 a GPU, 1 to start with
    assert reserved.serving_cpus(told(gpus=2).config) == 7


def test_every_row_and_every_key_of_a_row_has_a_case() -> None:
    shown = {(key, o.partition("=")[0]) for key, overrides, _ in CASES for o in overrides}
    wanted = {(row.native, f"astuner.{ours}") for row in ROWS for ours in row.ours}
    assert sorted(wanted - shown) == []


@pytest.mark.parametrize("row", [row for row in ROWS if not row.ours], ids=lambda row: row.native)
def test_what_is_the_same_in_every_experiment_reaches_verl(row: Row) -> None:
    composed = told()
    expected = f"tickets:{4 * 264}" if row.native == "data.train_files" else row.value(SimpleNamespace())  # type: ignore[arg-type]
    config_steps = value(told(a("trainer_common.total_steps=4")), row.native)
    assert config_steps == expected if row.native == "data.train_files" else value(composed, row.native) == expected


def test_rows_and_locked_keys_are_verls() -> None:
    known = {key for key, _ in native._every_key(native.defaults())}
    names = [row.native for row in ROWS]
    assert VALUES.keys() <= set(names)
    assert [n for n in names if n.startswith("+") == (n.removeprefix("+") in known)] == []
    assert [key for key in LOCKED if key not in known] == []
    assert [key for key in LOCKED if any(key == row.native for row in ROWS)] == [], (
        "a row says itself that it is locked"
    )


def test_the_parts_of_the_package_that_verl_imports_by_name_exist() -> None:
    from verl.utils.import_utils import load_class_from_fqn, load_module

    composed = told()
    assert load_class_from_fqn(value(composed, "trainer.checkpoint_callback_class"), "CheckpointCallback")
    assert load_class_from_fqn(value(composed, f"{ROLLOUT}.agent.agent_loop_manager_class"), "AgentLoopManager")
    for key in ("data.custom_cls", "trainer.v1.sampler.custom_sampler"):
        found = value(composed, key)
        assert hasattr(load_module(found["path"]), found["name"])


# ------------------------------------------------------------------------------------------------ what verl itself says

EXPERIMENTS: dict[str, tuple[Path, list[str]]] = {
    "the example": (MATH_AGENT, []),
    "the seeds' quick start": (QUICK_START, []),
    "LoRA": (QUICK_START, a("model.lora.rank=32", "rollout.name=sglang")),  # verl asks an installed vllm about it
    "KL in the loss": (QUICK_START, a("trainer_common.use_kl_loss=true")),
    "KL in the reward": (QUICK_START, a("trainer_common.algorithm.use_kl_in_reward=true")),
    "long sequences": (
        QUICK_START,
        a("trainer_common.ulysses_sequence_parallel_size=4", "rollout.max_model_len=60000"),
    ),
    "float32": (QUICK_START, a("model.dtype=float32", "trainer_common.fsdp_config.param_offload=true")),
    "engines apart": (
        QUICK_START,
        [
            "verl.trainer.v1.trainer_mode=separate_async",
            f"verl.{ROLLOUT}.nnodes=1",
            f"verl.{ROLLOUT}.checkpoint_engine.backend=nccl",
            "verl.actor_rollout_ref.hybrid_engine=false",
        ],
    ),
    "verl's own keys": (
        QUICK_START,
        [
            "verl.trainer.v1.trainer_mode=colocate_async",
            f"verl.{ROLLOUT}.gpu_memory_utilization=0.8",
            f"verl.{ROLLOUT}.engine_kwargs.vllm.swap_space=4",
            f"verl.{ROLLOUT}.+enable_sleep_mode=false",
        ],
    ),
}


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_verl_takes_it(name: str, platform: str) -> None:
    path, overrides = EXPERIMENTS[name]
    if platform == "cpu" and name == "long sequences":
        pytest.skip("needs use_remove_padding, and with it flash-attn")
    check(told(overrides, path=path, platform=platform_settings() if platform == "cpu" else {}))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([f"verl.{ROLLOUT}.+no_such_field=1"], "no_such_field"),
        (
            [f"verl.{MODEL}.use_remove_padding=false", *a("trainer_common.ulysses_sequence_parallel_size=2")],
            "use_remove_padding",
        ),
        ([f"verl.{ROLLOUT}.mode=sync"], "sync"),
    ],
)
def test_what_verl_does_not_take_is_an_error_before_anything_starts(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=f"verl rejects this configuration: .*{says}"):
        check(told(overrides))


# ------------------------------------------------------------------------------------------------- the person's section


def written(tmp_path: Path, section: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(f"astuner:\n  model:\n    path: some/model\n  rollout:\n    max_model_len: 64\n{section}")
    return path


def test_a_key_of_verls_wins_over_ours_and_is_reported() -> None:
    composed = told(
        [f"verl.{ACTOR}.optim.lr=5e-6", f"verl.{ROLLOUT}.gpu_memory_utilization=0.7", "verl.trainer.device=npu"]
    )
    assert value(composed, f"{ACTOR}.optim.lr") == 5e-6
    assert value(composed, f"{ROLLOUT}.gpu_memory_utilization") == 0.7
    key = f"verl.{ACTOR}.optim.lr"
    assert composed.notes == (
        f"command line: {key}: 5e-06 replaces 1e-06, which came from astuner.trainer_common.optim.lr",
    )


def test_a_key_that_says_the_same_replaces_nothing() -> None:
    composed = told([f"verl.{ROLLOUT}.tensor_model_parallel_size=1"])
    assert composed.notes == ()


def test_keys_are_nested_or_dotted_and_a_plus_adds_one(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f"verl:\n  trainer:\n    balance_batch: false\n  {ROLLOUT}.enforce_eager: true\n"
        f"  actor_rollout_ref:\n    rollout:\n      +enable_sleep_mode: false\n    actor:\n"
        f"  +{ACTOR}.checkpoint.mine: 3\n"
        f"  {MODEL}.override_config:\n    attn_implementation: sdpa\n",
    )
    composed = told(path=path)
    assert value(composed, "trainer.balance_batch") is False
    assert value(composed, f"{ROLLOUT}.enforce_eager") is True
    assert value(composed, f"{ROLLOUT}.enable_sleep_mode") is False
    assert value(composed, f"{ACTOR}.checkpoint.mine") == 3
    assert value(composed, f"{MODEL}.override_config") == {"attn_implementation": "sdpa"}
    assert value(composed, f"{ACTOR}.use_torch_compile") is True, "an empty section empties nothing"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            "verl:\n  actor_rollout_ref:\n    rollout:\n      gpu_memory_utilisation: 0.7\n",
            f"mine.yaml:9:7: verl.{ROLLOUT}.gpu_memory_utilisation is not a key of verl; "
            f"did you mean {ROLLOUT}.gpu_memory_utilization?",
        ),
        (
            "verl:\n  rollout.gpu_memory_utilization: 0.7\n",
            f"verl.rollout.gpu_memory_utilization is not a key of verl; did you mean {ROLLOUT}.gpu_memory_utilization?",
        ),
        (
            "verl:\n  trainer.zzz: 1\n",
            "mine.yaml:7:3: verl.trainer.zzz is not a key of verl; ",
        ),
        (
            "verl:\n  trainer:\n    balance_batch: 3\n",
            "mine.yaml:8:5: verl.trainer.balance_batch should be true or false, like verl's default True",
        ),
        (
            "verl:\n  trainer:\n    nccl: 3\n  critic: 4\n",
            "mine.yaml:9:3: verl.critic is set by ASTuner: there is no critic",
        ),
        (
            "verl:\n  global_profiler: 4\n",
            "mine.yaml:7:3: verl.global_profiler is a section of verl; write keys below it",
        ),
        (
            "verl:\n  data:\n    train_batch_size: 4\n",
            "mine.yaml:8:5: verl.data.train_batch_size is set by ASTuner: write astuner.data.train_batch_size instead",
        ),
        (
            "verl:\n  trainer.use_v1: false\n",
            "mine.yaml:7:3: verl.trainer.use_v1 is set by ASTuner: verl's trainer as of 0.9",
        ),
        (
            "verl:\n  data.custom_cls.path: x\n",
            "verl.data.custom_cls.path is set by ASTuner: tasks are drawn by ASTuner",
        ),
        (
            "verl:\n  data.prompt_key: x\n",
            "verl.data.prompt_key is set by ASTuner: write astuner.task_reader and astuner.data",
        ),
        (
            f"verl:\n  +{ROLLOUT}.agent.agent_loop_manager_class: x\n",
            f"verl.{ROLLOUT}.agent.+agent_loop_manager_class is set by ASTuner: episodes are ASTuner's",
        ),
        (
            "verl:\n  trainer.total_epochs: 3\n",
            "verl.trainer.total_epochs is set by ASTuner: write astuner.trainer_common.total_epochs",
        ),
    ],
)
def test_a_wrong_key_is_an_error_with_its_place(tmp_path: Path, section: str, message: str) -> None:
    with pytest.raises(ConfigError) as e:
        told(path=written(tmp_path, section))
    assert message in str(e.value)


def test_a_misspelt_key_that_is_locked_leads_to_ours() -> None:
    with pytest.raises(
        ConfigError, match=r"verl\.trainer\.sav_freq is not a key of verl; trainer\.save_freq is, but it is"
    ):
        told(["verl.trainer.sav_freq=3"])


def test_wrong_keys_come_all_at_once_in_their_order(tmp_path: Path) -> None:
    path = written(tmp_path, "verl:\n  trainer:\n    use_v1: false\n    savefreq: 3\n")
    with pytest.raises(ConfigError) as e:
        told(["verl.reward.num_workers=3"], path=path)
    assert [problem.partition(": ")[0] for problem in e.value.problems] == [
        f"{path}:8:5",
        f"{path}:9:5",
        "command line",
    ]


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("  trainer:\n    device: cuda\n  trainer.device: npu\n", r"trainer\.device"),
        ("  trainer:\n    +mine: 1\n  +trainer.mine: 2\n", r"\+trainer\.mine"),
    ],
)
def test_a_key_written_in_two_spellings_is_an_error(tmp_path: Path, section: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is written twice"):
        load_config(written(tmp_path, f"verl:\n{section}"), backbone="verl")


def test_a_value_and_keys_below_it_are_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, "verl:\n  trainer.v1: 3\n  trainer:\n    v1:\n      trainer_mode: sync\n")
    with pytest.raises(ConfigError, match=r"trainer\.v1\.trainer_mode is below v1, which also has a value"):
        load_config(path, backbone="verl")


def test_the_section_has_places_and_survives_being_written_out(tmp_path: Path) -> None:
    section = "  trainer:\n    device: ${oc.env:USER_DEVICE,cuda}\n  trainer.balance_batch: false\n  +trainer.x: 1\n"
    path = written(tmp_path, f"verl:\n{section}")
    config = load_config(path, ["verl.actor_rollout_ref.+mine=3"], backbone="verl")
    assert str(config.origins["verl.trainer.device"]) == f"{path}:8:5"
    assert str(config.origins["verl.trainer.balance_batch"]) == f"{path}:9:3"
    assert str(config.origins["verl.actor_rollout_ref.+mine"]) == "command line"
    shown = {key: origin for key, _, origin in config.items() if key.startswith("verl.")}
    assert "default" not in shown.values()
    keys = config.backbone_section("verl").keys()
    assert keys == {
        "trainer.device": "cuda",
        "trainer.balance_batch": False,
        "actor_rollout_ref.+mine": 3,
        "trainer.+x": 1,
    }
    again = tmp_path / "resolved.yaml"
    again.write_text(config.dump_yaml())
    assert load_config(again).backbone_section("verl").keys() == keys


def test_an_experiment_without_the_section_has_it_empty(tmp_path: Path) -> None:
    for section in ("", "verl:\n"):
        found = load_config(written(tmp_path, section), backbone="verl").backbone_section("verl")
        assert isinstance(found, EngineSection)
        assert found.keys() == {}


def test_secrets_are_masked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    path = written(tmp_path, "verl:\n  trainer:\n    +api_key: hunter2\n    +hf_token: ${oc.env:MY_TOKEN}\n")
    shown = load_config(path, backbone="verl").as_dict()["verl"]["trainer"]
    assert shown == {"+api_key": REMOVED, "+hf_token": "${oc.env:MY_TOKEN}"}
    composed = told(path=path)
    assert value(composed, "trainer.api_key") == value(composed, "trainer.hf_token") == "hunter2"
    assert "hunter2" not in json.dumps([redact(composed.as_dict(), {}), composed.notes])


def test_nothing_of_verls_own_is_taken_for_a_secret() -> None:
    assert REMOVED not in json.dumps(redact(told().as_dict(), {}))


# ------------------------------------------------------------------------------------------------ platforms and facts


def test_what_the_platform_needs_wins_over_ours_and_is_said() -> None:
    composed = told(a("rollout.name=vllm"), platform=platform_settings())
    assert value(composed, f"{ROLLOUT}.name") == "hf_cpu"
    assert composed.notes == (f"astuner.rollout.name: this platform needs {ROLLOUT}.name: hf_cpu instead of vllm",)
    assert told(platform=platform_settings()).notes == (), "what nobody wrote is replaced in silence"


@pytest.mark.parametrize(("installed", "attention"), [(True, None), (False, "sdpa")])
def test_a_gpu_without_flash_attention_takes_torchs_own(
    installed: bool, attention: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_compose, "find_spec", lambda name: installed or None)
    model = told(platform=platform_settings({})).config.actor_rollout_ref.model
    assert model.override_config.get("attn_implementation") == attention
    assert model.use_remove_padding is installed


@pytest.mark.parametrize(
    ("overrides", "correction", "bypassed"),
    [
        ([], "token-truncate", True),  # one optimizer step of each batch has the old log-probabilities itself
        (a("trainer_common.ppo_epochs=2"), "token-truncate", False),
        (a("trainer_common.ppo_epochs=2", "model.dtype=float32"), "none", True),
        ([*a("model.dtype=float32"), f"verl.{ROLLOUT}.dtype=bfloat16"], "token-truncate", True),
        (a("trainer_common.algorithm.rollout_is=none"), "none", True),
    ],
)
def test_what_rounding_makes_of_rollouts_is_corrected(overrides: list[str], correction: str, bypassed: bool) -> None:
    composed = told(overrides)
    assert composed.common.algorithm.rollout_is == correction
    assert value(composed, "algorithm.rollout_correction.bypass_mode") is bypassed


def test_a_cpu_computes_in_float32_unless_a_type_is_written() -> None:
    types = (f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", f"{REF}.fsdp_config.mixed_precision.param_dtype")
    usual = told(platform=platform_settings())
    assert [value(usual, key) for key in (*types, f"{ROLLOUT}.dtype")] == ["fp32", "fp32", "float32"]
    assert usual.common.algorithm.rollout_is == "none"
    rounded = told(a("model.dtype=bfloat16"), platform=platform_settings())
    assert [value(rounded, key) for key in (*types, f"{ROLLOUT}.dtype")] == ["bf16", "bf16", "bfloat16"]
    assert rounded.notes == ()


def test_the_person_wins_over_the_platform() -> None:
    composed = told([f"verl.{ROLLOUT}.dtype=bfloat16"], platform=platform_settings())
    assert value(composed, f"{ROLLOUT}.dtype") == "bfloat16"
    assert composed.notes == (f"command line: verl.{ROLLOUT}.dtype: bfloat16 replaces float32",)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (a("data.max_prompt_length=13000"), "astuner.data.max_prompt_length is 13000, which leaves no room to answer"),
        (a("rollout.tensor_model_parallel_size=3"), "is 3, but 1 x 8 = 8 GPUs cannot be cut into rollout engines of 3"),
        (
            a("trainer_common.ulysses_sequence_parallel_size=3"),
            "8 GPUs cannot be cut into groups that share sequences of 3",
        ),
        (a("trainer_common.micro_batch_tokens=12999"), "must fit into one pass; use at least 13000"),
        (a("model.lora.alpha=12.5"), "astuner.model.lora.alpha is 12.5, but verl accepts integers only"),
        (a("model.path=tiny-calculator"), "astuner.rollout.max_model_len is 13000, but the context of the model"),
        *(
            (a("model.lora.rank=4", f"model.lora.target_modules={targets}"), f"target_modules names {layers}")
            for targets, layers in (
                ("[embed_tokens]", "the embedding"),
                ("[q_proj,model.embed_tokens]", "the embedding"),
                ("[lm_head]", "the vocabulary head"),
                ("[embed_tokens,lm_head]", "the embedding (embed_tokens) and the vocabulary head"),
                (".*embed.*", "the embedding"),
                (".*", "the embedding (embed_tokens) and the vocabulary head"),
            )
        ),
    ],
)
def test_facts_that_do_not_fit_together_are_an_error(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        told(overrides)
    assert message in str(e.value)


def test_no_gpu_is_an_error() -> None:
    config = load_config(QUICK_START, a("trainer_common.n_gpus_per_node=0"), backbone="verl")
    with pytest.raises(ConfigError, match="n_gpus_per_node is 0, but verl needs at least one"):
        Facts.of(config)


def test_the_context_is_the_models_own_where_nothing_is_written() -> None:
    config = load_config(MATH_AGENT, a("rollout.max_model_len=null"), backbone="verl")
    own = json.loads((Path(config.locate_model()) / "config.json").read_text())["max_position_embeddings"]
    assert Facts.of(config).max_model_len == own


def test_a_model_whose_config_says_nothing_is_an_error(tmp_path: Path) -> None:
    elsewhere = a("rollout.max_model_len=null", "model.path=no/such-model")
    config = load_config(written(tmp_path, ""), elsewhere, backbone="verl")
    with pytest.raises((ConfigError, RunError), match=r"astuner\.model\.path.* no/such-model"):  # with a hub, without
        Facts.of(config)
    for text, says in (("{", "cannot be read: Expecting"), ("{}", r"set astuner\.rollout\.max_model_len")):
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / "config.json").write_text(text)
        config = load_config(
            written(tmp_path, ""), a("rollout.max_model_len=null", "model.path=folder"), backbone="verl"
        )
        with pytest.raises(ConfigError, match=says):
            Facts.of(config)


def test_oversampling_means_nothing_where_groups_are_begun_ahead() -> None:
    said = r"command line: astuner\.rollout\.oversample has no effect .* colocate_async, .*; remove it"
    with pytest.raises(ConfigError, match=said):
        told(["astuner.rollout.oversample=2", "verl.trainer.v1.trainer_mode=colocate_async"])


APART = (
    "verl.trainer.v1.trainer_mode=separate_async",
    f"verl.{ROLLOUT}.nnodes=2",
    f"verl.{ROLLOUT}.n_gpus_per_node=4",
    f"verl.{ROLLOUT}.checkpoint_engine.backend=nccl",
)


def test_engines_with_gpus_of_their_own_are_counted_and_lent() -> None:
    apart, together = told(APART), told()
    assert (separate.training_gpus(apart.config), separate.training_gpus(together.config)) == (16, 8)
    assert (separate.serving_gpus(apart.config), separate.serving_gpus(together.config)) == ((2, 4), (1, 8))
    for overrides, lent in ((APART, 16), ((), 8)):
        assert value(told(overrides, platform=platform_settings()), separate.LENT) == lent
    assert value(apart, separate.LENT) is None, "real GPUs are counted by Ray"
    check(apart)


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        ([f"verl.{ROLLOUT}.nnodes=0"], f"{ROLLOUT}.nnodes", "is 0, but separate_async needs machines with rollout"),
        ([f"verl.{ROLLOUT}.n_gpus_per_node=0"], f"{ROLLOUT}.n_gpus_per_node", "is 0, but separate_async needs GPUs"),
        (
            [f"verl.{ROLLOUT}.n_gpus_per_node=3", *a("rollout.tensor_model_parallel_size=4")],
            f"{ROLLOUT}.n_gpus_per_node",
            "is 3, but 2 x 3 GPUs cannot be cut into rollout engines of 4",
        ),
        (
            [
                f"verl.{ROLLOUT}.nnodes=4",
                f"verl.{ROLLOUT}.n_gpus_per_node=3",
                *a("rollout.tensor_model_parallel_size=4"),
            ],
            f"{ROLLOUT}.n_gpus_per_node",
            "is 3, but 4 x 3 GPUs cannot be cut into rollout engines of 4",
        ),
        (
            [f"verl.{ROLLOUT}.checkpoint_engine.backend=naive"],
            f"{ROLLOUT}.checkpoint_engine.backend",
            "is naive, which copies new weights only within the same GPU; use nccl",
        ),
        (
            ["verl.trainer.v1.separate_async.hybrid_rollout.enable_switch=true"],
            "trainer.v1.separate_async.hybrid_rollout.enable_switch",
            "is true, but ASTuner cannot move groups",
        ),
        (
            a("model.lora.rank=8"),
            f"{MODEL}.lora.merge",
            "is false, but VERL 0.9.1 then sends the model without its adapters",
        ),
    ],
)
def test_what_engines_with_gpus_of_their_own_cannot_do_is_an_error(overrides: list[str], key: str, says: str) -> None:
    with pytest.raises(ConfigError) as e:
        told([*APART, *overrides])
    assert len(e.value.problems) == 1
    assert f"verl.{key} {says}" in e.value.problems[0]


def test_all_that_such_engines_lack_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as e:
        told([APART[0], *a("rollout.oversample=2")])
    assert [problem.partition(": ")[2].split()[0] for problem in e.value.problems] == [
        "astuner.rollout.oversample",
        f"verl.{ROLLOUT}.nnodes",
        f"verl.{ROLLOUT}.checkpoint_engine.backend",
    ]


def test_adapters_reach_such_engines_merged() -> None:
    composed = told([*APART, f"verl.{MODEL}.lora.merge=true", *a("model.lora.rank=8")])
    assert (value(composed, f"{MODEL}.lora_rank"), value(composed, f"{MODEL}.lora.merge")) == (8, True)


def test_gpus_that_only_train_need_not_hold_an_engine() -> None:
    wide = [*APART, *a("rollout.tensor_model_parallel_size=4")]
    with pytest.raises(ConfigError, match="1 x 2 = 2 GPUs cannot be cut into rollout engines of 4"):
        told(wide, gpus=2)
    composed = told([*wide, "verl.actor_rollout_ref.hybrid_engine=false"], gpus=2)
    assert separate.training_gpus(composed.config) == 2 + 8


def test_without_validation_tasks_verl_does_not_validate() -> None:
    config = load_config(QUICK_START, backbone="verl")
    composed = compose(Facts.of(config, total_steps=5, gpus=8), {})
    assert (value(composed, "trainer.test_freq"), value(composed, "trainer.val_before_train")) == (-1, False)


# ------------------------------------------------------------------------------------------------ who honours which key


def schema_keys(model: Any = AstunerSection, prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        section = section_of(info)
        yield from schema_keys(section, f"{prefix}{name}.") if section is not None else [f"{prefix}{name}"]


def covered(key: str, sections: Any) -> bool:
    return any(key == s or key.startswith(f"{s}.") for s in sections)


def test_every_key_of_the_schema_is_converted_or_honoured_or_refused() -> None:
    nowhere = [
        key
        for key in schema_keys()
        if not covered(key, {*CORE, *CONVERTED, *OWN, *CAPABILITIES.only, *CAPABILITIES.instead, "debug"})
    ]
    assert nowhere == []


def test_what_is_said_of_keys_is_said_of_keys_that_exist() -> None:
    keys = set(schema_keys())
    said = CONVERTED | OWN | CAPABILITIES.only.keys() | CAPABILITIES.instead.keys()
    assert sorted(key for key in said if key not in keys) == []
    assert sorted(CONVERTED & OWN - {"trainer_common.mini_batch_num"}) == []
    assert set(CAPABILITIES.only) <= set(CAPABILITIES.instead), "a refusal says what to write instead"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "trainer_common.resume_freq=3",
            "verl resumes from checkpoints: write trainer_common.save_freq",
        ),
        ("rollout.top_p=0.9", "lower rollout.temperature"),
        ("rollout.top_k=5", "lower rollout.temperature"),
        ("model.revision=main", "download the revision"),
        ("model.device=cpu", "VERL_PLATFORM=cpu"),
        ("model.lora.dropout=0.1", "dropout would make rollout and trainer differ"),
        ("rollout.name=vlm", "only null or vllm or sglang"),
        ("rollout.multi_turn.expected_steps=3", "any number of samples"),
    ],
)
def test_what_verl_cannot_honour_is_refused_by_name(override: str, says: str) -> None:
    config = load_config(QUICK_START, a(override), backbone="verl")
    with pytest.raises(ConfigError) as e:
        check_capabilities(config, CAPABILITIES)
    assert f"astuner.{override.partition('=')[0]}" in str(e.value)
    assert says in str(e.value)


def test_several_policies_are_refused() -> None:
    agents = a("agents.one.policy=left", "agents.two.policy=right")
    with pytest.raises(ConfigError, match=r"uses 2 policies"):
        check_capabilities(load_config(QUICK_START, agents, backbone="verl"), CAPABILITIES)


def test_the_seeds_quick_start_is_honoured_as_it_is() -> None:
    config: Config = load_config(QUICK_START, backbone="verl")
    assert check_capabilities(config, CAPABILITIES) == ()


# ---------------------------------------------------------------------------------------------------------- the command


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as e:
        main(["config", "show", str(MATH_AGENT), "--native", *arguments])
    shown = capsys.readouterr()
    return int(e.value.code or 0), shown.out, shown.err


def test_the_command_shows_what_verl_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = show(capsys, "--backbone", "verl", "--json", "verl.trainer.+api_key=hunter2")
    assert code == 0, err
    shown = json.loads(out)
    assert shown["trainer"]["total_training_steps"] == 180
    assert shown["actor_rollout_ref"]["rollout"]["name"] == "hf_cpu"
    assert shown["trainer"]["api_key"] == REMOVED


def test_the_command_refuses_what_a_run_would(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = show(capsys, "--backbone", "verl", "astuner.trainer_common.resume_freq=3")
    assert code != 0
    assert "trainer_common.resume_freq is not supported" in err


def test_a_backbone_without_an_engine_of_its_own_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = show(capsys, "--backbone", "local")
    assert code != 0
    assert "the backbone 'local' has no native configuration" in err


def test_unset_is_readable() -> None:
    assert repr(UNSET) == "the engine's default"
