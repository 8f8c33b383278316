"""Real AgentScope agents, 1.0.7, 1.0.21 and 2.x: which turns continue exactly, and by what name the others go.

Each version runs in an environment of its own, in programs of ``programs/``; what they print is looked at here.
`harness.play` has already checked that every continuing turn begins with exactly the tokens before it.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from .harness import run_program

OLDEST, NEWEST_1, NEWEST_2 = "agentscope-1.0.7", "agentscope-1.0.21", "here"


def on(environment: str, *values: Any) -> Any:
    """Return the parameters of a test that needs an environment of 1.x."""
    return pytest.param(environment, *values, marks=pytest.mark.needs(environment))


ONE = [on(OLDEST, "agentscope_1x"), on(NEWEST_1, "agentscope_1x")]
ALL = [*ONE, pytest.param(NEWEST_2, "agentscope_2x")]

each_version = pytest.mark.parametrize(("environment", "program"), ALL)
each_version_of_1 = pytest.mark.parametrize(("environment", "program"), ONE)
seeds_on = pytest.mark.parametrize("environment", [on(OLDEST), on(NEWEST_1)])

stories = functools.cache(run_program)


def tell(environment: str, program: str, name: str) -> Any:
    story = stories(environment, program)[name]
    assert story["stop_reason"] == "completed", story["error"]
    return story


def continues_all(story: Any) -> bool:
    n = len(story["turns"])
    return (story["continues"], story["reasons"]) == ([None, *range(n - 1)], [""] * n)


@pytest.mark.parametrize(
    ("environment", "program", "version"),
    [
        on(OLDEST, "agentscope_1x", "1.0.7"),
        on(NEWEST_1, "agentscope_1x", "1.0.21"),
        (NEWEST_2, "agentscope_2x", "2.0."),
    ],
)
def test_the_environments_hold_the_versions_that_they_are_there_for(environment, program, version):
    assert stories(environment, program)["version"].startswith(version)


@each_version
@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("tool_loop", 6),  # compact JSON, odd spaces, escapes, unknown tools
        ("parallel_calls", 3),
        ("streaming", None),
        ("chat_model", 2),
        ("further_questions", 3),
        ("further_questions_with_tools", 3),
        ("thinking", 3),  # which every formatter drops from the history
    ],
)
def test_every_turn_continues_the_one_before(environment, program, name, turns):
    story = tell(environment, program, name)
    assert continues_all(story), (story["continues"], story["reasons"])
    assert turns in (None, len(story["turns"]))


@each_version_of_1
def test_every_turn_continues_with_the_openai_formatter(environment, program):
    assert continues_all(tell(environment, program, "openai_formatter"))


def test_every_turn_continues_with_another_formatter_of_2x():
    assert continues_all(tell(NEWEST_2, "agentscope_2x", "dashscope_formatter"))


@each_version
def test_what_the_model_said_is_what_the_agent_returns(environment, program):
    answers = tell(environment, program, "further_questions")["output"]["answers"]
    assert answers == ["  four \n", "four again", "yes"]


@each_version
def test_tools_get_the_arguments_and_the_model_their_results(environment, program):
    new = tell(environment, program, "tool_loop")["turns"][1]["new"]
    assert [(message["role"], message["content"]) for message in new] == [("tool", "42")]
    results = tell(environment, program, "parallel_calls")["turns"][1]["new"]
    assert [message["content"] for message in results] == ["42", "6"]
    assert len({message["tool_call_id"] for message in results}) == 2


def test_2x_keeps_the_models_own_spelling_of_arguments():
    calls = tell(NEWEST_2, "agentscope_2x", "tool_loop")["output"]["calls"]
    assert calls[1:4] == ['{ "b": 2, "a":\t3 }', '{"a": 1, "b": "\\u4f60"}', '{"a": 1, "b": "你 café"}']


@each_version
def test_agents_that_speak_at_once_are_told_apart(environment, program):
    story = tell(environment, program, "two_agents")
    turns = {
        turn["index"]: (turn["agent"], before) for turn, before in zip(story["turns"], story["continues"], strict=True)
    }
    assert sorted(agent for agent, _ in turns.values()) == ["villager 1", "villager 1", "wolf 1", "wolf 1"]
    assert {(turn["agent"], turn["role"]) for turn in story["turns"]} == {
        ("wolf 1", "wolf"),
        ("villager 1", "villager"),
    }
    continued = [(agent, turns[before][0]) for agent, before in turns.values() if before is not None]
    assert sorted(continued) == [("villager 1", "villager 1"), ("wolf 1", "wolf 1")]
    assert set(story["reasons"]) == {""}


@each_version
def test_a_prompt_that_is_too_long_passes_through_the_agent(environment, program):
    story = stories(environment, program)["prompt_too_long"]
    assert (story["stop_reason"], story["turns"]) == ("prompt_too_long", [])


@each_version
def test_an_agent_that_makes_a_polite_answer_of_its_cancellation_is_late_all_the_same(environment, program):
    story = stories(environment, program)["timed_out"]
    assert story["stop_reason"] == "timed_out"
    assert "episode_timeout = 0.5 s" in story["error"]


# ---- what does not continue, by name ---------------------------------------------------------------------------------


@each_version
def test_out_of_rounds(environment, program):
    """1.x asks for a summary without its tools, which are part of the prompt; 2.x keeps them."""
    story = tell(environment, program, "out_of_rounds")
    if environment == NEWEST_2:
        assert continues_all(story)
    else:
        assert (story["continues"], story["reasons"]) == ([None, None], ["", "tools_changed"])
    assert story["output"]["answers"] == ["It is 42."]


@each_version
def test_a_structured_reply(environment, program):
    """The tool that takes the structure goes away again; in 1.0.7 it is there all the time."""
    story = tell(environment, program, "structured_reply")
    if environment == OLDEST:
        assert continues_all(story)
    else:
        last = len(story["turns"]) - 1
        assert story["continues"] == [None, *range(last - 1), None]
        assert story["reasons"] == [*[""] * last, "tools_changed"]
    result = story["output"]["results"][0]
    assert result == ({"result": 42} if environment == NEWEST_2 else 42)
    assert story["output"]["answers"][-1] == "You are welcome."


@each_version
def test_a_structured_call_is_offered_one_tool_and_never_forced(environment, program):
    story = tell(environment, program, "structured_call")
    assert story["turns"][0]["tools"] == ["generate_structured_output"]
    answers = story["output"]["answers"]
    if environment == NEWEST_2:  # each call is one attempt, streamed or not
        assert answers == [{"result": 42}, "StructuredOutputError"] * 2
        assert len(story["turns"]) == 4
    else:
        assert answers == [{"result": 42}, None, None]
    assert set(story["reasons"][1:]) == {"repeated_request"}


@each_version
def test_several_speakers(environment, program):
    """1.0.8 and later move what the agent said into a message of the user, so that turn is not continued."""
    story = tell(environment, program, "several_speakers")
    if environment == NEWEST_1:
        assert (story["continues"], story["reasons"]) == ([None, 0, 0, 2], [""] * 4)
    else:
        assert continues_all(story)


def test_a_compressed_context_of_2x_is_a_new_conversation():
    story = tell(NEWEST_2, "agentscope_2x", "compressed")
    assert story["reasons"] == ["", "tools_changed", "new_conversation"]
    assert "# Task Overview\nt" in story["output"]["summary"]


def test_the_clock_that_2x_shows_stays_in_the_history():
    story = tell(NEWEST_2, "agentscope_2x", "runtime_state")
    assert continues_all(story)
    assert "<current-time>" in str(story["turns"][0]["new"])


# ---- the models themselves -------------------------------------------------------------------------------------------


def test_a_streamed_answer_of_2x_reaches_the_screen():
    events = tell(NEWEST_2, "agentscope_2x", "events")["output"]["events"]
    assert events.count("TextBlockDeltaEvent") == 2
    assert events.count("ToolCallDeltaEvent") == 1
    assert continues_all(tell(NEWEST_2, "agentscope_2x", "events"))


def test_an_answer_of_2x_names_its_turn_and_says_what_it_cost():
    story = tell(NEWEST_2, "agentscope_2x", "responses")
    told, first = story["output"], story["turns"][0]
    assert told["ids"] == ["episode:0", "episode:1"]
    assert told["usage"] == [first["prompt_tokens"], first["completion_tokens"]]
    assert told["kinds"] == ["text", "tool_call"]  # tool_choice="none" reads no calls
    assert (told["context_size"], told["media"]) == (1 << 40, [])
    assert told["counted"] > 0


def test_what_2x_cannot_have_is_refused_by_name():
    unknown_tool, unknown_keyword = tell(NEWEST_2, "agentscope_2x", "responses")["output"]["refused"]
    assert "fly" in unknown_tool
    assert "presence_penalty (only max_tokens, seed, stop, temperature, top_p)" in unknown_keyword


# ---- the first documents' own code -----------------------------------------------------------------------------------


@seeds_on
@pytest.mark.parametrize(("name", "turns"), [("quick_start", 2), ("quick_start_long", 6)])
def test_the_quick_starts_agent_continues_exactly(environment, name, turns):
    story = tell(environment, "seeds", name)
    assert continues_all(story)
    assert len(story["turns"]) == turns
    assert "boxed{72}" in story["output"]["final_answer"]
    assert "<returncode>0</returncode>" in story["turns"][1]["new"][0]["content"]


@seeds_on
def test_the_quick_starts_agent_out_of_rounds(environment):
    """Two rounds of tools, and then a summary, for which AgentScope takes the tools away."""
    story = tell(environment, "seeds", "quick_start_out_of_rounds")
    assert (story["continues"], story["reasons"]) == ([None, 0, None], ["", "", "tools_changed"])


@seeds_on
@pytest.mark.parametrize("name", ["appworld", "appworld_thinking"])
def test_appworlds_loop_acts_with_what_the_agent_said(environment, name):
    story = tell(environment, "seeds", name)
    assert continues_all(story)
    said = ["  open mail \n" if name == "appworld" else "open mail", "read it", "done"]
    assert [action["content"] for action in story["output"]["seen"]] == said
    assert story["turns"][1]["new"][-1]["content"].endswith("observation 1")
