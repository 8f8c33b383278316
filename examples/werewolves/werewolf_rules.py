"""The rules of Werewolves and nothing else: who lives, who may choose whom, who has won. No model, no text.

Players are the numbers 1 to n, in the order of the deal.  Nights and days take turns, beginning with a night.
Chance has no part in it: the same deal and the same choices give the same game.

Invariant: only the living choose and are chosen, each only whom their role may; anything else raises `RuleBroken`,
so a program around it cannot cheat by mistake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WEREWOLF, SEER, VILLAGER = "werewolf", "seer", "villager"
ROLES = (WEREWOLF, SEER, VILLAGER)
SEVEN = (WEREWOLF, WEREWOLF, SEER, VILLAGER, VILLAGER, VILLAGER, VILLAGER)
"""The example's game."""
MAX_DAYS = 2
"""Its length. With more days, werewolves win most games against a village that chooses at random."""

Choices = Mapping[int, "int | None"]
"""Who chose whom, in the order in which they chose; None is an abstention."""


class RuleBroken(ValueError):
    """The deal or the move is not allowed."""


@dataclass
class Game:
    """One game, between two moves."""

    roles: Sequence[str]
    """``roles[0]`` is player 1's."""
    max_days: int = MAX_DAYS
    """Nobody has won if the game is not over after that many days."""
    living: list[int] = field(init=False)
    """In ascending order."""
    nights: int = field(default=0, init=False)
    days: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Check the deal.

        :raises RuleBroken: The deal does not allow a game.
        """
        wolves = sum(role == WEREWOLF for role in self.roles)
        if unknown := sorted(set(self.roles) - set(ROLES)):
            raise RuleBroken(f"there is no role {unknown[0]!r}; a deal is a list of {', '.join(ROLES)}")
        if not 1 <= wolves < len(self.roles) - wolves:
            raise RuleBroken(f"{wolves} werewolves of {len(self.roles)} players; deal at least one, and less than half")
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
        """Whom a living player may choose now: at night the prey or whom to look at, by day whom to vote out."""
        others = [other for other in self.living if other != player]
        if not self.is_night or self.role(player) != WEREWOLF:
            return others
        return [other for other in others if self.role(other) != WEREWOLF]

    def night(self, choices: Choices) -> int | None:
        """Remove the player that most werewolves named; if they are split, the last one named.

        :returns: The dead player, or None if no werewolf named one.
        """
        self._check(choices, self.alive(WEREWOLF), is_night=True)
        most = leaders(choices)
        named = [target for target in choices.values() if target is not None]
        victim = most[0] if len(most) == 1 else named[-1] if named else None
        self.nights += 1
        return self._remove(victim)

    def sees(self, seer: int, player: int) -> bool:
        """Whether the player whom the seer looks at tonight is a werewolf.

        :raises RuleBroken: by day, or if one of them is not alive.
        """
        self._check({seer: player}, self.alive(SEER), is_night=True)
        return self.role(player) == WEREWOLF

    def vote(self, choices: Choices) -> int | None:
        """Everybody may name somebody; whoever most named must go. A tie spares all of them.

        :returns: the player who has gone, if any.
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
        """1 for every role on the winning side, 0 for the others; 0 for all when nobody has won."""
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
                raise RuleBroken(f"player {player} has no say in this")
            if target is not None and target not in self.targets(player):
                raise RuleBroken(f"player {player} may not choose player {target}")

    def _remove(self, player: int | None) -> int | None:
        if player is not None:
            self.living.remove(player)
        return player


def leaders(choices: Choices) -> list[int]:
    """Who was named most often: one player, several on a tie, none if all abstained."""
    counts = Counter(target for target in choices.values() if target is not None)
    return sorted(player for player, count in counts.items() if count == max(counts.values()))
