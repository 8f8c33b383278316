"""Implement the rules of Werewolves, without model and text: who is alive, valid choices, and the winner.

Players are the numbers 1 to n, in the order of the deal. Nights and days alternate, starting with a night. The rules
are deterministic: the same deal and choices give the same game.

Invariant: only living players choose and are chosen, according to their role. Other moves raise `RuleBroken`, so a
program cannot break the rules by accident.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WEREWOLF, SEER, VILLAGER = "werewolf", "seer", "villager"
ROLES = (WEREWOLF, SEER, VILLAGER)
SEVEN = (WEREWOLF, WEREWOLF, SEER, VILLAGER, VILLAGER, VILLAGER, VILLAGER)
"""Roles of the example's game."""
MAX_DAYS = 2
"""Length of a game. With more days, werewolves win most games against a village with random votes."""

Choices = Mapping[int, "int | None"]
"""Player -> chosen player, in the order of the choices; None is an abstention."""


class RuleBroken(ValueError):
    """Raised for an invalid deal or move."""


@dataclass
class Game:
    """State of one game between two moves."""

    roles: Sequence[str]
    """``roles[0]`` is the role of player 1."""
    max_days: int = MAX_DAYS
    """Number of days after which the game ends without a winner."""
    living: list[int] = field(init=False)
    """Living players in ascending order."""
    nights: int = field(default=0, init=False)
    days: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Check the deal.

        :raises RuleBroken: The deal is invalid.
        """
        wolves = sum(role == WEREWOLF for role in self.roles)
        if unknown := sorted(set(self.roles) - set(ROLES)):
            raise RuleBroken(f"unknown role {unknown[0]!r}; roles: {', '.join(ROLES)}")
        if not 1 <= wolves < len(self.roles) - wolves:
            raise RuleBroken(
                f"{wolves} of {len(self.roles)} players are werewolves; use at least one and less than half"
            )
        if self.max_days < 1:
            raise RuleBroken(f"max_days is {self.max_days}; it must be at least 1")
        self.living = list(range(1, len(self.roles) + 1))

    def role(self, player: int) -> str:
        return self.roles[player - 1]

    def alive(self, role: str) -> list[int]:
        """Return the living players with this role."""
        return [player for player in self.living if self.role(player) == role]

    # ------------------------------------------------------------------ moves

    def targets(self, player: int) -> list[int]:
        """Return the players that a living player may choose now."""
        others = [other for other in self.living if other != player]
        if not self.is_night or self.role(player) != WEREWOLF:
            return others
        return [other for other in others if self.role(other) != WEREWOLF]

    def night(self, choices: Choices) -> int | None:
        """Execute the werewolves' choices: the most frequent choice dies, and the last choice decides a tie.

        :returns: The dead player, or None if all werewolves abstained.
        """
        self._check(choices, self.alive(WEREWOLF), is_night=True)
        most = leaders(choices)
        named = [target for target in choices.values() if target is not None]
        victim = most[0] if len(most) == 1 else named[-1] if named else None
        self.nights += 1
        return self._remove(victim)

    def sees(self, seer: int, player: int) -> bool:
        """Return whether the player that the seer chose is a werewolf.

        :raises RuleBroken: It is day, or one of them is not alive.
        """
        self._check({seer: player}, self.alive(SEER), is_night=True)
        return self.role(player) == WEREWOLF

    def vote(self, choices: Choices) -> int | None:
        """Execute a vote of all players: the most frequent choice leaves; a tie spares everyone.

        :returns: The player who leaves, or None.
        """
        self._check(choices, self.living, is_night=False)
        most = leaders(choices)
        self.days += 1
        return self._remove(most[0] if len(most) == 1 else None)

    # ----------------------------------------------------------------- ending

    @property
    def is_night(self) -> bool:
        return self.nights == self.days

    @property
    def winner(self) -> str | None:
        """`WEREWOLF` once they are half of the living, `VILLAGER` (for all others) once none lives, else None."""
        wolves = len(self.alive(WEREWOLF))
        if not wolves:
            return VILLAGER
        return WEREWOLF if 2 * wolves >= len(self.living) else None

    @property
    def is_over(self) -> bool:
        return self.winner is not None or self.days >= self.max_days

    def rewards(self) -> dict[str, float]:
        """Return 1 for every role on the winning side, else 0."""
        won = {role: role == WEREWOLF if self.winner == WEREWOLF else role != WEREWOLF for role in self.roles}
        return {role: float(self.winner is not None and won[role]) for role in ROLES if role in won}

    # ---------------------------------------------------------------- private

    def _check(self, choices: Choices, may: Sequence[int], *, is_night: bool) -> None:
        if self.is_over:
            raise RuleBroken("the game is over")
        if is_night != self.is_night:
            raise RuleBroken(f"it is {'night' if self.is_night else 'day'}")
        for player, target in choices.items():
            if player not in may:
                raise RuleBroken(f"player {player} may not choose now")
            if target is not None and target not in self.targets(player):
                raise RuleBroken(f"player {player} may not choose player {target}")

    def _remove(self, player: int | None) -> int | None:
        if player is not None:
            self.living.remove(player)
        return player


def leaders(choices: Choices) -> list[int]:
    """Return the most frequent choices: one player, several on a tie, none if all abstained."""
    counts = Counter(target for target in choices.values() if target is not None)
    return sorted(player for player, count in counts.items() if count == max(counts.values()))
