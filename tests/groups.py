"""Groups of a pool in which enough others are whole."""

from __future__ import annotations

from collections.abc import Sequence

from astuner.contracts.types import Split
from astuner.rollout.pool import Draw, Group, RolloutPool, RunningGroups


async def until_enough(pool: RolloutPool, draws: Sequence[Draw], *, repeat: int, needed: int) -> list[Group]:
    """As a step does: whole groups until there are enough; the others are cut short."""
    running = RunningGroups(pool, repeat=repeat, split=Split.TRAIN)
    running.begin(draws)
    found = [await running.next_group() for _ in range(needed)] + await running.stop()
    return sorted(found, key=lambda group: group.group_id)
