"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_services() -> dict[str, Provider]:
    install = "pip install astuner-verl, or in an environment of its own: pip install astuner-trinity"
    return {
        "ray": Provider(
            target="astuner_ray.service:RayService",
            summary="Ray on this machine: the cluster that runs already, or one for this run",
            requires=("ray",),
            install=install,
        ),
        "ray_cluster": Provider(
            target="astuner_ray.service:RayClusterService",
            summary="Ray on several machines that are given the same command (MASTER_ADDR, MASTER_PORT)",
            aliases=("ray-cluster",),
            requires=("ray",),
            install=install,
        ),
    }
