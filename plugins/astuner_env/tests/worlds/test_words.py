"""What the worlds share: task ids, splits and parameters, and reading what a model said."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner_env.worlds.procedural import (
    BAND,
    LISTED,
    SPLITS,
    Params,
    calls_of,
    list_tasks,
    parse_task_id,
    split_of,
    text_of,
)
from tests.table import table

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=12,
)
MESSAGES = st.fixed_dictionaries({}, optional={"content": JSON, "tool_calls": JSON})


@table("split", SPLITS)
def test_the_tasks_of_a_split_are_its_own_and_can_be_read_back(split: str) -> None:
    ids = [task.task_id for task in list_tasks(["a", "b.c-1"], split, 0)]
    assert len(set(ids)) == len(ids) == LISTED[split]
    assert {parse_task_id(task_id)[0] for task_id in ids} == {"a", "b.c-1"}
    assert {split_of(parse_task_id(task_id)[1]) for task_id in ids} == {split}


def test_a_split_lists_no_more_than_its_seeds() -> None:
    assert next(iter(list_tasks(["a"], "test", BAND))).task_id == f"a:{2 * BAND}"
    with pytest.raises(ValueError, match="'tasks' is 1000001; it must be less than or equal to 1000000"):
        Params.of({"tasks": BAND + 1})


@table(
    "task_id", ["", "a", "a:", ":1", "a:-1", "a:1.0", "a:01", "a:3000000", "a:99999999999", "../a:1", "a b:1", "a:1\n"]
)
def test_what_is_no_task_id_is_refused(task_id: str) -> None:
    with pytest.raises(ValueError, match="unknown task"):
        parse_task_id(task_id)


def test_an_unknown_split_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="unknown split 'dev'; known splits: train, validation, test"):
        list_tasks(["a"], "dev", 0)


class Sized(Params):
    size: int = 3
    """how large"""
    share: float = 0.5


@table(
    ("given_params", "complaint"),
    [
        ({"sise": 4}, "'sise'; known parameters: share, size, tasks"),
        ({"size": "4"}, "'size' is '4'; it must be a valid integer .how large."),
        ({"size": True}, "'size' is True"),
        ({"share": "x"}, "'share' is 'x'"),
    ],
)
def test_a_wrong_parameter_is_refused(given_params: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Sized.of(given_params)


def test_parameters_get_their_defaults() -> None:
    assert Sized.of({"share": 1}).model_dump() == {"tasks": 0, "size": 3, "share": 1}


@pytest.mark.slow
@given(MESSAGES)
def test_any_message_can_be_read(message: dict[str, object]) -> None:
    assert isinstance(text_of(message), str)
    for name, arguments in calls_of(message):
        assert isinstance(name, str)
        assert isinstance(arguments, dict)


@table(
    ("call", "read"),
    [
        ({"function": {"name": "move", "arguments": '{"direction": "up"}'}}, ("move", {"direction": "up"})),
        ({"function": {"name": "move", "arguments": {"direction": "up"}}}, ("move", {"direction": "up"})),
        ({"name": "move", "arguments": '{"direction"'}, ("move", {})),
        ({"function": {"name": "move", "arguments": "[" * 100_000}}, ("move", {})),
        ({"function": {"name": "move", "arguments": '["up"]'}}, ("move", {})),
        ({"function": None}, ("", {})),
        ("move", ("", {})),
    ],
)
def test_tool_calls_in_every_shape(call: object, read: tuple[str, dict[str, str]]) -> None:
    assert calls_of({"tool_calls": [call]}) == [read]


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, "b", {"type": "text", "text": 3}]
    assert text_of({"content": parts}) == "a"
    assert text_of({"content": [*parts, {"type": "text", "text": "c"}]}) == "a\nc"


def test_listing_is_lazy() -> None:
    assert len(list(islice(list_tasks(["a"], "train", BAND), 3))) == 3
