"""VERL settings for a CPU; imports nothing heavy, because ASTuner reads it while composing VERL's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def settings() -> Mapping[str, Any]:
    """Return VERL's dotted keys and their values; a leading ``+`` adds a key that its YAML files do not have.

    Keys with a ``?`` apply only if ``astuner.model.dtype`` is not set: many CPUs emulate bfloat16 slowly.
    """
    return {
        "trainer.device": "cpu",
        "+ray_kwargs.ray_init.num_gpus": "${trainer.n_gpus_per_node}",  # logical GPUs, because VERL counts devices
        "actor_rollout_ref.model.external_lib": "astuner_verl_cpu.engine",
        "actor_rollout_ref.model.use_remove_padding": False,  # needs flash-attn
        "+actor_rollout_ref.model.override_config.attn_implementation": "eager",  # the default needs flash-attn
        "actor_rollout_ref.actor.strategy": "fsdp2",  # FSDP1 moves a module's states to a GPU
        "actor_rollout_ref.actor.use_torch_compile": False,  # compiling takes longer than a small model's run
        "actor_rollout_ref.ref.use_torch_compile": False,
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,  # read by the engine
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
        "?+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
        "?+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype": "fp32",
        "actor_rollout_ref.rollout.name": "hf_cpu",
        "?actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.checkpoint_engine.backend": "gloo",  # transport of weights in `separate_async`
        "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module": "astuner_verl_cpu.weights",
        "actor_rollout_ref.rollout.free_cache_engine": False,  # server and trainer use separate memory
        "actor_rollout_ref.rollout.agent.num_workers": 2,  # processes that import every agent's code; default: 8
        "actor_rollout_ref.model.lora.merge": True,  # the server accepts full weights, no adapters
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,  # processes; default: 8
    }
