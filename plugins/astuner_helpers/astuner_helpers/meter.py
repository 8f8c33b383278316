"""What a run uses of its helper models, for its metrics and its summary.

Invariant: the database is opened only by an experiment that has helper models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from astuner.contracts.events import Event, RunContext, Subscriber, Summary
from astuner_helpers.answer import Usage
from astuner_helpers.models import HelperModels


class HelperMeter(Subscriber):
    """Counts from when it is made."""

    direct = True

    def __init__(self, helpers: HelperModels) -> None:
        self._helpers = helpers
        self._last = helpers.usage()

    @classmethod
    def for_run(cls, context: RunContext) -> Sequence[Subscriber]:
        helpers = HelperModels.of(context.config)
        return [cls(helpers)] if helpers.names else []

    def wants(self, event: Event) -> bool:
        return False

    def numbers(self) -> dict[str, float]:
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

    def summary(self) -> Summary | None:
        """What the whole run used, by helper; only of those that were asked."""
        used = {name: usage for name, usage in self._helpers.usage().items() if usage.calls or usage.cached}
        if not used:
            return None
        return Summary(
            lines={f"helper model {name}": str(usage) for name, usage in used.items()},
            facts={"helper_models": {name: asdict(usage) for name, usage in used.items()}},
        )
