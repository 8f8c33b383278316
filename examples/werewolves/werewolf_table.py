"""The moderator: asks the players who may act, reads what they choose, and passes on what each player may hear.

Invariant: `Game` receives legal choices only. A choice that is unreadable or not allowed is an abstention and counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping

import werewolf_words as words
from werewolf_player import MODERATOR, Player
from werewolf_rules import SEER, VILLAGER, WEREWOLF, Game


class Table:
    """One game with its players, by number."""

    def __init__(self, game: Game, players: Mapping[int, Player], first_speaker: int) -> None:
        self.game = game
        self.players = players
        self.first_speaker = first_speaker
        self.counts: Counter[tuple[bool, str]] = Counter()
        """(by a werewolf, what the choice was) -> how often."""

    async def play(self) -> None:
        while not self.game.is_over:
            victim = await self.night()
            if not self.game.is_over:
                await self.day(victim)

    async def night(self) -> int | None:
        """Let the werewolves and the seer act at the same time; the seer's result does not depend on who dies."""
        _, prey = await asyncio.gather(self.look(), self.hunt())
        return self.game.night(prey)

    async def hunt(self) -> dict[int, int | None]:
        """Return the victim that each werewolf names. They speak in turn, and the pack hears every answer."""
        wolves = self.game.alive(WEREWOLF)
        return {wolf: await self.choose(wolf, words.hunt(self.game, wolf), listeners=wolves) for wolf in wolves}

    async def look(self) -> None:
        for seer in self.game.alive(SEER):
            player = await self.choose(seer, words.look(self.game, seer))
            if player is not None:
                self.tell([seer], words.seen(player, self.game.sees(seer, player)))

    async def day(self, victim: int | None) -> None:
        """All hear the news, speak in turn, and vote at the same time."""
        living = list(self.game.living)
        first = (self.first_speaker - 1 + self.game.days) % len(self.game.roles) + 1  # or the next one alive
        self.tell(living, words.morning(self.game, victim))
        for number in sorted(living, key=lambda number: (number < first, number)):
            await self.ask(number, words.speak(number), listeners=living)
        # without listeners: a vote is secret until it is counted
        votes = await asyncio.gather(*(self.choose(number, words.ballot(self.game, number)) for number in living))
        cast = dict(zip(living, votes, strict=True))
        gone = self.game.vote(cast)
        self.tell(living, words.count(self.game, cast, gone))

    def tell(self, listeners: Iterable[int], text: str) -> None:
        """Let players hear the moderator."""
        for number in listeners:
            self.players[number].hear(MODERATOR, text)

    async def ask(self, number: int, question: str, listeners: Iterable[int] = ()) -> str:
        """Return a player's answer, and let the other listeners hear it."""
        player = self.players[number]
        answer = await player.answer(question)
        for listener in listeners:
            if listener != number:
                self.players[listener].hear(player.name, answer)
        return answer

    async def choose(self, number: int, question: str, listeners: Iterable[int] = ()) -> int | None:
        """Return whom a player chooses, or None if the answer names no player that they may choose."""
        target = words.chosen(await self.ask(number, question, listeners))
        legal = target in self.game.targets(number)
        kind = "legal" if legal else "unclear" if target is None else "illegal"
        self.counts[self.game.role(number) == WEREWOLF, kind] += 1
        return target if legal else None

    def shares(self, *, by_wolf: bool) -> dict[str, float]:
        """Of a side's choices, those that were not allowed and those that could not be read; nothing if it had none."""
        total = sum(count for (wolf, _), count in self.counts.items() if wolf is by_wolf)
        return {kind: self.counts[by_wolf, kind] / total for kind in ("illegal", "unclear")} if total else {}

    def wasted(self, role: str) -> float:
        """Return the share of a side's choices that did not count."""
        return sum(self.shares(by_wolf=role == WEREWOLF).values())

    def metrics(self) -> dict[str, float]:
        """How the game ended, and what became of the choices."""
        game, found = self.game, {}
        for by_wolf, side in ((True, "werewolf"), (False, "village")):
            found |= {f"{side}_{kind}": share for kind, share in self.shares(by_wolf=by_wolf).items()}
        return {
            "werewolves_win": float(game.winner == WEREWOLF),
            "village_wins": float(game.winner == VILLAGER),
            "days": float(game.days),
            "silent_players": float(sum(player.is_silent for player in self.players.values())),
            **found,
        }
