"""Adapt TextArena's games for one or several players.

With several players, the agent plays every seat in turn. Each observation contains what the current player
(``info["player"]``) has heard since its last turn, so a workflow with one conversation per player can use a separate
model for each. There is no scripted opponent. The score is the reward of one seat.

Invariant: the random numbers of an instance do not depend on other events in its process. TextArena uses Python's
global random state, so each instance swaps in its own state while it runs.
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
    """Parameters of `TextArena`."""

    games: list[Any] = Field(["GuessTheNumber-v0", "TowerOfHanoi-v0"])
    """names of TextArena games, listed in turn"""
    players: int = 1
    """number of players; the agent plays all of them"""
    seat: int = 0
    """seat whose reward is the score, from 0"""
    max_steps: int = Field(100, ge=1)
    """maximum number of moves of all players; most games end sooner"""

    @model_validator(mode="after")
    def _check(self) -> Params:
        if not self.games or not all(isinstance(name, str) and name in ENV_REGISTRY for name in self.games):
            raise ValueError(
                f"the parameter 'games' is {self.games!r}; it must name TextArena games, such as GuessTheNumber-v0"
            )
        if not 0 <= self.seat < self.players:
            raise ValueError(
                f"the parameter 'seat' is {self.seat}; it must be from 0 to {self.players - 1} ({self.players} players)"
            )
        return self

    @property
    def names(self) -> Sequence[str]:
        return self.games


class TextArena(procedural.ProceduralWorld):
    """Game with task IDs ``GAME:SEED``. The score is TextArena's reward of one seat; 1 is a success."""

    kind = Params
    named = "GAME"
    _random_state = random.Random(0).getstate()
    _game: Any
    _player = 0
    _rewards: Mapping[str, float] = {}
    _reasons: Mapping[str, str] = {}

    def _begin(self, name: str, seed: int) -> StepResult:
        if name not in ENV_REGISTRY:
            raise ValueError(f"unknown TextArena game {name!r}")
        players = self._settings.players
        raw = f"{name}-raw"  # the raw variant shows only new text; others repeat the complete game every turn
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
            "rules": "The first observation contains the rules. With several players, info.player moves.",
            "score": "TextArena's reward of the seat at the end, 0 before: 1 is a win, lower values are not",
            "games": sorted(name for name in ENV_REGISTRY if name.count("-") == 1),
        }

    @property
    def _score(self) -> float:
        return self._rewards.get(str(self._settings.seat), 0.0)

    def _info(self) -> dict[str, Any]:
        return {"player": self._player, "players": self._settings.players, "steps": self._steps}

    def _heard(self) -> str:
        """Return what the player to move has heard since its last turn, without its own messages."""
        player, said = self._game.get_observation()
        self._player = int(player)
        if isinstance(said, str):  # games without a raw variant
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
