"""gymnasium's FrozenLake in words: cross the ice to the goal, and into no hole.

A map is made from the task's seed, by gymnasium; it always has a way to the goal.  On a small lake different seeds
give the same map, so disjoint seeds would not do: which split a map belongs to is decided by the map itself, and a
seed goes on drawing until it has one of its own split.  Invariant: no map is in two splits.

What an answer must look like: one direction in brackets, such as ``[left]`` (the last one counts), or a call of the
tool ``move``.  Anything else is answered with what was expected, and takes one of the episode's steps all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from astuner.contracts.environment import Environment, Evaluation, StepResult
from astuner.contracts.types import Task
from astuner_env.worlds.actions import calls_of, text_of, tool
from astuner_env.worlds.procedural import BAND, SPLITS, TASK_IDS, list_tasks, parse_task_id, read_params, split_of

DIRECTIONS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""(rows, columns), in the order of gymnasium's actions 0 to 3."""
PARAMS: Mapping[str, Any] = {
    "size": 4,
    "frozen": 0.8,
    "slippery": False,
    "view": "map",
    "max_steps": 0,
}
MEANINGS = {
    "tasks": "how many tasks a split lists; 0: train 10000, the others 256",
    "size": "rows and columns of the lakes that are listed, 3 to 20; a task's own size is in its id",
    "frozen": "the share of the tiles that are ice rather than holes, 0.6 to 0.95",
    "slippery": "whether a move goes to either side instead, each in one case of three",
    "view": "map: the whole lake at every step; neighbours: the four tiles around, and how far the goal is",
    "max_steps": "answers per episode; 0: 100 for up to 4 x 4, more for larger lakes as in gymnasium",
}
TILES = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}
SHARES = {"train": 6, "validation": 1, "test": 1}
"""Of the maps there are, in eighths."""
MOST_DRAWS = 1000
RULES = (
    "Cross the frozen lake to the goal. Do not step into a hole. Answer with one move: [left], [down], [right] or [up]."
)
SLIPPERY = " The ice is slippery: you may slide to either side of where you want to go."
LEGEND = " On the map P is you, F ice, H a hole, G the goal."


class FrozenLake(Environment):
    """One lake. Task ids are ``ROWSxCOLUMNS:SEED``; the score is 1 at the goal, else 0."""

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(params)
        self._settings = _settings(self.params)
        self._lake: Any = None
        self._map: Sequence[str] = ()
        self._steps = self._most_steps = 0
        self._reward = 0.0
        self._ended = False

    @classmethod
    def tasks(cls, split: str, params: Mapping[str, Any]) -> Iterable[Task]:
        settings = _settings(params)
        return list_tasks([f"{settings['size']}x{settings['size']}"], split, settings["tasks"])

    def reset(self, task: Task) -> StepResult:
        name, seed = parse_task_id(task.task_id)
        size = _size(name)
        self._map = make_map(size, self._settings["frozen"], seed)
        self._lake = FrozenLakeEnv(desc=list(self._map), is_slippery=self._settings["slippery"])
        self._lake.reset(seed=seed)
        self._steps, self._reward, self._ended = 0, 0.0, False
        self._most_steps = self._settings["max_steps"] or max(100, 100 * size * size // 32)
        rules = RULES + SLIPPERY * self._settings["slippery"] + LEGEND * (self._settings["view"] == "map")
        seen = self._view()
        messages = ({"role": "system", "content": rules}, {"role": "user", "content": seen})
        return StepResult(observation=seen, messages=messages, info=self._info())

    def step(self, action: Mapping[str, Any]) -> StepResult:
        if self._lake is None:
            raise RuntimeError("step before reset")
        if self._is_over:
            return self._result("It is over.", 0.0)
        self._steps += 1
        move = read_move(action)
        if move is None:
            gap = "\n" if self._settings["view"] == "map" else " "
            asked = f"No move found. Answer with one of [{'], ['.join(DIRECTIONS)}].{gap}{self._view()}"
            return self._result(asked, 0.0)
        _, reward, ended, _, _ = self._lake.step(list(DIRECTIONS).index(move))
        self._reward, self._ended = float(reward), bool(ended)
        if ended:
            return self._result("You reached the goal." if reward else "You fell into a hole.", self._reward)
        return self._result(self._view(), 0.0)

    def evaluate(self) -> Evaluation:
        return Evaluation(score=self._reward, success=self._reward >= 1, details=self._info())

    def describe(self) -> Mapping[str, Any]:
        return {
            "rules": RULES,
            "score": "1 when the goal is reached, else 0",
            "tasks": TASK_IDS.replace("NAME", "ROWSxCOLUMNS"),
            "splits": list(SPLITS),
            "params": {name: {"meaning": meaning, "value": self._settings[name]} for name, meaning in MEANINGS.items()},
            "tools": [tool("move", "Take one step.", "direction", {"type": "string", "enum": list(DIRECTIONS)})],
        }

    @property
    def _is_over(self) -> bool:
        return self._ended or self._steps >= self._most_steps

    def _result(self, observation: str, reward: float) -> StepResult:
        return StepResult(
            observation=observation,
            reward=reward,
            terminated=self._ended,
            truncated=self._is_over and not self._ended,
            info=self._info(),
        )

    def _info(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def _position(self) -> tuple[int, int]:
        row, column = divmod(int(self._lake.s), len(self._map))
        return row, column

    def _view(self) -> str:
        row, column = self._position()
        if self._settings["view"] == "map":
            lines = [list(line) for line in self._map]
            lines[row][column] = "P"
            return "\n".join(" ".join(line) for line in lines)
        around = ", ".join(f"{name}: {self._tile(row + dy, column + dx)}" for name, (dy, dx) in DIRECTIONS.items())
        last = len(self._map) - 1
        return f"{around}. Goal: {last - row} down, {last - column} right."

    def _tile(self, row: int, column: int) -> str:
        inside = 0 <= row < len(self._map) and 0 <= column < len(self._map)
        return TILES[self._map[row][column]] if inside else "wall"


def read_move(action: Mapping[str, Any]) -> str | None:
    """The direction that a message asks for; None: there is none, or several tools were called at once."""
    calls = calls_of(action)
    if calls:
        name, arguments = calls[0]
        said = str(arguments.get("direction", "")).strip().lower()
        return said if len(calls) == 1 and name == "move" and said in DIRECTIONS else None
    found = re.findall(rf"\[\s*({'|'.join(DIRECTIONS)})\s*\]", text_of(action).lower())
    return str(found[-1]) if found else None


def make_map(size: int, frozen: float, seed: int) -> tuple[str, ...]:
    """The map of a seed, a text of S, F, H and G per row: the first that gymnasium draws of the seed's split."""
    for draw in range(MOST_DRAWS):
        tiles = tuple(generate_random_map(size, frozen, seed + draw * len(SPLITS) * BAND))
        if split_of_map(tiles) == split_of(seed):
            return tiles
    raise ValueError(
        f"no lake of {size} x {size} with a share of {frozen} ice is in the split {split_of(seed)}: there are too few "
        "different ones; take a larger size, or less ice"
    )


def split_of_map(tiles: Sequence[str]) -> str:
    """The one split that a map may be in."""
    eighth = crc32("".join(tiles).encode()) % sum(SHARES.values())
    return next(split for n, split in enumerate(SPLITS) if eighth < sum(list(SHARES.values())[: n + 1]))


def warm() -> None:
    """What every instance would do first, done once before they are forked."""
    FrozenLake().reset(Task(task_id="4x4:0"))


def _settings(params: Mapping[str, Any]) -> dict[str, Any]:
    settings = read_params(params, PARAMS)
    _size(f"{settings['size']}x{settings['size']}")
    if not 0.6 <= settings["frozen"] <= 0.95:
        raise ValueError(
            f"the parameter 'frozen' is {settings['frozen']}; it must be between 0.6 and 0.95: with less hardly any "
            "lake has a way across, with more they are all alike"
        )
    if settings["view"] not in ("map", "neighbours"):
        raise ValueError(f"the parameter 'view' is {settings['view']!r}; it must be map or neighbours")
    if settings["max_steps"] < 0:
        raise ValueError(f"the parameter 'max_steps' is {settings['max_steps']}; it must be 0 (as usual) or more")
    return settings


def _size(name: str) -> int:
    match = re.fullmatch(r"(\d{1,2})x(\d{1,2})", name)
    if match is None or match[1] != match[2] or not 3 <= int(match[1]) <= 20:
        raise ValueError(f"there is no lake {name!r}; it must be square, from 2x3 to 20x20, e.g. 4x4")
    return int(match[1])
