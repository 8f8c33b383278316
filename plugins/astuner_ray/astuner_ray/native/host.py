"""Estimate a run's processes, host memory, disk and speed for ``astuner run --dry-run``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

from astuner_objectives.plan import device_here, disk_plan, gib, speed_plan
from astuner_ray.native.gpu_memory import GIB, MASTER, Shape

if TYPE_CHECKING:
    from astuner_ray.native.facts import Facts

_PROCESS, _WITH_VLLM = 0.32 * GIB, 0.48 * GIB
"""Bytes (PSS) of a process that has imported its engine and torch, without and with vLLM: 0.2 to 0.6 GiB were measured;
with vLLM and torch for CUDA on average 0.45 for VERL and 0.52 for Trinity.
"""
_RAYS, _RAYS_BYTES = 8, 0.5 * GIB
"""Number of Ray's own processes on a machine, and their total bytes."""


def host_plan(processes: Mapping[str, int], *, cpus: int) -> Mapping[str, str]:
    """Return the plan lines on processes and host memory.

    :param processes: Kind of the run's actors -> their number, without the process of the command.
    :param cpus: CPUs that Ray must count, see `astuner_ray.cluster.connected`.
    """
    count = 1 + sum(processes.values())
    vllm = PathFinder.find_spec("vllm")  # search the disk: a stub may have been imported
    each = _WITH_VLLM if vllm and vllm.origin else _PROCESS
    listed = ", ".join(f"{n} {who}" for who, n in processes.items() if n)
    return {
        "processes": f"{count + _RAYS}: 1 for the command, {listed}, {_RAYS} of Ray; Ray must count {cpus} CPUs",
        "host memory": f"about {gib(count * each + _RAYS_BYTES)} for these processes, plus offloaded weights, "
        "checkpoints being written, and batches",
    }


def disk_and_speed(facts: Facts) -> Mapping[str, str]:
    """Return the plan lines on disk and speed; empty if the model's config does not give its shape.

    An engine saves float32 weights and the optimizer's moments in as many files as there are GPUs, and exports the
    weights once more; without adapters, the export and the checkpoint share their files.
    """
    shape = Shape.of(facts.described)
    if shape is None:
        return {}
    common, adapters = facts.a.trainer_common, shape.adapters(facts.a.model.lora.rank)
    trained = adapters or shape.parameters
    moments = 2 * trained
    if common.optim.optimizer == "muon":  # one moment, except for embeddings
        moments -= trained if adapters else trained - shape.vocabulary * shape.hidden
    whole = shape.parameters + adapters
    state = MASTER * (whole + moments + (whole if adapters else 0))
    return {
        **disk_plan(facts.config, checkpoint=MASTER * shape.parameters, state=state),
        **speed_plan(
            facts.BACKBONE, parameters=shape.parameters, device=device_here(), gpus=facts.gpus * common.nnodes
        ),
    }
