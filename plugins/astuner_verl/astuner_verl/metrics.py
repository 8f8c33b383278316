"""verl's numbers of a step, under the names that every backbone uses.

verl writes them as JSON lines (its logger ``file``); the file stays in the run folder with all of them, and what has a
name of ours goes to the log sinks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astuner_ray.native.numbers import VERL_ACTOR

NAMES: Mapping[str, str] = {
    **VERL_ACTOR,
    "actor/reward_kl_penalty": "kl/in_reward",
    "timing_s/update_actor": "time/update",
    "timing_s/update_weights": "time/sync_weights",
}
"""verl's name -> ours."""
SAVING = "timing_s/save_checkpoint"
"""verl's name of the seconds that saving took, which it counts as part of the step."""
_UPDATE = ("timing_s/old_log_prob", "timing_s/ref", "timing_s/adv", "timing_s/update_actor")


def times(numbers: Mapping[str, Any]) -> dict[str, float]:
    """A step's seconds, and those of its update, as every backbone counts them."""
    found = {"time/train": sum(float(numbers[name]) for name in _UPDATE if name in numbers)}
    if "timing_s/step" in numbers:
        found["time/step"] = float(numbers["timing_s/step"]) - float(numbers.get(SAVING, 0.0))
    return found


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
