"""Registers the CPU with VERL. VERL imports this module in every process that imports ``verl``, and calls nothing.

Public registries hold the platform and the replica.  Two things VERL 0.9.1 has no public place for: the table of
rollout adapters is a private dict, and the process group's backend is made from the device's name, which on a CPU
names the same device twice.
"""

from __future__ import annotations

import functools
import os
from typing import Any

ROLLOUT = "hf_cpu"
"""What ``actor_rollout_ref.rollout.name`` calls the rollout server of this package."""


def active() -> bool:
    """Whether this process was told to run VERL on a CPU."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def register() -> None:
    """Register platform, rollout replica and rollout adapter; `verl` may be half imported."""
    from verl.plugin.platform import PlatformRegistry
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from astuner_verl_cpu.platform import CpuPlatform

    PlatformRegistry.register(platform="cpu")(CpuPlatform)
    RolloutReplicaRegistry.register(ROLLOUT, _replica)
    base._ROLLOUT_REGISTRY[ROLLOUT, "async"] = "astuner_verl_cpu.replica.HFServerAdapter"
    _name_the_cpu_once()


def _replica() -> Any:
    from astuner_verl_cpu.replica import HFReplica

    return HFReplica


def _name_the_cpu_once() -> None:
    """``cpu:gloo,cpu:gloo``, which VERL would ask torch for, is an error there."""
    from verl.utils import distributed

    original = distributed.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize(timeout_second: float | None = None, backend: str | None = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize


if active():
    register()
