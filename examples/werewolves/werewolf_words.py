r"""Define the moderator's texts and parse answers.

The texts are short, because the tiny model has a context of 1,024 tokens. A choice is a player's number in
``\\boxed{}``, which chat models know from math. It is parsed strictly; unreadable choices are abstentions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from werewolf_rules import ROLES, WEREWOLF, Choices, Game

PLURAL = {"werewolf": "werewolves", "seer": "seers", "villager": "villagers"}


def rules_for(game: Game, player: int) -> str:
    """Return the system prompt of a player."""
    role, counts = game.role(player), Counter(game.roles)
    cast = ", ".join(f"{counts[r]} {r if counts[r] == 1 else PLURAL[r]}" for r in ROLES if counts[r])
    text = f"You are player {player} of {len(game.roles)} in a game of Werewolves ({cast}). You are a {role}"
    fellows = [other for other in game.alive(WEREWOLF) if other != player]
    if role == WEREWOLF and fellows:
        text += f", with {numbers(fellows)}"
    return (
        f"{text}.\nAt night the werewolves kill a player, and the seer learns whether one player is a werewolf. By "
        "day all speak, then vote one player out. The werewolves win once they are half of the living, the others "
        "once no werewolf lives.\nWhen you are told to choose, say why in a sentence, and end with the player's "
        "number in \\boxed{}."
    )


def numbers(players: Sequence[int]) -> str:
    return " ".join(map(str, players))


def hunt(game: Game, wolf: int) -> str:
    return f"Night {game.nights + 1}. Werewolves, choose whom to kill: {numbers(game.targets(wolf))}"


def look(game: Game, seer: int) -> str:
    return f"Night {game.nights + 1}. Seer, choose whom to look at: {numbers(game.targets(seer))}"


def seen(player: int, is_wolf: bool) -> str:
    return f"Player {player} is {'a' if is_wolf else 'no'} werewolf."


def morning(game: Game, victim: int | None) -> str:
    died = "Nobody died" if victim is None else f"Player {victim} died, a {game.role(victim)}"
    return f"Day {game.nights}. {died}. Living: {numbers(game.living)}"


def speak(player: int) -> str:
    return f"Player {player}, speak."


def ballot(game: Game, player: int) -> str:
    return f"Choose whom to vote out: {numbers(game.targets(player))}"


def count(game: Game, votes: Choices, gone: int | None) -> str:
    cast = ", ".join(f"{voter} for {choice}" for voter, choice in votes.items() if choice is not None)
    return f"Votes: {cast or 'none'}. " + (
        "Nobody goes." if gone is None else f"Player {gone} goes, a {game.role(gone)}."
    )


def chosen(answer: str) -> int | None:
    """Return the boxed number of an answer, or None unless there is exactly one box with only a number.

    The number need not belong to a player; the rules check that.
    """
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", answer)
    if len(boxes) != 1 or answer.count("\\boxed") != 1 or not re.fullmatch(r"\s*[0-9]{1,3}\s*", boxes[0]):
        return None
    return int(boxes[0])
