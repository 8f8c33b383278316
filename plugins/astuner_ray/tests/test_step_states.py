"""Which of an engine's saved states a run may go on from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from astuner_ray import step_states
from tests.table import table


def state_of(folder: Path, step: int) -> Path:
    """As an engine leaves it."""
    state = folder / f"global_step_{step}"
    (state / "actor").mkdir(parents=True)
    (state / "actor" / "model_world_size_1_rank_0.pt").write_bytes(bytes(1 << 21))
    return state


def flip_a_bit(state: Path) -> None:
    with (state / "actor" / "model_world_size_1_rank_0.pt").open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"\x01")


def change_the_books(state: Path) -> None:
    (state / "astuner.json").write_text(json.dumps({"state": {"position": 2}}) + "\n")


def lose_the_weights(state: Path) -> None:
    (state / "actor" / "model_world_size_1_rank_0.pt").unlink()


@table(
    ("damage", "says"),
    [
        (flip_a_bit, "rank_0.pt was changed or damaged"),
        (change_the_books, "astuner.json was changed or damaged"),
        (lose_the_weights, "rank_0.pt is missing"),
    ],
)
def test_what_is_damaged_is_said_and_an_older_one_is_there(
    tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    states = []
    for step in (2, 10):
        state = state_of(tmp_path / "engine", step)
        step_states.complete(state, {"state": {"position": 1}})
        states.append(state.rename(tmp_path / state.name))  # the next one would remove it
    assert list(step_states.saved(tmp_path)) == [(states[1], ""), (states[0], "")]
    damage(states[1])
    (newest, why), (older, nothing) = step_states.saved(tmp_path)
    assert (newest, older, nothing) == (states[1], states[0], "")
    assert says in why


def test_what_a_killed_run_was_writing_is_no_state(tmp_path: Path) -> None:
    state_of(tmp_path, 3)
    assert list(step_states.saved(tmp_path)) == []


def test_a_state_without_checksums_is_used(tmp_path: Path) -> None:
    """Of before there were any, or of an engine that goes on writing."""
    state = state_of(tmp_path, 3)
    step_states.complete(state, {"state": {}})
    step_states.complete(state, {"state": {}}, written=False)
    flip_a_bit(state)
    assert list(step_states.saved(tmp_path)) == [(state, "")]
