"""CPUs that VERL's processes reserve in Ray, and which processes these are.  Does not import VERL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astuner_verl import separate

if TYPE_CHECKING:
    from omegaconf import DictConfig

_PER_GPU = 3
"""CPUs per GPU: VERL's ``ResourcePoolManager.max_colocate_count``; rollout servers alone use 2."""
_TO_START = 1
"""One CPU stays free for actors that need it only to start."""


def training_cpus(native: DictConfig) -> int:
    """Return the CPUs of a training run; its queue has one control process and several storage processes."""
    return _queue(native) + _PER_GPU * separate.training_gpus(native) + _TO_START


def serving_cpus(native: DictConfig) -> int:
    """Return the CPUs of rollout servers without a trainer."""
    nodes, gpus = separate.serving_gpus(native)
    return _PER_GPU * nodes * gpus + _TO_START


def processes(native: DictConfig) -> dict[str, int]:
    """Return the actors of a training run and their number; vLLM's servers have further child processes."""
    rollout = native.actor_rollout_ref.rollout
    engine = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    nodes, gpus = separate.serving_gpus(native)
    return {
        "training": native.trainer.nnodes * native.trainer.n_gpus_per_node,
        "serving rollouts": max(1, nodes * gpus // engine),
        "running episodes": rollout.agent.num_workers,
        "of VERL's queue": _queue(native),
        "of VERL's others": 1 + native.reward.num_workers + 1,  # load balancer, idle reward workers; ASTuner's mailbox
    }


def _queue(native: DictConfig) -> int:
    backend = native.transfer_queue.backend
    return 1 + (int(backend.SimpleStorage.num_data_storage_units) if backend.storage_backend == "SimpleStorage" else 0)
