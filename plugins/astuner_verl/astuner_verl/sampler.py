"""What verl calls its replay buffer: it answers a request for n finished groups.

Set as ``trainer.v1.sampler.custom_sampler``.  Which groups are trained on, and what becomes of the others, is core's
to say (`Run.rollout`); verl's own filters and refills are not used.
"""

from __future__ import annotations

from typing import Any

from transfer_queue import KVBatchMeta

from astuner_verl import session


class GroupBuffer:
    """Runs groups when verl asks for them."""

    def __init__(self, **verl_passes_settings: Any) -> None:
        """Everything that is to be known is in the session."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """The rows of ``batch_size`` groups, and metrics (none: ours go to our own books).

        :param partition_id: ``train`` or ``val``.
        """
        run = session.current()
        batch = run.validate(global_steps) if partition_id == "val" else run.collect(global_steps)
        return batch, {}
