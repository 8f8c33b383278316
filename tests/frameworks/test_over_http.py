"""The agents of ``examples/frameworks``, each over HTTP with its framework's own client, streaming and not.

What is found here is what `docs/frameworks.md` says; `test_frameworks_page.py` compares them.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .harness import ROOT, run_program

EXAMPLES = ROOT / "examples" / "frameworks"
IMPORTABLE = os.pathsep.join(map(str, (Path(__file__).parent, EXAMPLES, ROOT / "plugins" / "astuner_math")))

AGENTS = {
    # as the page calls it: environment, file, class, and how its model speaks (see programs/over_http.py)
    "openai 2, chat completions": ("here", "with_openai", "ChatCompletionsAgent", "text"),
    "openai 3, chat completions": ("frameworks", "with_openai", "ChatCompletionsAgent", "text"),
    "openai 3, responses": ("frameworks", "with_openai", "ResponsesAgent", "text"),
    "anthropic": ("frameworks", "with_anthropic", "AnthropicAgent", "text"),
    "openai-agents, chat completions": ("frameworks", "with_openai_agents", "OpenAIAgentsChat", "text"),
    "openai-agents, responses": ("frameworks", "with_openai_agents", "OpenAIAgentsResponses", "text"),
    "LangChain": ("frameworks", "with_langchain", "LangChainAgent", "text"),
    "pydantic-ai": ("frameworks", "with_pydantic_ai", "PydanticAgent", "text"),
    "smolagents, tool calls": ("frameworks", "with_smolagents", "SmolToolCallingAgent", "final_answer"),
    "smolagents, code": ("frameworks", "with_smolagents", "SmolCodeAgent", "code"),
    "AgentScope 1.0.7 over HTTP": ("agentscope-1.0.7", "with_agentscope_http", "AgentScope107OverHttp", "text"),
    "AgentScope 1.0.21 over HTTP": ("agentscope-1.0.21", "with_agentscope_http", "AgentScopeOverHttp", "text"),
    "AgentScope 2.x over HTTP": ("frameworks", "with_agentscope2_http", "AgentScope2OverHttp", "text"),
    "curl": ("here", "with_curl", "CurlAgent", "text"),
}
REWRITE = ("smolagents, tool calls", "smolagents, code")
"""Those that write each reply of the model anew in their own words."""
CODE = "smolagents, code"


def needs(agent: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return the mark of a test that needs the agent's environment."""
    environment = AGENTS[agent][0]
    return () if environment == "here" else (pytest.mark.needs(environment),)


every_agent = pytest.mark.parametrize("agent", [pytest.param(agent, marks=needs(agent)) for agent in AGENTS])
streaming_and_not = pytest.mark.parametrize("suffix", ["", "_streaming"], ids=["whole", "streaming"])


@functools.cache
def ran(*program: str, **variables: str) -> Any:
    """What a program printed, or its failure, so that one that hangs does so once and not in every test."""
    try:
        return run_program(*program, **variables)
    except (AssertionError, subprocess.TimeoutExpired) as e:
        return e


def told(*program: str, **variables: str) -> Any:
    result = ran(*program, PYTHONPATH=IMPORTABLE, **variables)
    if isinstance(result, Exception):
        raise result
    return result


def tell(agent: str, name: str) -> Any:
    """What became of one of the program's scenes."""
    environment, file, cls, style = AGENTS[agent]
    return told(environment, "over_http", str(EXAMPLES / f"{file}.py"), cls, style)[name]


def observations(story: Any) -> list[str]:
    """What the tools said, in the prompts."""
    new = [message for turn in story["turns"][1:] for message in turn["new"]]
    tools = [message["content"] for message in new if message["role"] == "tool"]
    return tools or [message["content"] for message in new if message["content"].startswith("Observation:")]


# ---- an episode ------------------------------------------------------------------------------------------------------


@every_agent
@streaming_and_not
@pytest.mark.parametrize(
    ("name", "turns"), [("loop", 5), ("parallel", 3), ("thinking", 3)], ids=["loop", "parallel", "thinking"]
)
def test_an_episode_completes_and_every_token_is_trained_once(agent, suffix, name, turns):
    story = tell(agent, name + suffix)
    assert (story["stop_reason"], story["error"]) == ("completed", "")
    assert story["output"] == {"final_answer": "It is \\boxed{42}."}
    assert len(story["turns"]) == turns
    assert story["statuses"] == [200] * turns  # one request per turn: nothing was refused, nothing asked for twice
    assert story["generated"] == story["trained"] == sum(turn["completion_tokens"] for turn in story["turns"]) > 0


@every_agent
@streaming_and_not
def test_the_tool_runs_on_what_the_model_wrote(agent, suffix):
    """Compact JSON, odd spaces, escapes and symbols, all as the model meant them."""
    seen = observations(tell(agent, "loop" + suffix))
    if agent in REWRITE:  # each prompt holds all of them
        seen = [re.search(r"\d+", text)[0] for text in seen[-4:]]
    assert seen == ["42", "6", "25", "16"]


@every_agent
@streaming_and_not
def test_calls_at_once_run_all(agent, suffix):
    seen = observations(tell(agent, "parallel" + suffix))
    if agent == CODE:  # its stop string ends the reply behind the first piece of code
        assert all("42" in text and "6\n" not in text for text in seen)
    else:
        assert sorted("\n".join(seen).removeprefix("Observation:\n").split("\n")[:2]) == ["42", "6"]


# ---- exact tokens ----------------------------------------------------------------------------------------------------


@every_agent
@streaming_and_not
@pytest.mark.parametrize("name", ["loop", "parallel", "thinking"])
def test_which_turns_continue_exactly(agent, suffix, name):
    story = tell(agent, name + suffix)
    n = len(story["turns"])
    if agent in REWRITE:
        assert (story["continues"], story["reasons"]) == ([None] * n, ["", *["history_rewritten"] * (n - 1)])
        assert story["samples"] == n
    else:
        assert (story["continues"], story["reasons"]) == ([None, *range(n - 1)], [""] * n)
        assert story["samples"] == 1


@every_agent
@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
def test_real_chat_templates_change_nothing_about_it(agent, name):
    """Qwen3's drops reasoning from the history; Qwen3.5's calls are XML."""
    story, chatml = tell(agent, name), tell(agent, "parallel")
    assert story["output"] == {"final_answer": "It is \\boxed{42}."}
    assert (story["continues"], story["reasons"]) == (chatml["continues"], chatml["reasons"])
    assert story["generated"] == story["trained"]


@every_agent
def test_a_reasoning_model_is_heard(agent):
    """The thought is in the turn, and not in what the framework takes for the answer."""
    thoughts = [turn["message"].get("reasoning_content") for turn in tell(agent, "thinking")["turns"]]
    assert [thought and thought.strip() for thought in thoughts] == ["Hm.", None, "So."]


# ---- what models do wrong --------------------------------------------------------------------------------------------

RAISES = {
    ("openai-agents, chat completions", "unknown_tool"): "ModelBehaviorError: Tool fly not found",
    ("openai-agents, responses", "unknown_tool"): "ModelBehaviorError: Tool fly not found",
    ("openai-agents, responses", "cut_off"): "ModelBehaviorError: Responses stream ended",
}


@every_agent
@pytest.mark.parametrize("name", ["unknown_tool", "wrong_arguments", "unreadable_call", "cut_off"])
def test_a_mistake_of_the_model_ends_no_episode(agent, name):
    """With the exceptions named above, which a workflow has to catch."""
    story = tell(agent, name)
    if (agent, name) in RAISES:
        assert story["stop_reason"] == "workflow_failed"
        assert RAISES[agent, name] in story["error"]
        assert story["generated"] == 0  # nothing of it is trained
    else:
        assert story["stop_reason"] == ("truncated" if name == "cut_off" else "completed"), story["error"]
        assert story["generated"] == story["trained"] > 0


@every_agent
def test_who_is_told_of_a_mistake(agent):
    for name in ("unknown_tool", "wrong_arguments"):
        if (agent, name) not in RAISES:
            assert len(tell(agent, name)["turns"]) == 2, name
    unreadable = tell(agent, "unreadable_call")
    if agent in REWRITE:
        assert len(unreadable["turns"]) == 2
    else:  # they see no call, so it is the answer
        assert len(unreadable["turns"]) == 1
        assert unreadable["output"]["final_answer"].startswith("<tool_call>")


@pytest.mark.needs("frameworks")
def test_smolagents_forgets_a_call_that_it_could_not_run():
    assert tell("smolagents, tool calls", "unknown_tool")["reasons"] == ["", "new_conversation"]
    assert tell(CODE, "unknown_tool")["reasons"] == ["", "history_rewritten"]


# ---- what ends an episode --------------------------------------------------------------------------------------------


@every_agent
@pytest.mark.parametrize(
    ("name", "stop_reason", "says", "statuses"),
    [
        ("out_of_turns", "truncated", "has used its 2 model calls", [200, 200, 403]),
        ("out_of_turns_streaming", "truncated", "has used its 2 model calls", [200, 200, 403]),
        ("check", "check_aborted", "nonsense: 'ha' repeated 400 times", [200, 403]),
        ("context", "context_overflow", "tokens, but the context is", [200, 400]),
        ("model_fails", "model_failed", "the GPU is on fire", [200, 502]),
        ("wrong_key", "workflow_failed", "does not belong to a running episode", [401]),
    ],
    ids=["turns", "turns, streaming", "check", "context", "engine", "key"],
)
def test_the_framework_stops_at_the_first_refusal(agent, name, stop_reason, says, statuses):
    """No retries: the last of the statuses is that of the only request that was refused."""
    story = tell(agent, name)
    assert (story["stop_reason"], story["statuses"]) == (stop_reason, statuses), story["error"]
    assert says in story["error"]
    assert "sk-astuner" not in story["error"]


@every_agent
def test_an_episode_that_takes_too_long_leaves_nothing_running(agent):
    story = tell(agent, "timed_out")
    assert story["stop_reason"] == "timed_out"
    assert len(story["turns"]) == 1
    assert story["statuses"] in ([200], [200, 403])  # its client is cancelled with it, or else told
