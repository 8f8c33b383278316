"""What of Ray's CPUs VERL's processes reserve, and which processes these are.  Light; VERL is not imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astuner_verl import separate

if TYPE_CHECKING:
    from omegaconf import DictConfig

_PER_GPU = 3
"""CPUs for each GPU: VERL's ``ResourcePoolManager.max_colocate_count``; rollout servers alone take 2."""
_TO_START = 1
"""One is free for actors that need it to start only."""


def training_cpus(native: DictConfig) -> int:
    """CPUs of a training run: its queue has one process for control and some for storage."""
    return _queue(native) + _PER_GPU * separate.training_gpus(native) + _TO_START


def serving_cpus(native: DictConfig) -> int:
    """CPUs of rollout servers without a trainer."""
    nodes, gpus = separate.serving_gpus(native)
    return _PER_GPU * nodes * gpus + _TO_START


def processes(native: DictConfig) -> dict[str, int]:
    """The actors of a training run -> how many; vLLM's servers have processes of their own below them."""
    rollout = native.actor_rollout_ref.rollout
    engine = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    nodes, gpus = separate.serving_gpus(native)
    return {
        "training": native.trainer.nnodes * native.trainer.n_gpus_per_node,
        "serving rollouts": max(1, nodes * gpus // engine),
        "running episodes": rollout.agent.num_workers,
        "of VERL's queue": _queue(native),
        "of VERL's others": 1 + native.reward.num_workers + 1,  # who balances requests, judges nothing; our mailbox
    }


def _queue(native: DictConfig) -> int:
    backend = native.transfer_queue.backend
    return 1 + (int(backend.SimpleStorage.num_data_storage_units) if backend.storage_backend == "SimpleStorage" else 0)
