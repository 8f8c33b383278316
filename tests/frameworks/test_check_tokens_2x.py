"""`astuner check tokens` names the cause and the cure where a turn of an AgentScope 2.x agent starts a branch."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.table import table

from .harness import run_program

reports = functools.cache(run_program)


def report(name: str) -> Any:
    return reports("here", "check_tokens_2x")[name]


def turns(name: str) -> list[Any]:
    (variant,) = report(name)["variants"]
    (episode,) = variant["episodes"]
    return list(episode["turns"])


@pytest.mark.parametrize("name", ["interruption", "parallel_tools", "retries", "hand_off"])
def test_every_turn_is_exact(name: str) -> None:
    assert report(name)["problems"] == {}
    assert report(name)["turns"]["exact"] > 0


BY_DESIGN = "by design: each summary starts a new training sample"


@table(
    ("name", "reason", "why", "cure"),
    [
        ("compression", "tools_changed", "a structured answer, such as a context summary", BY_DESIGN),
        ("compression_tool", "history_rewritten", "replaces the messages before it", BY_DESIGN),
        (
            "structured_and_plain",
            "tools_changed",
            "only while the agent requests a structured reply",
            "from another agent",
        ),
        ("one_model_for_two", "history_retold", "as another role's text", "as_agentscope_model('critic')"),
        ("hints", "messages_removed", "such as a one-time hint", "keep the message in the agent's memory"),
    ],
)
def test_a_branch_has_its_cause_and_its_cure(name: str, reason: str, why: str, cure: str) -> None:
    branches = [turn for turn in turns(name) if turn["what"] == reason and why in turn["why"]]
    assert branches, turns(name)
    assert cure in branches[0]["cure"]
    assert f"    fix: {branches[0]['cure']}" in report(name)["text"]


def test_a_turn_after_a_summary_says_so() -> None:
    after = turns("compression")[2]
    assert (after["what"], after["why"]) == ("start", "replaces earlier messages by the summary of turn 1")


def test_an_agent_that_waits_for_a_person_fails_the_check() -> None:
    assert report("never_confirmed")["problems"] == {"workflow_failed": 1}
    assert "waits for a person's permission to call the tool 'multiply'" in report("never_confirmed")["text"]
