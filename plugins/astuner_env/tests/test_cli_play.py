"""`astuner.env.play`: what becomes of the lines that a person or a pipe gives."""

import io
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.contracts.errors import ConfigError
from astuner.contracts.types import Task
from astuner_env.play import Lines, Screen, json_line, play, read

from ._cli_kit import WORLD


@pytest.fixture(scope="module")
def corridor():
    names = {}
    exec(compile(WORLD, "world.py", "exec"), names)
    return names["Corridor"]


@pytest.fixture
def typed(monkeypatch):
    """Standard input with this text."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.fixture
def played(corridor, typed):
    """Play a corridor of 2; gives how it ended and all events."""

    def run(text, *, strict=True, task="length-2", **params):
        typed(text)
        events = []
        world = corridor(params)
        ending = play(world, Task(task_id=task), Lines(), lambda event, **d: events.append((event, d)), strict=strict)
        return ending, events

    return run


def contents(events):
    return [data["action"]["content"] for event, data in events if event == "step"]


def test_lines_are_actions_until_the_world_is_over(played):
    ending, events = played("left\nright\n\nright\nright\nnever read\n")
    assert ending == "terminated"
    assert [event for event, _ in events] == ["start", *["step"] * 4, "end"]
    start, end = events[0][1], events[-1][1]
    assert (start["task_id"], start["observation"]) == ("length-2", "You are at 0 of 2.")
    assert [m["role"] for m in start["messages"]] == ["system", "user"]
    assert contents(events) == ["left", "right", "right", "right"], "an empty line says nothing"
    assert events[-2][1]["terminated"]
    assert not events[-3][1]["terminated"]
    assert (end["reason"], end["steps"], end["reward"]) == ("terminated", 4, 1.0)
    assert end["evaluation"] == {"score": 1.0, "success": True, "details": {"at": 2}}


def test_the_end_of_the_input_ends_the_play_and_evaluates(played):
    ending, events = played("right")
    assert ending == "input ended"
    assert contents(events) == ["right"], "a last line without its end counts"
    assert events[-1][1]["evaluation"] == {"score": 0.5, "success": False, "details": {"at": 1}}
    assert played("")[0] == "input ended"
    assert played(":quit\nright\n")[0] == "quit"
    assert played("left\n" * 20)[0] == "truncated"


def test_a_block_is_one_message(played):
    text = (
        "```python\nif 1:\n\n    go('right')\n```\n:block\ntwo\nlines\n\n::note\n````\n```\n````\n```\nopen to the end"
    )
    _, events = played(text, task="length-9")
    assert contents(events) == [
        "```python\nif 1:\n\n    go('right')\n```",
        "two\nlines",
        ":note",
        "````\n```\n````",
        "```\nopen to the end",
    ]


def test_a_file_is_one_message(played, tmp_path):
    (tmp_path / "said.txt").write_text("right\nright\n")
    _, events = played(f":file {tmp_path / 'said.txt'}\n")
    assert contents(events) == ["right\nright\n"]
    with pytest.raises(ConfigError, match=r":file .*nothing\.txt: .*No such file"):
        played(f":file {tmp_path / 'nothing.txt'}\n")


def test_a_tool_is_called(played):
    ending, events = played(':call go {"to": "right"}\n:call go {"to": "right"}\n')
    assert ending == "terminated"
    (call,) = events[1][1]["action"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "go", "arguments": '{"to": "right"}'}
    with pytest.raises(ConfigError, match="JSON"):
        played(":call go right\n")
    with pytest.raises(ConfigError, match="a name and a JSON object"):
        played(":call\n")


def test_commands_are_answered_and_are_no_steps(played):
    _, events = played(":evaluate\n:describe\n:tools\n:help\nright\n", start=1)
    evaluation, description, tools, note = [data for _, data in events[1:5]]
    assert evaluation["score"] == 0.5
    assert description["data"]["rules"] == "Walk to the end."
    assert tools["data"] == {"tools": [{"type": "function", "function": {"name": "go"}}]}
    assert ":evaluate" in note["text"]
    assert events[-1][1]["steps"] == 1


def test_a_command_that_there_is_not_is_asked_again_or_refused(played):
    ending, events = played(":sing\nright\nright\n", strict=False)
    assert ending == "terminated"
    assert ":help" in next(data["text"] for event, data in events if event == "note")
    with pytest.raises(ConfigError, match=":sing"):
        played(":sing\nright\n")


def test_bytes_that_are_no_text_are_refused(played, monkeypatch, corridor):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"right\xff\n"), encoding="utf-8"))
    with pytest.raises(ConfigError, match="utf-8"):
        play(corridor(), Task(task_id="length-2"), Lines(), lambda *_, **__: None, strict=True)


LINE = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), min_size=1)


@given(LINE.filter(str.strip))
def test_whatever_is_written_can_be_said(text):
    line = f":{text}" if text.startswith(":") else text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(f"{line}\n", newline="\n"))
        action = read(Lines())
    assert action == {"role": "assistant", "content": text}


def test_events_are_shown_to_people_and_to_programs(played, capsys):
    for show in (Screen(echo=True), json_line):
        _, events = played(':evaluate\n:describe\nleft\nright\nright\n:call go {"to": "right"}\n')
        for event, data in events:
            show(event, **data)
    shown, lines = capsys.readouterr().out.split('{"event"', 1)
    assert shown.startswith("task length-2\n\n[system] Say right or left.\nYou are at 0 of 2.\nscore 0, no success")
    assert '"rules": "Walk to the end."' in shown
    assert "\n> left\nYou are at -1 of 2.\n" in shown
    assert '\n> go({"to": "right"})\nYou are at 2 of 2.\n(reward 1)\n' in shown
    assert shown.rstrip().endswith('terminated after 4 steps, reward 1; score 1, success  {"at": 2}')
    read_back = [json.loads(line) for line in ('{"event"' + lines).splitlines()]
    assert [event["event"] for event in read_back] == [event for event, _ in events]
    assert read_back[-1]["evaluation"]["success"] is True
