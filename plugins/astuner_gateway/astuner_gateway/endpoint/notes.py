"""What the endpoint passed over in agents' requests: counted for the run's numbers, and told once for each name.

It stands with the turn that answers a request (`Turn.notes`), so it comes to the run from whatever process an episode
ran in.
"""

from __future__ import annotations

from collections import Counter

from astuner.contracts.events import EpisodeEnded, Event, Subscriber

LEFT_OUT, OVERRULED = "endpoint/left_out/", "endpoint/overruled/"
"""What metrics begin with; the field's name follows."""


class Notes(Subscriber):
    """Counts by name, over all episodes that end."""

    direct = True

    def __init__(self, context: object) -> None:
        self._new: Counter[str] = Counter()
        self._told: set[str] = set()

    def wants(self, event: Event) -> bool:
        return isinstance(event, EpisodeEnded)

    def handle(self, event: Event) -> None:
        assert isinstance(event, EpisodeEnded)  # it wants no other
        for turn in event.episode.turns:
            for name in turn.notes.keys() - self._told:
                self._told.add(name)
                what = "is left out of messages: it says nothing to the model"
                if name.startswith(OVERRULED):
                    what = "is the run's, whatever an agent asks for (astuner.endpoint.sampling: run)"
                self.remark(f"{name.rpartition('/')[2]} {what}; counted as {name}")
            self._new.update(turn.notes)

    def numbers(self) -> dict[str, float]:
        found, self._new = self._new, Counter()
        return {name: float(times) for name, times in found.items()}
