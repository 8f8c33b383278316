"""Convert ``astuner.*`` keys to VERL's keys: ``keys.yaml`` and computed values.

The documentation generator imports this module without VERL.  Invariant: every key in ``told`` exists in VERL's YAML
files (or is added to them, with a ``+``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from astuner_ray.native import table
from astuner_ray.native.table import UNSET, Table
from astuner_verl.facts import Facts

_ACTOR, _MODEL, _ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))


def _tickets(facts: Facts) -> Any:
    steps = facts.total_steps
    return UNSET if steps is None else f"tickets:{steps * facts.a.data.train_batch_size}"


VALUES: Mapping[str, Callable[[Facts], Any]] = {
    "trainer.test_freq": lambda f: f.a.trainer_common.test_freq if f.validation_tasks else -1,
    "trainer.val_before_train": lambda f: f.a.trainer_common.val_before_train and f.validation_tasks > 0,
    "trainer.default_local_dir": lambda f: str(f.run_dir.resume),
    f"{_MODEL}.custom_chat_template": table.chat_template,
    f"{_MODEL}.lora_alpha": lambda f: int(f.a.model.lora.alpha),
    f"{_MODEL}.enable_gradient_checkpointing": table.checkpointing,
    f"+{_ACTOR}.fsdp_config.mixed_precision.param_dtype": table.precision,
    "+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype": table.precision,
    f"{_ROLLOUT}.val_kwargs.do_sample": lambda f: f.a.rollout.val_kwargs.temperature > 0,
    f"{_ROLLOUT}.name": lambda f: f.a.rollout.name or "vllm",
    f"{_ACTOR}.optim.override_optimizer_config": table.optimizer,
    "algorithm.rollout_correction.bypass_mode": lambda f: table.old_need_no_pass(f.a.trainer_common),
    "data.train_files": _tickets,
}
"""VERL's key -> function that computes its value."""

TABLE: Table[Facts] = Table(Path(__file__).with_name("keys.yaml"), VALUES)
