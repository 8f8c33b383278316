"""TextArena: games are played out, every player hears what is new, and chance is the instance's own."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner import Task
from astuner.testing import check_environment

pytest.importorskip("textarena", reason='these games are TextArena\'s: pip install "astuner-env[textarena]"')

from astuner_env.worlds.arena import TextArena, warm
from tests.table import table

GUESS = "GuessTheNumber-v0"
TIC_TAC_TOE = {"games": ["TicTacToe-v0"], "players": 2}


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@table("params", [{}, TIC_TAC_TOE])
def test_it_keeps_to_the_contract(params: dict[str, Any]) -> None:
    check_environment(TextArena, params=params)
    check_environment(TextArena, params=params, act=lambda observation: say("[4]"))


def guess(seed: int, between: Any = lambda: None) -> list[str]:
    """Search by halves; what was heard."""
    world = TextArena({"games": [GUESS]})
    heard = [world.reset(Task(task_id=f"{GUESS}:{seed}")).observation]
    low, high = 1, 20
    while not (world.evaluate().success or len(heard) > 9):
        between()
        middle = (low + high) // 2
        heard.append(world.step(say(f"[{middle}]")).observation)
        low, high = (middle + 1, high) if "higher" in heard[-1] else (low, middle - 1)
    assert world.evaluate().score == 1
    return heard


def test_a_game_for_one_is_won() -> None:
    heard = guess(3)
    assert "between 1 and 20" in heard[0]
    assert not any("between 1 and 20" in text for text in heard[1:])  # only what is new
    assert len({tuple(guess(seed)) for seed in range(8)}) > 1


def test_chance_is_the_instances_own() -> None:
    random.seed(1)
    before = random.getstate()
    alone = guess(3)
    assert random.getstate() == before
    assert guess(3, between=lambda: random.seed(7)) == alone


def test_two_players_hear_what_the_other_did_and_one_seat_is_scored() -> None:
    world = TextArena(TIC_TAC_TOE)
    first = world.reset(Task(task_id="TicTacToe-v0:3"))
    assert first.info["player"] == 0
    other = world.step(say("[4]"))
    assert other.info["player"] == 1
    assert "You are Player 1" in other.observation
    assert "[Player 0] [4]" in other.observation
    back = world.step(say("[0]"))
    assert back.info["player"] == 0
    assert "[Player 1] [0]" in back.observation
    assert "[Player 0] [4]" not in back.observation  # one's own words are in the conversation already
    assert world.evaluate().score == 0
    for square in ("[1]", "[2]", "[7]"):
        last = world.step(say(square))
    assert (last.terminated, last.reward) == (True, 1.0)
    evaluation = world.evaluate()
    assert (evaluation.score, evaluation.success) == (1.0, True)
    assert evaluation.details["rewards"] == {"0": 1.0, "1": -1.0}
    assert world.step(say("[8]")).observation == "It is over."


def test_the_loser_does_not_succeed() -> None:
    world = TextArena({**TIC_TAC_TOE, "seat": 1})
    world.reset(Task(task_id="TicTacToe-v0:3"))
    for square in ("[4]", "[0]", "[1]", "[2]", "[7]"):
        world.step(say(square))
    assert (world.evaluate().score, world.evaluate().success) == (-1.0, False)


def test_a_part_of_the_reward_is_no_success() -> None:
    world = TextArena({"games": [GUESS]})
    world.reset(Task(task_id=f"{GUESS}:3"))
    while not (result := world.step(say("[20]"))).is_over:
        pass
    assert 0 < result.reward < 1
    assert world.evaluate().success is False


@settings(max_examples=25)
@given(texts=st.lists(st.text(max_size=30) | st.sampled_from(["[4]", "[A B]", "[99999]"]), max_size=15))
@pytest.mark.parametrize("game", [GUESS, "TowerOfHanoi-v0", "Minesweeper-v0"])
def test_any_text_is_a_move(game: str, texts: list[str]) -> None:
    world = TextArena({"games": [game], "max_steps": 12})
    world.reset(Task(task_id=f"{game}:1"))
    results = [world.step(say(text)) for text in texts]
    assert all(result.is_over for result in results[12:])
    assert world.evaluate().is_success == (world.evaluate().score >= 1)


@table(
    ("params", "complaint"),
    [
        ({"games": []}, "must name TextArena games"),
        ({"games": ["Chess"]}, "must name TextArena games"),
        ({"games": [3]}, "must name TextArena games"),
        ({"seat": 1}, "'seat' is 1; it must be from 0 to 0"),
        ({"max_steps": 0}, "must be greater than or equal to 1"),
    ],
)
def test_wrong_parameters_are_refused(params: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        TextArena(params)


def test_wrong_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown TextArena game"):
        TextArena().reset(Task(task_id="Chess:1"))
    with pytest.raises(ValueError, match="with 3 players"):
        TextArena({"players": 3}).reset(Task(task_id="TicTacToe-v0:1"))
    with pytest.raises(RuntimeError, match="step before reset"):
        TextArena().step(say("x"))


def test_it_describes_itself_and_warms_up() -> None:
    assert GUESS in TextArena().describe()["games"]
    warm()
