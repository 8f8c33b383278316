"""Convert ``astuner.*`` keys to Trinity's keys: ``keys.yaml`` and computed values.

The documentation generator imports this module without Trinity.  Invariant: every key in ``told`` exists in Trinity's
`Config` or below ``trainer.trainer_config``, which Trinity passes to VERL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from astuner import TrainerCommon
from astuner_ray.native import table
from astuner_ray.native.table import UNSET, Table
from astuner_trinity.facts import ENGINE, MERGED, MERGING, STALENESS, VERL, Facts

TASKS = "buffer.explorer_input"
EXPERIENCES = "buffer.trainer_input.experience_buffer"
_READER = "astuner_trinity.workflow.DrawReader"
_WORKFLOW = "astuner_trinity.workflow.GroupWorkflow"
_ALGORITHM = "astuner_trinity.algorithm.EpisodeAlgorithm"


def _oversample(facts: Facts) -> Any:
    """Return the ratio for which Trinity waits for ceil((1 - ratio) * drawn) groups, which must be the batch size."""
    wanted = facts.a.data.train_batch_size
    return UNSET if facts.drawn == wanted else 1 - (wanted - 0.5) / facts.drawn


def _tasks(facts: Facts) -> Any:
    return [{"name": "train", "storage_type": _READER, "path": "train", "default_workflow_type": _WORKFLOW}]


def loss_settings(common: TrainerCommon) -> dict[str, Any]:
    """Return the arguments of `TokenLoss`."""
    return {"settings": common.model_dump(mode="json", include={*TrainerCommon.model_fields})}


def _adapters(facts: Facts) -> Any:
    lora, names = facts.a.model.lora, facts.a.model.lora.target_modules
    if not isinstance(names, str):  # Trinity accepts text only, which peft matches against the full name
        names = rf"(.*\.)?({'|'.join(map(re.escape, names))})"
    return [{"lora_rank": lora.rank, "lora_alpha": int(lora.alpha), "target_modules": names}] if lora.rank else UNSET


VALUES: Mapping[str, Callable[[Facts], Any]] = {
    "ray_namespace": lambda f: f"astuner/{f.a.project_name}/{f.config.experiment_name}",
    "checkpoint_root_dir": lambda f: str(f.run_dir.path),
    "model.custom_chat_template": table.chat_template,
    f"{VERL}.actor.fsdp_config.mixed_precision.param_dtype": table.precision,
    f"{VERL}.ref.fsdp_config.mixed_precision.param_dtype": table.precision,
    f"{VERL}.model.enable_gradient_checkpointing": table.checkpointing,
    "model.lora_configs": _adapters,
    MERGING: lambda f: MERGED if f.a.model.lora.rank else UNSET,
    "model.max_prompt_tokens": lambda f: f.max_model_len - f.response_length,
    "explorer.over_rollout.ratio": _oversample,
    "buffer.train_batch_size": lambda f: f.a.data.train_batch_size * f.a.rollout.num_repeat,
    f"{EXPERIENCES}.max_read_timeout": lambda f: float(f.patience),
    f"{ENGINE}.engine_type": lambda f: f.a.rollout.name or "vllm",
    f"{VERL}.actor.optim.override_optimizer_config": table.optimizer,
    "algorithm.advantage_fn_args": lambda f: {"multiple": f.data_parallel * f.a.trainer_common.mini_batch_num},
    "algorithm.algorithm_type": lambda f: f"{_ALGORITHM}{'WithReference' * f.a.trainer_common.use_kl_loss}",
    "algorithm.policy_loss_fn_args": lambda f: loss_settings(f.a.trainer_common),
    "algorithm.entropy_loss_fn_args": lambda f: {"entropy_coef": f.a.trainer_common.entropy_coeff},
    "algorithm.bypass_old_logprobs": lambda f: table.old_need_no_pass(f.a.trainer_common),
    f"{TASKS}.tasksets": _tasks,
    f"{EXPERIENCES}.capacity": lambda f: (
        f.sync_offset + f.sync_interval if f.max_staleness is None else f.max_staleness + 1
    ),
    STALENESS: lambda f: UNSET if f.max_staleness is None else f.max_staleness,
}
"""Trinity's key -> function that computes its value."""

TABLE: Table[Facts] = Table(Path(__file__).with_name("keys.yaml"), VALUES)
