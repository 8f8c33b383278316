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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import textarena
from textarena.envs.registration import ENV_REGISTRY

from astuner.contracts.environment import Environment, Evaluation, StepResult
from astuner.contracts.types import Task
from astuner_env.worlds.actions import text_of
from astuner_env.worlds.procedural import SPLITS, TASK_IDS, list_tasks, parse_task_id, read_params

PARAMS: Mapping[str, Any] = {
    "games": ["GuessTheNumber-v0", "TowerOfHanoi-v0"],
    "players": 1,
    "seat": 0,
    "max_steps": 100,
}
MEANINGS = {
    "tasks": "how many tasks a split lists; 0: train 10000, the others 256",
    "games": "the names of TextArena's games, listed in turn",
    "players": "how many play; the agent speaks for all of them",
    "seat": "whose reward is the score",
    "max_steps": "moves per episode, of all players together; most games end sooner by themselves",
}
_global_random = threading.RLock()


class TextArena(Environment):
    """One game. Task ids are ``GAME:SEED``; the score is TextArena's reward of one seat, and 1 is a success."""

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(params)
        self._settings = _settings(self.params)
        self._random_state = random.Random(0).getstate()
        self._game: Any = None
        self._player = 0
        self._steps = 0
        self._is_done = False
        self._rewards: dict[str, float] = {}
        self._reasons: dict[str, Any] = {}

    @classmethod
    def tasks(cls, split: str, params: Mapping[str, Any]) -> Iterable[Task]:
        settings = _settings(params)
        return list_tasks(settings["games"], split, settings["tasks"])

    def reset(self, task: Task) -> StepResult:
        name, seed = parse_task_id(task.task_id)
        if name not in ENV_REGISTRY:
            raise ValueError(f"TextArena has no game {name!r}")
        players = self._settings["players"]
        raw = f"{name}-raw"  # what is new only; other variants repeat the whole game at every turn
        self._random_state = random.Random(seed).getstate()
        self._steps, self._is_done, self._rewards, self._reasons = 0, False, {}, {}
        with self._own_chance():
            self._game = textarena.make(raw if raw in ENV_REGISTRY else name)
            try:
                self._game.reset(num_players=players, seed=seed)
            except AssertionError as e:
                raise ValueError(f"TextArena's {name} with {players} players: {e}") from e
            heard = self._heard()
        return StepResult(observation=heard, info=self._info())

    def step(self, action: Mapping[str, Any]) -> StepResult:
        if self._game is None:
            raise RuntimeError("step before reset")
        if self._is_over:
            return self._result("It is over.", 0.0)
        self._steps += 1
        with self._own_chance():
            done, _ = self._game.step(action=text_of(action))
            self._is_done = bool(done)
            if self._is_done:
                rewards, infos = self._game.close()
                self._rewards = {str(player): float(reward) for player, reward in (rewards or {}).items()}
                self._reasons = {str(player): str(info.get("reason", "")) for player, info in infos.items()}
            heard = self._heard()
        return self._result(heard, self._score if self._is_done else 0.0)

    def evaluate(self) -> Evaluation:
        details = {"rewards": self._rewards, "reasons": self._reasons, **self._info()}
        return Evaluation(score=self._score, success=self._score >= 1, details=details)

    def describe(self) -> Mapping[str, Any]:
        return {
            "rules": "The first observation says how the game is played. With several players, info.player is to move.",
            "score": "TextArena's reward of the seat at the end, before it 0: 1 is won; less, also below 0, is not",
            "tasks": TASK_IDS.replace("NAME", "GAME"),
            "splits": list(SPLITS),
            "params": {name: {"meaning": meaning, "value": self._settings[name]} for name, meaning in MEANINGS.items()},
            "games": sorted(name for name in ENV_REGISTRY if name.count("-") == 1),
        }

    @property
    def _score(self) -> float:
        return self._rewards.get(str(self._settings["seat"]), 0.0)

    @property
    def _is_over(self) -> bool:
        return self._is_done or self._steps >= self._settings["max_steps"]

    def _result(self, observation: str, reward: float) -> StepResult:
        return StepResult(
            observation=observation,
            reward=reward,
            terminated=self._is_done,
            truncated=self._is_over and not self._is_done,
            info=self._info(),
        )

    def _info(self) -> dict[str, Any]:
        return {"player": self._player, "players": self._settings["players"], "steps": self._steps}

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


def warm() -> None:
    """What every instance would do first, done once before they are forked."""
    for name in PARAMS["games"]:
        TextArena().reset(Task(task_id=f"{name}:0"))


def _settings(params: Mapping[str, Any]) -> dict[str, Any]:
    settings = read_params(params, PARAMS)
    games: Sequence[Any] = settings["games"]
    if not games or not all(isinstance(name, str) and name in ENV_REGISTRY for name in games):
        raise ValueError(f"the parameter 'games' is {games!r}; it must name games of TextArena, e.g. GuessTheNumber-v0")
    if not 0 <= settings["seat"] < settings["players"]:
        raise ValueError(f"seat {settings['seat']} of {settings['players']} players: seats count from 0")
    if settings["max_steps"] < 1:
        raise ValueError(f"the parameter 'max_steps' is {settings['max_steps']}; it must be at least 1")
    return settings
