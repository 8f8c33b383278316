"""verl's numbers of a step, under the names that every backbone uses.

verl writes them as JSON lines (its logger ``file``); the file stays in the run folder with all of them, and what has a
name of ours goes to the log sinks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astuner.native.numbers import VERL_ACTOR

NAMES: Mapping[str, str] = {
    **VERL_ACTOR,
    "actor/reward_kl_penalty": "kl/in_reward",
    "timing_s/update_actor": "time/update",
    "timing_s/update_weights": "time/sync_weights",
    "timing_s/save_checkpoint": "time/save",
    "timing_s/step": "time/step",
}
"""verl's name -> ours."""


class MetricsFile:
    """The file that verl's logger writes; read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def new(self) -> list[tuple[int, dict[str, Any]]]:
        """(step, numbers) of every line written since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._read)
            lines = file.read().split(b"\n")
        whole = lines[:-1]  # the last one is empty, or being written
        self._read += sum(len(line) + 1 for line in whole)
        rows = [json.loads(line) for line in whole]
        return [(int(row["step"]), row["data"]) for row in rows]
