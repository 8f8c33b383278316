"""What a run takes of its machines beside GPUs, for ``astuner run --dry-run``: processes, memory, disk, time."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

from astuner_objectives.plan import device_here, disk_plan, gib, speed_plan
from astuner_ray.native.gpu_memory import GIB, MASTER, Shape

if TYPE_CHECKING:
    from astuner_ray.native.facts import Facts

_PROCESS, _WITH_VLLM = 0.32 * GIB, 0.48 * GIB
"""Bytes of a process that has imported its engine, torch with it, as its share (PSS): 0.2 to 0.6 were measured; where
vLLM is installed, with a torch for CUDA, 0.45 on average of VERL's and 0.52 of Trinity's.
"""
_RAYS, _RAYS_BYTES = 8, 0.5 * GIB
"""Ray's own processes on one machine, and their bytes."""


def host_plan(processes: Mapping[str, int], *, cpus: int) -> Mapping[str, str]:
    """Lines of the plan.

    :param processes: what the run's actors are -> how many there are, beside the process of the command.
    :param cpus: how many Ray has to count, see `astuner_ray.cluster.connected`.
    """
    count = 1 + sum(processes.values())
    vllm = PathFinder.find_spec("vllm")  # on the disk: a stand-in may have been imported
    each = _WITH_VLLM if vllm and vllm.origin else _PROCESS
    listed = ", ".join(f"{n} {who}" for who, n in processes.items() if n)
    return {
        "processes": f"{count + _RAYS}: this one, {listed}, {_RAYS} of Ray's; Ray is to count {cpus} CPUs",
        "host memory": f"about {gib(count * each + _RAYS_BYTES)} for them, and what is kept there of weights "
        "(offloaded, checkpoints on their way) and of batches",
    }


def disk_and_speed(facts: Facts) -> Mapping[str, str]:
    """Lines of the plan; none for a model whose shape its config does not say in the usual words.

    An engine saves float32 weights and the optimizer's moments, in as many files as there are GPUs, and exports the
    weights once more; without adapters the export and the checkpoint share their files.
    """
    shape = Shape.of(facts.described)
    if shape is None:
        return {}
    common, adapters = facts.a.trainer_common, shape.adapters(facts.a.model.lora.rank)
    trained = adapters or shape.parameters
    moments = 2 * trained
    if common.optim.optimizer == "muon":  # one, but for embeddings
        moments -= trained if adapters else trained - shape.vocabulary * shape.hidden
    whole = shape.parameters + adapters
    state = MASTER * (whole + moments + (whole if adapters else 0))
    return {
        **disk_plan(facts.config, checkpoint=MASTER * shape.parameters, state=state),
        **speed_plan(
            facts.BACKBONE, parameters=shape.parameters, device=device_here(), gpus=facts.gpus * common.nnodes
        ),
    }
