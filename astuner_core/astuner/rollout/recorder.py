"""Keeps every turn of one episode, as a forest of exact token prefixes.

Invariant: if a turn says it continues another, its prompt begins with that turn's prompt + response, token for
token, and both are by the same agent.  It is checked when the turn is added, so that everything behind the
recorder may rely on it.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from astuner.contracts.types import ExternalTurn, Turn


class EpisodeRecorder:
    """Append-only record of one episode. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[int, Turn] = {}
        self._external: list[ExternalTurn] = []
        self._next = 0

    def reserve(self) -> int:
        """The index of the next turn. A reserved index that is never added leaves a gap, which is harmless."""
        with self._lock:
            self._next += 1
            return self._next - 1

    def add(self, turn: Turn) -> None:
        """Keep ``turn``.

        :raises ValueError: its index is taken, or it does not exactly continue what it says it continues.
        """
        with self._lock:
            if turn.index in self._turns:
                raise ValueError(f"turn {turn.index} is recorded twice")
            if turn.continues is not None:
                self._check_continuation(turn, turn.continues)
            self._turns[turn.index] = turn

    def _check_continuation(self, turn: Turn, continued: int) -> None:
        parent = self._turns.get(continued)
        if parent is None or parent.agent != turn.agent:
            raise ValueError(f"turn {turn.index} of {turn.agent!r} continues turn {continued}, which is not its own")
        prompt, start = turn.generation.prompt_ids, parent.generation
        n, m = len(start.prompt_ids), len(start.response_ids)
        if list(prompt[:n]) != list(start.prompt_ids) or list(prompt[n : n + m]) != list(start.response_ids):
            raise ValueError(
                f"turn {turn.index} does not begin with the tokens of turn {continued}, which it continues"
            )

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns so far, in the order they were answered."""
        with self._lock:
            return tuple(self._turns[i] for i in sorted(self._turns))

    def leave_out(self, index: int) -> None:
        """Never train this turn: its reply reached nobody."""
        with self._lock:
            turn = self._turns.get(index)
            if turn is not None and turn.trained:
                self._turns[index] = replace(turn, trained=False, lost=True)

    def add_external(self, turn: ExternalTurn) -> None:
        """Keep what a model outside of the run said."""
        with self._lock:
            self._external.append(turn)

    @property
    def external(self) -> tuple[ExternalTurn, ...]:
        """What models outside of the run said so far."""
        with self._lock:
            return tuple(self._external)
