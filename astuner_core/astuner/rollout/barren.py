"""Steps with nothing to learn from: ordinary now and then, a mistake somewhere when they follow one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from astuner.types import DEFAULT_POLICY, Sample


class BarrenSteps:
    """Counts, for each policy that trains, the steps in a row in which all its advantages were 0."""

    def __init__(self, policies: Sequence[str], episodes: Path) -> None:
        """:param episodes: where a person can read what happened."""
        self._policies, self._episodes = policies, episodes
        self._steps: Counter[str] = Counter()

    def see(self, step: int, samples: Sequence[Sample], patience: int) -> Iterator[str]:
        """Count one step; what a person should be told, every ``patience`` such steps."""
        for policy in self._policies:
            mine = [s for s in samples if s.policy == policy]
            self._steps[policy] = 0 if any(s.advantage for s in mine) else self._steps[policy] + 1
            if self._steps[policy] and self._steps[policy] % patience == 0:
                who = f" for the policy {policy}" if len(self._policies) > 1 else ""
                yield self._said(step, who, mine, self._steps[policy])

    def _said(self, step: int, who: str, samples: Sequence[Sample], steps: int) -> str:
        if samples and all(s.reward >= 1 for s in samples):
            return f"step {step}: every episode of the last {steps} steps succeeded: nothing to learn{who}"
        rewards = {round(s.reward, 6) for s in samples}
        if not rewards and who:
            what = "no agent that speaks with it has said anything"
        elif len(rewards) == 1:
            what = f"all rewards are {rewards.pop():g}"
        else:
            what = "all rewards within each group are equal"
        return (
            f"step {step}: nothing to learn from{who} in {steps} steps, {what}; look at {self._episodes}, then "
            "at the judge, the temperature, or tasks of another difficulty"
        )

    def state(self) -> dict[str, int]:
        """What `restore` needs; JSON-serialisable."""
        return dict(self._steps)

    def restore(self, state: int | Mapping[str, int]) -> None:
        """:param state: an older ASTuner's is the number of its one policy."""
        self._steps = Counter({DEFAULT_POLICY: state} if isinstance(state, int) else state)
