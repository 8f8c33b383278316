"""What a run uses of its helper models, for its metrics and its summary.

Invariant: the database is opened only by an experiment that has helper models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from astuner_helpers.answer import Usage
from astuner_helpers.models import HelperModels

if TYPE_CHECKING:
    from astuner.config import Config


class HelperMeter:
    """Counts from when it is made."""

    def __init__(self, config: Config) -> None:
        self._helpers = HelperModels.of(config)
        self._last = self._helpers.usage()

    def since_last(self) -> dict[str, float]:
        """What was used since the last call, by metric; of all processes of this machine that work for the run."""
        now, used = self._helpers.usage(), {}
        for name, usage in now.items():
            before = self._last.get(name, Usage())
            used[f"helper/{name}/calls"] = float(usage.calls - before.calls)
            used[f"helper/{name}/cached"] = float(usage.cached - before.cached)
            used[f"helper/{name}/tokens"] = float(usage.tokens - before.tokens)
            used[f"helper/{name}/cost"] = usage.cost - before.cost
        self._last = now
        return used

    def usage(self) -> dict[str, Usage]:
        """What the whole run used, by helper; only of those that were asked."""
        return {name: usage for name, usage in self._helpers.usage().items() if usage.calls or usage.cached}
