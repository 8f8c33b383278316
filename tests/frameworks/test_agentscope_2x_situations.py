"""AgentScope 2.x beyond calling tools: middleware, permissions, MCP, compression, structured replies, interruption.

`harness.account` has already checked that every generated token is in exactly one training sample.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.table import table

from .harness import run_program

stories = functools.cache(run_program)


def story(name: str) -> Any:
    return stories("here", "agentscope_2x_situations")[name]


def completed(name: str) -> Any:
    found = story(name)
    assert (found["stop_reason"], found["error"]) == ("completed", "")
    return found


CONTINUES = {
    # situation -> turns; each continues the one before it
    "middleware_that_observes": 2,
    "middleware_that_edits_the_system_prompt": 2,
    "allowed": 2,
    "denied": 2,
    "confirmed": 2,
    "rejected": 2,
    "withdrawn": 2,
    "external": 2,
    "mcp": 3,
    "structured": 3,
    "structured_after_text": 2,
    "structured_in_grace": 3,
    "structured_never": 3,
    "concurrent_tools": 2,
    "sequential_tools": 2,
    "tool_that_raises": 2,
    "tool_retries": 5,
    "interrupted_tool": 2,
    "interrupted_model": 2,
    "streamed": 2,
    "long_history": 40,
    "out_of_iterations": 4,
    "call_after_the_last_iteration": 3,
}
BRANCHES = {
    # situation -> for each turn, the turn that it continues, and by what name it is a branch
    "middleware_that_adds_hints": ([None, None], ["", "messages_removed"]),
    "hand_off": ([None, 0, None, 1, None], [""] * 5),
    "one_model_for_two": ([None, 0, None, 1], ["", "", "new_conversation", ""]),
    "compressed_by_threshold": ([None, None, None, 2], ["", "tools_changed", "new_conversation", ""]),
    "compressed_by_tool": ([None, 0, None, None], ["", "", "tools_changed", "history_rewritten"]),
    "summary_that_cannot_be_read": (
        [None] * 4,
        ["", "tools_changed", "new_conversation", "new_conversation"],
    ),
    "only_a_thought": ([None, None], ["", "repeated_request"]),
    "empty_answer": ([None, 0, 0], [""] * 3),
}


@pytest.mark.parametrize("name", CONTINUES)
def test_every_turn_continues_the_one_before(name):
    found = completed(name)
    n = CONTINUES[name]
    assert (found["continues"], found["reasons"]) == ([None, *range(n - 1)], [""] * n)
    assert found["samples"] == 1


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_has_a_name(name):
    found = completed(name)
    assert (found["continues"], found["reasons"]) == BRANCHES[name]


@pytest.mark.parametrize("name", [*CONTINUES, *BRANCHES])
def test_every_token_is_trained_once_with_the_reward_of_its_episode(name):
    found = completed(name)
    assert found["generated"] == found["trained"] == sum(turn["completion_tokens"] for turn in found["turns"]) > 0
    assert found["advantages"] == [0.707] * found["samples"]
    assert found["of_failed"] == [-0.707] * found["samples"]


# ---- permissions -----------------------------------------------------------------------------------------------------


@table(
    ("name", "result"),
    [
        ("allowed", "42"),
        ("denied", "Multiplying is forbidden."),
        ("confirmed", "42"),
        ("rejected", "is denied by user"),
        ("external", "42"),
    ],
)
def test_the_model_reads_what_became_of_its_call(name: str, result: str) -> None:
    (message,) = completed(name)["turns"][1]["new"]
    assert message["role"] == "tool"
    assert result in message["content"]


@table(("name", "tool"), [("never_confirmed", "multiply"), ("mcp_never_confirmed", "mcp__numbers__multiply")])
def test_an_agent_that_waits_for_a_permission_fails_its_episode_with_the_cure(name: str, tool: str) -> None:
    found = story(name)
    assert found["stop_reason"] == "workflow_failed"
    assert f"waits for a person's permission to call the tool '{tool}'" in found["error"]
    assert "permission=PermissionDecision(behavior=PermissionBehavior.ALLOW" in found["error"]
    assert "PermissionMode.BYPASS" in found["error"]


def test_an_agent_that_waits_is_reported_even_if_its_words_are_not_the_answer() -> None:
    found = story("never_confirmed_and_unread")
    assert found["stop_reason"] == "completed"
    assert "waits for a person's permission to call the tool 'multiply'" in found["error"]


def test_an_agent_that_waits_for_an_external_tool_fails_its_episode() -> None:
    found = story("never_executed")
    assert found["stop_reason"] == "workflow_failed"
    assert "waits for the result of the external tool 'multiply'" in found["error"]


def test_the_call_of_an_external_tool_can_be_the_answer() -> None:
    assert completed("submitted")["output"] == {"final_answer": '{"a":6,"b":7}'}


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_middleware_changes_the_recorded_prompt() -> None:
    new = completed("middleware_that_edits_the_system_prompt")["turns"][0]["new"]
    assert new[0]["content"] == "Be brief. Think of Euclid."
    assert completed("middleware_that_observes")["output"]["seen"][1] == "call of multiply"


def test_an_mcp_tool_receives_nested_arguments() -> None:
    turns = completed("mcp")["turns"]
    assert turns[0]["tools"] == ["mcp__numbers__multiply", "mcp__numbers__add_lengths"]
    assert [turn["new"][-1]["content"] for turn in turns[1:]] == ["42", "1.5 mi, none"]


def test_agents_that_hand_messages_over_keep_their_own_conversations() -> None:
    turns = completed("hand_off")["turns"]
    assert [turn["agent"] for turn in turns] == ["solver", "solver", "critic", "solver", "clerk"]
    assert [message["content"] for message in turns[4]["new"]] == ["Take notes.", "42", "Really?", "What was said?"]


@table(
    ("name", "result", "reason"),
    [
        ("structured", {"result": 42}, "completed"),
        ("structured_after_text", {"result": 42}, "completed"),
        ("structured_in_grace", {"result": 42}, "completed"),
        ("structured_never", None, "exceed_max_iters"),
    ],
)
def test_a_structured_reply(name: str, result: Any, reason: str) -> None:
    output = completed(name)["output"]
    assert (output["result"], output["reasons"]) == (result, [reason])


@pytest.mark.parametrize("name", ["compressed_by_threshold", "compressed_by_tool"])
def test_a_summary_replaces_the_messages_before_it(name: str) -> None:
    turns = completed(name)["turns"]
    (summary,) = [turn for turn in turns if turn["tools"] == ["generate_structured_output"]]
    after = turns[turns.index(summary) + 1]["new"]
    assert "# Task Overview\nt" in after[1]["content"]
    assert "x" * 400 not in str(after)


def test_a_failing_tool_is_hinted_at_after_three_failures() -> None:
    new = completed("tool_retries")["turns"][3]["new"]
    assert "The last 3 calls to 'fail'" in new[-1]["content"]


def test_an_interrupted_call_is_closed_before_the_next_question() -> None:
    new = completed("interrupted_tool")["turns"][1]["new"]
    assert [message["role"] for message in new] == ["tool", "user"]
    assert "has been interrupted" in new[0]["content"]


@pytest.mark.parametrize("name", ["retried", "fallback"])
def test_a_model_that_fails_ends_the_attempt_although_the_agent_asks_again(name: str) -> None:
    """ASTuner repeats the attempt itself (`rollout.max_retries`), so that no half of one is trained."""
    found = story(name)
    assert (found["stop_reason"], found["error"]) == ("model_failed", "the GPU is busy")


def test_no_call_is_read_from_the_answer_after_the_last_iteration() -> None:
    answers = completed("call_after_the_last_iteration")["output"]["answers"]
    assert answers[0].startswith("<tool_call>")
