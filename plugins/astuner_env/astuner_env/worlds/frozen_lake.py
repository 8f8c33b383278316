"""Adapt gymnasium's FrozenLake to text: cross the ice to the goal without falling into a hole.

gymnasium generates a map from the task's seed; every map has a path to the goal. On a small lake, different seeds can
produce the same map, so disjoint seeds do not separate the splits. Instead, the map determines its split, and a seed
draws maps until one belongs to its split. Invariant: no map is in two splits.

An answer is a direction in brackets, such as ``[left]`` (the last one counts), or a call of the tool ``move``. Any
other answer gets a reminder of the format and uses up a step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from zlib import crc32

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from pydantic import Field

from astuner.contracts.environment import Evaluation, StepResult
from astuner.contracts.types import counts_as_success
from astuner_env.worlds import procedural
from astuner_env.worlds.procedural import BAND, SPLITS, calls_of, split_of, text_of, tool

DIRECTIONS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""(rows, columns), in the order of gymnasium's actions 0 to 3."""
TILES = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}
SHARES = {"train": 6, "validation": 1, "test": 1}
"""Share of all maps in each split, in eighths."""
MOST_DRAWS = 1000
RULES = (
    "Cross the frozen lake to the goal. Do not step into a hole. Answer with one move: [left], [down], [right] or [up]."
)
SLIPPERY = " The ice is slippery: you may slide to either side of where you want to go."
LEGEND = " On the map P is you, F ice, H a hole, G the goal."


class Params(procedural.Params):
    """Parameters of `FrozenLake`."""

    size: int = Field(4, ge=3, le=20)
    """rows and columns of the listed lakes, 3 to 20; the size of a task is in its ID"""
    frozen: float = Field(0.8, ge=0.6, le=0.95)
    """share of ice tiles, 0.6 to 0.95: with less, most lakes cannot be crossed; with more, all lakes look alike"""
    slippery: bool = False
    """whether a move slides to the left or right with a probability of 1/3 each"""
    view: Literal["map", "neighbours"] = "map"
    """map: the complete lake at every step; neighbours: the four adjacent tiles and the distance to the goal"""
    max_steps: int = Field(0, ge=0)
    """maximum number of answers; 0: 100 for up to 4 x 4, more for larger lakes, as in gymnasium"""

    @property
    def names(self) -> Sequence[str]:
        return [f"{self.size}x{self.size}"]


class FrozenLake(procedural.ProceduralWorld):
    """Lake with task IDs ``ROWSxCOLUMNS:SEED``. The score is 1 at the goal, else 0."""

    kind = Params
    named = "ROWSxCOLUMNS"
    _lake: Any
    _map: Sequence[str]
    _reward = 0.0

    def _begin(self, name: str, seed: int) -> StepResult:
        self._map = make_map(_size(name), self._settings.frozen, seed)
        self._lake = FrozenLakeEnv(desc=list(self._map), is_slippery=self._settings.slippery)
        self._lake.reset(seed=seed)
        self._reward = 0.0
        rules = RULES + SLIPPERY * self._settings.slippery + LEGEND * (self._settings.view == "map")
        seen = self._view()
        messages = ({"role": "system", "content": rules}, {"role": "user", "content": seen})
        return StepResult(observation=seen, messages=messages, info=self._info())

    def _act(self, action: Mapping[str, Any]) -> tuple[str, float]:
        move = read_move(action)
        if move is None:
            gap = "\n" if self._settings.view == "map" else " "
            return f"No move found. Answer with one of [{'], ['.join(DIRECTIONS)}].{gap}{self._view()}", 0.0
        _, reward, ended, _, _ = self._lake.step(list(DIRECTIONS).index(move))
        self._reward, self._is_done = float(reward), bool(ended)
        if ended:
            return "You reached the goal." if reward else "You fell into a hole.", self._reward
        return self._view(), 0.0

    def evaluate(self) -> Evaluation:
        return Evaluation(score=self._reward, success=counts_as_success(self._reward), details=self._info())

    def _about(self) -> dict[str, Any]:
        return {
            "rules": RULES,
            "score": "1 if the goal is reached, else 0",
            "tools": [tool("move", "Take one step.", "direction", {"type": "string", "enum": list(DIRECTIONS)})],
        }

    @property
    def _most_steps(self) -> int:
        return self._settings.max_steps or max(100, 100 * len(self._map) ** 2 // 32)

    def _view(self) -> str:
        row, column = divmod(int(self._lake.s), len(self._map))
        if self._settings.view == "map":
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
    """Return the direction in a message, or None if there is none or several tools are called."""
    calls = calls_of(action)
    if calls:
        name, arguments = calls[0]
        said = str(arguments.get("direction", "")).strip().lower()
        return said if len(calls) == 1 and name == "move" and said in DIRECTIONS else None
    found = re.findall(rf"\[\s*({'|'.join(DIRECTIONS)})\s*\]", text_of(action).lower())
    return str(found[-1]) if found else None


def make_map(size: int, frozen: float, seed: int) -> tuple[str, ...]:
    """Return the map of a seed (a string of S, F, H and G per row): the first drawn map of the seed's split."""
    for draw in range(MOST_DRAWS):
        tiles = tuple(generate_random_map(size, frozen, seed + draw * len(SPLITS) * BAND))
        if split_of_map(tiles) == split_of(seed):
            return tiles
    raise ValueError(
        f"no {size} x {size} lake with {frozen} ice is in the split {split_of(seed)}, because there are too few "
        "different lakes; use a larger size or less ice"
    )


def split_of_map(tiles: Sequence[str]) -> str:
    """Return the split of a map."""
    eighth = crc32("".join(tiles).encode()) % sum(SHARES.values())
    return next(split for n, split in enumerate(SPLITS) if eighth < sum(list(SHARES.values())[: n + 1]))


def _size(name: str) -> int:
    match = re.fullmatch(r"(\d{1,2})x(\d{1,2})", name)
    if match is None or match[1] != match[2] or not 3 <= int(match[1]) <= 20:
        raise ValueError(f"unknown lake {name!r}; it must be square, from 3x3 to 20x20, such as 4x4")
    return int(match[1])


warm = FrozenLake.warm
