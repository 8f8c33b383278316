"""Register the CPU engine with VERL; ``actor_rollout_ref.model.external_lib`` imports this module."""

from astuner_cpu.fsdp import CpuFsdpEngine, register

register(CpuFsdpEngine)
