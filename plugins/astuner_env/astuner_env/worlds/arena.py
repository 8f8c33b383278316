"""TextArena's games, for one player or several.

With several players the agent speaks for every seat in turn: each observation is what one player, ``info["player"]``,
has heard since that player last spoke, so a workflow that keeps a conversation per player gives every player a model
of its own.  There is no scripted opponent.  The score is one seat's.

Invariant: an instance sees the same chance whatever else happens in its process.  TextArena draws from Python's global
random numbers, so each instance puts its own in their place while it is at work.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import textarena
from pydantic import Field, model_validator
from textarena.envs.registration import ENV_REGISTRY

from astuner.contracts.environment import Evaluation, StepResult
from astuner.contracts.types import counts_as_success
from astuner_env.worlds import procedural
from astuner_env.worlds.procedural import text_of

_global_random = threading.RLock()


class Params(procedural.Params):
    games: list[Any] = Field(["GuessTheNumber-v0", "TowerOfHanoi-v0"])
    """the names of TextArena's games, listed in turn"""
    players: int = 1
    """how many play; the agent speaks for all of them"""
    seat: int = 0
    """whose reward is the score"""
    max_steps: int = Field(100, ge=1)
    """moves per episode, of all players together; most games end sooner by themselves"""

    @model_validator(mode="after")
    def _check(self) -> Params:
        if not self.games or not all(isinstance(name, str) and name in ENV_REGISTRY for name in self.games):
            raise ValueError(
                f"the parameter 'games' is {self.games!r}; it must name games of TextArena, e.g. GuessTheNumber-v0"
            )
        if not 0 <= self.seat < self.players:
            raise ValueError(f"seat {self.seat} of {self.players} players: seats count from 0")
        return self

    @property
    def names(self) -> Sequence[str]:
        return self.games


class TextArena(procedural.ProceduralWorld):
    """One game. Task ids are ``GAME:SEED``; the score is TextArena's reward of one seat, and 1 is a success."""

    kind = Params
    named = "GAME"
    _random_state = random.Random(0).getstate()
    _game: Any
    _player = 0
    _rewards: Mapping[str, float] = {}
    _reasons: Mapping[str, str] = {}

    def _begin(self, name: str, seed: int) -> StepResult:
        if name not in ENV_REGISTRY:
            raise ValueError(f"TextArena has no game {name!r}")
        players = self._settings.players
        raw = f"{name}-raw"  # what is new only; other variants repeat the whole game at every turn
        self._random_state = random.Random(seed).getstate()
        self._rewards, self._reasons = {}, {}
        with self._own_chance():
            self._game = textarena.make(raw if raw in ENV_REGISTRY else name)
            try:
                self._game.reset(num_players=players, seed=seed)
            except AssertionError as e:
                raise ValueError(f"TextArena's {name} with {players} players: {e}") from e
            heard = self._heard()
        return StepResult(observation=heard, info=self._info())

    def _act(self, action: Mapping[str, Any]) -> tuple[str, float]:
        with self._own_chance():
            done, _ = self._game.step(action=text_of(action))
            self._is_done = bool(done)
            if self._is_done:
                rewards, infos = self._game.close()
                self._rewards = {str(player): float(reward) for player, reward in (rewards or {}).items()}
                self._reasons = {str(player): str(info.get("reason", "")) for player, info in infos.items()}
            heard = self._heard()
        return heard, self._score if self._is_done else 0.0

    def evaluate(self) -> Evaluation:
        details = {"rewards": self._rewards, "reasons": self._reasons, **self._info()}
        return Evaluation(score=self._score, success=counts_as_success(self._score), details=details)

    def _about(self) -> dict[str, Any]:
        return {
            "rules": "The first observation says how the game is played. With several players, info.player is to move.",
            "score": "TextArena's reward of the seat at the end, before it 0: 1 is won; less, also below 0, is not",
            "games": sorted(name for name in ENV_REGISTRY if name.count("-") == 1),
        }

    @property
    def _score(self) -> float:
        return self._rewards.get(str(self._settings.seat), 0.0)

    def _info(self) -> dict[str, Any]:
        return {"player": self._player, "players": self._settings.players, "steps": self._steps}

    def _heard(self) -> str:
        """What the player to move has heard since that player last spoke, without that player's own words."""
        player, said = self._game.get_observation()
        self._player = int(player)
        if isinstance(said, str):  # a game that has no raw variant
            return said
        names = self._game.state.role_mapping
        return "\n".join(
            f"[{names.get(speaker, f'Player {speaker}')}] {text}"
            for speaker, text, *_ in said
            if speaker != self._player
        )

    @contextmanager
    def _own_chance(self) -> Iterator[None]:
        with _global_random:
            outer = random.getstate()
            random.setstate(self._random_state)
            try:
                yield
            finally:
                self._random_state = random.getstate()
                random.setstate(outer)


warm = TextArena.warm
