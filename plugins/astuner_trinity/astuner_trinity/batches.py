"""Trinity's trainer takes the experiences of one explorer step, however many they are.

Trinity counts experiences, and waits for ever (or trains on a mixture) where an episode gives another number of them
than was written down.  Here each experience says how many its batch has (`astuner_trinity.credit`), so a train step is
an explorer step, in every synchronisation style.
"""

from __future__ import annotations

from typing import Any

from trinity.algorithm.sample_strategy.sample_strategy import SampleStrategy
from trinity.buffer import get_buffer_reader
from trinity.common.config import BufferConfig
from trinity.common.experience import Experience

from astuner_trinity.experiences import BATCH_SIZE


class WholeBatches(SampleStrategy):
    """Set as ``algorithm.sample_strategy``."""

    def __init__(self, buffer_config: BufferConfig, **kwargs: Any) -> None:
        super().__init__(buffer_config)
        self._reader = get_buffer_reader(buffer_config.trainer_input.experience_buffer)

    async def sample(self, step: int, **kwargs: Any) -> tuple[list[Experience], dict[str, float], list[Any]]:
        """The experiences of the oldest batch that waits; waits for one where there is none."""
        first = await self._reader.read(1)
        rest = first[0].info[BATCH_SIZE] - 1
        return first + (await self._reader.read(rest) if rest else []), {}, []

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a resumed run draws again what was not trained on."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: see `state_dict`."""
