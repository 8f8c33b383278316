"""What a run takes of its machines beside GPUs: processes, and host memory, for ``astuner run --dry-run``."""

from __future__ import annotations

from collections.abc import Mapping

from astuner_ray.native.gpu_memory import GIB, gib

_PROCESS = 0.32 * GIB
"""Bytes of a process that has imported its engine, torch with it, as its share (PSS): 0.2 to 0.6 were measured."""
_RAYS, _RAYS_BYTES = 8, 0.5 * GIB
"""Ray's own processes on one machine, and their bytes."""


def host_plan(processes: Mapping[str, int], *, cpus: int) -> Mapping[str, str]:
    """Lines of the plan.

    :param processes: what the run's actors are -> how many there are, beside the process of the command.
    :param cpus: how many Ray has to count, see `astuner_ray.cluster.connected`.
    """
    count = 1 + sum(processes.values())
    listed = ", ".join(f"{n} {who}" for who, n in processes.items() if n)
    return {
        "processes": f"{count + _RAYS}: this one, {listed}, {_RAYS} of Ray's; Ray is to count {cpus} CPUs",
        "host memory": f"about {gib(count * _PROCESS + _RAYS_BYTES)} for them, and what is kept there of weights "
        "(offloaded, checkpoints on their way) and of batches",
    }
