"""Trinity's platform ``vllm_on_cpu``: that of astuner-trinity-cpu, with vLLM itself as the rollout engine.

What Trinity 0.6.0 asks of vLLM needs GPUs in three places, and vLLM 0.28 wants one argument more; `rollout_model` and
`worker` are other there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

ENGINE = "trinity.common.models.vllm_model"


def platform_settings() -> Mapping[str, Any]:
    """What the entry point group ``astuner_trinity.platforms`` asks of a platform."""
    from astuner_trinity_cpu.settings import platform_settings

    cpu = platform_settings()
    engine = "explorer.rollout_model"
    settings = {
        **cpu["settings"],
        f"?{engine}.enforce_eager": True,  # compiling takes longer than a small model's whole run
        f"?{engine}.gpu_memory_utilization": 0.1,  # the share of the machine's memory that vLLM wants to find free
    }
    return {**cpu, "settings": settings, "worker_setup": f"{__name__}.setup"}


@functools.cache
def setup() -> None:
    """Make this process ready: as for a CPU, but for the engine."""
    import wrapt

    from astuner_trinity_cpu import hooks

    hooks.setup()
    del sys.modules[ENGINE]  # the CPU's own
    wrapt.register_post_import_hook(_adapt, ENGINE)


def _adapt(module: Any) -> None:
    from trinity_on_vllm.rollout_model import adapt

    adapt(module.vLLMRolloutModel)
