"""FrozenLake: every lake can be crossed, no lake is in two splits, and whatever a model says has an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner import Task
from astuner.testing import check_environment

pytest.importorskip("gymnasium", reason="FrozenLake is gymnasium's")

from astuner_env.worlds.frozen_lake import (
    DIRECTIONS,
    FrozenLake,
    make_map,
    read_move,
    split_of_map,
    warm,
)
from astuner_env.worlds.procedural import BAND, SPLITS, split_of
from tests.table import table

NEIGHBOURS = {"view": "neighbours"}
seeds = st.integers(0, len(SPLITS) * BAND - 1)
sizes = st.integers(3, 8)


def way(tiles: Sequence[str]) -> list[str]:
    """A shortest way from start to goal."""
    queue, seen = deque([(0, 0, [])]), {(0, 0)}
    while queue:
        row, column, moves = queue.popleft()
        if tiles[row][column] == "G":
            return moves
        for name, (dy, dx) in DIRECTIONS.items():
            y, x = row + dy, column + dx
            if 0 <= y < len(tiles) and 0 <= x < len(tiles) and (y, x) not in seen and tiles[y][x] != "H":
                seen.add((y, x))
                queue.append((y, x, [*moves, name]))
    raise AssertionError(f"no way across {tiles}")


def start(task_id: str = "4x4:5", **params: Any) -> FrozenLake:
    lake = FrozenLake(params)
    lake.reset(Task(task_id=task_id))
    return lake


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@table("params", [{}, NEIGHBOURS, {"size": 8, "slippery": True}])
def test_it_keeps_to_the_contract(params: dict[str, Any]) -> None:
    check_environment(FrozenLake, params=params)
    check_environment(FrozenLake, params=params, act=lambda observation: say("[right]"))


@given(seed=seeds, size=sizes, view=st.sampled_from(["map", "neighbours"]))
def test_every_lake_can_be_crossed_and_is_of_its_split(seed: int, size: int, view: str) -> None:
    tiles = make_map(size, 0.8, seed)
    assert tiles == make_map(size, 0.8, seed)
    assert split_of_map(tiles) == split_of(seed)
    lake = start(f"{size}x{size}:{seed}", view=view)
    moves = way(tiles)
    for move in moves[:-1]:
        result = lake.step(say(f"[{move}]"))
        assert (result.reward, result.is_over) == (0.0, False)
        assert lake.evaluate().score == 0
    result = lake.step(say(f"I go [{moves[-1]}]."))
    assert (result.reward, result.terminated, result.truncated) == (1.0, True, False)
    assert result.observation == "You reached the goal."
    assert lake.evaluate().is_success
    assert lake.evaluate().score == 1


@pytest.mark.slow
def test_no_lake_is_in_two_splits() -> None:
    lakes = {}
    for split in SPLITS:
        tasks = list(FrozenLake.tasks(split, {"tasks": 400}))
        lakes[split] = {make_map(4, 0.8, int(task.task_id.partition(":")[2])) for task in tasks}
        assert len(lakes[split]) > 50
    assert not lakes["train"] & lakes["validation"]
    assert not lakes["train"] & lakes["test"]
    assert not lakes["validation"] & lakes["test"]


@given(texts=st.lists(st.text(max_size=40) | st.sampled_from([f"[{d}]" for d in DIRECTIONS]), max_size=30))
def test_any_text_has_an_answer_and_the_episode_ends(texts: list[str]) -> None:
    lake = start(max_steps=12)
    results = [lake.step(say(text)) for text in texts]
    for number, result in enumerate(results, start=1):
        assert result.observation
        assert result.is_over or number < 12
        assert not (result.terminated and result.truncated)
    assert lake.evaluate().score == sum(result.reward for result in results)


def test_the_map_and_what_is_around_say_the_same() -> None:
    tiles = ["SFF", "HFH", "FFG"]
    seed = next(s for s in range(10_000) if list(make_map(3, 0.7, s)) == tiles)
    map_view, near = start(f"3x3:{seed}", frozen=0.7), start(f"3x3:{seed}", frozen=0.7, **NEIGHBOURS)
    assert map_view.step(say("[right]")).observation == "S P F\nH F H\nF F G"
    assert near.step(say("[right]")).observation == "left: ice, down: ice, right: ice, up: wall. Goal: 2 down, 1 right."
    assert near.step(say("[down]")).observation == "left: hole, down: ice, right: hole, up: ice. Goal: 1 down, 1 right."
    assert near.step(say("[down]")).observation == "left: ice, down: wall, right: goal, up: ice. Goal: 0 down, 1 right."
    assert map_view.step(say("what?")).observation.splitlines()[1:] == ["S P F", "H F H", "F F G"]
    assert near.step(say("what?")).observation.endswith(
        "[up]. left: ice, down: wall, right: goal, up: ice. Goal: 0 down, 1 right."
    )
    fallen = start(f"3x3:{seed}", frozen=0.7).step(say("[down]"))
    assert (fallen.observation, fallen.terminated, fallen.reward) == ("You fell into a hole.", True, 0.0)


def test_the_end_stays_the_end() -> None:
    lake = start(max_steps=2)
    first, second, third = (lake.step(say(text)) for text in ("what?", "[up]", "[down]"))
    assert first.observation.startswith("No move found. Answer with one of [left], [down], [right], [up].")
    assert (first.is_over, second.truncated, second.terminated) == (False, True, False)
    assert (third.observation, third.truncated, third.reward, third.info) == ("It is over.", True, 0.0, {"steps": 2})
    again = lake.reset(Task(task_id="4x4:5"))  # and a reset begins anew
    assert again.observation.startswith("P")
    assert not lake.step(say("[up]")).is_over


def test_ice_is_slippery_the_same_way_every_time() -> None:
    def cross() -> list[str]:
        lake = start(slippery=True, max_steps=20)
        return [lake.step(say("[up]")).observation for _ in range(10)]

    assert cross() == cross()
    assert len(set(cross())) > 1  # on ice that holds, going up in the corner leads nowhere
    assert len({start().step(say("[up]")).observation for _ in range(3)}) == 1
    assert "slippery" in FrozenLake({"slippery": True}).reset(Task(task_id="4x4:5")).messages[0]["content"]


@table(
    ("action", "move"),
    [
        (say("[left]"), "left"),
        (say("not [up], rather [ DOWN ]"), "down"),
        (say("left"), None),
        (say("[left"), None),
        (say("[leftright]"), None),
        ({"content": None}, None),
        ({}, None),
        (
            {"content": "[up]", "tool_calls": [{"function": {"name": "move", "arguments": '{"direction": "left"}'}}]},
            "left",
        ),
        ({"tool_calls": [{"function": {"name": "move", "arguments": {"direction": "Left"}}}] * 2}, None),
        (
            {"content": "[up]", "tool_calls": [{"function": {"name": "fly", "arguments": '{"direction": "left"}'}}]},
            None,
        ),
        ({"tool_calls": [{"function": {"name": "move", "arguments": "left"}}]}, None),
    ],
)
def test_moves_are_read_strictly(action: dict[str, Any], move: str | None) -> None:
    assert read_move(action) == move


@table("task_id", ["2x2:0", "4x5:0", "21x21:0", "lake:0", "4x4", "4x4:x", "4x4:3000000"])
def test_what_is_no_lake_is_refused(task_id: str) -> None:
    with pytest.raises(ValueError, match="unknown"):
        start(task_id)


@table("params", [{"size": 2}, {"size": 21}, {"frozen": 0.5}, {"frozen": 0.99}, {"view": "bird"}, {"max_steps": -1}])
def test_wrong_parameters_are_refused_by_tasks_and_instances(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        FrozenLake.tasks("train", params)
    with pytest.raises(ValueError, match="must be"):
        FrozenLake(params)


def test_too_few_lakes_for_three_splits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner_env.worlds.frozen_lake.MOST_DRAWS", 0)
    with pytest.raises(ValueError, match="too few"):
        start()


def test_it_describes_itself_and_warms_up() -> None:
    description = FrozenLake(NEIGHBOURS).describe()
    assert description["params"]["view"]["value"] == "neighbours"
    assert set(description["params"]) == {"tasks", "size", "frozen", "slippery", "view", "max_steps"}
    assert description["tools"][0]["function"]["parameters"]["properties"]["direction"]["enum"] == list(DIRECTIONS)
    warm()


def test_a_step_needs_a_reset() -> None:
    with pytest.raises(RuntimeError, match="step before reset"):
        FrozenLake().step(say("[up]"))
