"""Answers with a structure, in the ways that frameworks have to ask for them; the sampling is never constrained."""

from __future__ import annotations

from typing import Any

import pytest

from .test_over_http import told

NOT_THERE = {
    # what a workflow gets to see when the model does not comply
    "openai_chat": ("answer", "The reply was: It is 42."),
    "openai_responses": ("answer", "The reply was: It is 42."),
    "anthropic": ("answer", "refused: refusal"),
    "openai_agents_chat": ("raised", "ModelRefusalError"),
    "openai_agents_responses": ("raised", "ModelRefusalError"),
    "langchain": ("answer", None),
    "langchain_provider": ("raised", "StructuredOutputValidationError"),
    "pydantic_ai": ("raised", "UnexpectedModelBehavior"),
    "pydantic_ai_native": ("raised", "ContentFilterError"),
}
OWN_TOOL = {"langchain": "Number", "pydantic_ai": "final_result"}
"""Those that make a tool of the structure themselves, where nothing else is asked for."""

pytestmark = pytest.mark.needs("frameworks")
each_way = pytest.mark.parametrize("way", NOT_THERE)


def tell(way: str, name: str) -> Any:
    story = told("frameworks", "structured_over_http")[way][name]
    assert story["stop_reason"] == "completed", story["error"]
    return story


@each_way
def test_a_model_that_calls_the_tool_of_the_structure(way):
    story = tell(way, "by_call")
    assert story["output"] == {"answer": 42}
    assert story["turns"][0]["tools"][-1] == OWN_TOOL.get(way, "generate_structured_output")


@each_way
def test_a_model_that_writes_the_structure_as_text(way):
    """LangChain waits for the call of its own tool."""
    assert tell(way, "by_text")["output"] == {"answer": None if way == "langchain" else 42}


@each_way
def test_a_model_that_does_not_comply(way):
    story = tell(way, "not")
    kind, says = NOT_THERE[way]
    found = story["output"][kind]
    assert found == says if kind == "raised" or says is None else says in found
    asked_again = way == "pydantic_ai"
    assert len(story["turns"]) == (1 if way in ("openai_chat", "openai_responses", "anthropic") else 2) + asked_again


@each_way
@pytest.mark.parametrize("name", ["by_call", "by_text", "not"])
def test_every_turn_continues(way, name):
    """The structure is asked for from the first turn on, so the tools never change."""
    story = tell(way, name)
    n = len(story["turns"])
    assert (story["continues"], story["reasons"]) == ([None, *range(n - 1)], [""] * n)
