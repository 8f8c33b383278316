"""Trinity settings for a CPU; imports nothing heavy, because ASTuner reads it while composing the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def platform_settings() -> Mapping[str, Any]:
    """Return the platform for the entry point group ``astuner_trinity.platforms``.

    ``settings``: Trinity's dotted keys and their values.  ``worker_setup``: ``module.function``, called in every
    process before it imports Trinity.  ``logical_gpus``: GPUs to declare in a private Ray instance, because Trinity
    counts engines and trainers by Ray's resource "GPU".
    """
    trainer = "trainer.trainer_config"
    return {
        "settings": {
            "trainer.trainer_strategy": "fsdp2",  # FSDP1 moves a module's states to a GPU
            "trainer.use_remove_padding": False,  # needs flash-attn
            f"{trainer}.model.override_config.attn_implementation": "eager",  # the default needs flash-attn
            f"{trainer}.actor.use_torch_compile": False,  # compiling takes longer than a small model's run
            f"{trainer}.actor.fsdp_config.use_torch_compile": False,  # read by the engine
            f"{trainer}.actor.fsdp_config.dtype": "float32",  # type of the weights that the optimizer updates
            f"?{trainer}.actor.fsdp_config.mixed_precision.param_dtype": "fp32",  # many CPUs emulate bfloat16
            f"{trainer}.ref.fsdp_config.use_torch_compile": False,
            f"{trainer}.ref.fsdp_config.dtype": "float32",
            f"?{trainer}.ref.fsdp_config.mixed_precision.param_dtype": "fp32",
            "synchronizer.sync_method": "memory",  # NCCL needs GPUs
            "explorer.rollout_model.engine_type": "vllm",  # replaced by the CPU engine
            "?explorer.rollout_model.dtype": "float32",
            "explorer.runner_per_model": 2,  # processes that import every agent's code and compete with the engine
        },
        "worker_setup": "astuner_trinity_cpu.hooks.setup",
        "logical_gpus": 2,
    }
