"""Register the CPU with VERL. VERL imports this module in every process that imports ``verl`` and calls nothing in it.

Platform and replica use public registries.  VERL 0.9.1 has no public interface for two things: the table of rollout
adapters is a private dict, and the process group's backend is derived from the device's name, which on a CPU names the
same device twice.
"""

from __future__ import annotations

import os
from typing import Any

ROLLOUT = "hf_cpu"
"""Value of ``actor_rollout_ref.rollout.name`` for this package's rollout server."""


def active() -> bool:
    """Return whether VERL must run on a CPU in this process."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def register() -> None:
    """Register platform, rollout replica and rollout adapter; `verl` may be partially imported."""
    from verl.plugin.platform import PlatformRegistry
    from verl.utils import distributed
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from astuner_cpu import device
    from astuner_verl_cpu.platform import CpuPlatform

    PlatformRegistry.register(platform="cpu")(CpuPlatform)
    RolloutReplicaRegistry.register(ROLLOUT, _replica)
    base._ROLLOUT_REGISTRY[ROLLOUT, "async"] = "astuner_verl_cpu.replica.HFServerAdapter"
    device.name_once(distributed)


def _replica() -> Any:
    from astuner_verl_cpu.replica import HFReplica

    return HFReplica


if active():
    register()
