"""The math agent: AgentScope's own ReActAgent, with a scripted model in place of the tuner."""

from __future__ import annotations

import asyncio
import warnings
from types import SimpleNamespace

import pytest

from astuner import Task, WorkflowTask
from astuner.contracts.errors import ContextOverflow, EnvironmentFailed
from astuner_math.workflow import (
    MathAgentConfig,
    MathAgentWorkflow,
    calculator,
    final_answer,
)
from astuner_sandbox import PythonSandbox, SandboxFailed
from astuner_sandbox.isolation.confine import available
from tests.table import table

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # AgentScope's dependencies warn while they are imported
    pytest.importorskip("agentscope")
    import agentscope.agent
    import agentscope.formatter
    import agentscope.memory
    import agentscope.tool  # noqa: F401
    from agentscope.message import Msg
    from agentscope.model import ChatResponse


class ScriptedModel:
    """Says what it was told to, and keeps what it was asked."""

    stream = False
    model_name = "scripted"

    def __init__(self, *replies) -> None:
        self.replies = list(replies)
        self.calls: list[tuple[list[dict], list[dict] | None]] = []

    async def __call__(self, messages, tools=None, tool_choice=None, **kwargs) -> ChatResponse:
        self.calls.append((messages, tools))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        blocks = [{"type": "text", "text": reply}] if isinstance(reply, str) else [reply]
        return ChatResponse(content=blocks)


def call(name: str, **arguments) -> dict:
    return {"type": "tool_use", "id": "call_1", "name": name, "input": arguments}


def run(model: ScriptedModel, **settings):
    task = WorkflowTask(task=Task(task_id="t", main_query="What is 6 * 7?"), episode_id="e", group_id="g")
    return asyncio.run(MathAgentWorkflow(MathAgentConfig(**settings)).execute(task, model))


def test_calculator_is_offered_called_and_answered():
    model = ScriptedModel(call("calculator", expression="6 * 7"), r"It is \boxed{42}.")
    output = run(model, tool="calculator")
    assert output.metadata == {"final_answer": r"It is \boxed{42}."}
    assert output.response == r"It is \boxed{42}."
    assert output.reward is None
    (first, tools), (second, _) = model.calls
    assert [tool["function"]["name"] for tool in tools] == ["calculator"]
    assert tools[0]["function"]["parameters"]["required"] == ["expression"]
    assert r"\boxed{}" in str(first[0]["content"])
    assert "What is 6 * 7?" in str(first[1]["content"])
    assert second[-1]["role"] == "tool"
    assert "42" in str(second[-1]["content"])


def test_python_is_the_quick_starts_tool():
    model = ScriptedModel(call("execute_python_code", code="print(6 * 7)"), r"\boxed{42}")
    assert run(model).metadata["final_answer"] == r"\boxed{42}"
    assert [tool["function"]["name"] for tool in model.calls[0][1]] == ["execute_python_code"]
    assert "<stdout>42\n</stdout>" in str(model.calls[1][0][-1]["content"]).replace("\\n", "\n")


def test_no_tool():
    model = ScriptedModel(r"\boxed{42}")
    assert run(model, tool="none").metadata["final_answer"] == r"\boxed{42}"
    assert not model.calls[0][1]


def test_a_tool_error_is_told_to_the_model():
    model = ScriptedModel(call("calculator", expression="6 / 0"), r"\boxed{0}")
    run(model, tool="calculator")
    assert "Error: division by zero" in str(model.calls[1][0][-1]["content"])


def test_max_iters_asks_for_an_answer_without_tools():
    model = ScriptedModel(call("calculator", expression="6 * 7"), r"\boxed{42}")
    assert run(model, tool="calculator", max_iters=1).metadata["final_answer"] == r"\boxed{42}"
    assert not model.calls[1][1]


def test_the_system_prompt_can_be_replaced():
    model = ScriptedModel(r"\boxed{42}")
    run(model, tool="none", system_prompt="Be brief.")
    assert "Be brief." in str(model.calls[0][0][0]["content"])


def test_what_ends_the_episode_is_let_through():
    with pytest.raises(ContextOverflow):
        run(ScriptedModel(ContextOverflow("full")), tool="none")


def test_cancelling_the_episode_cancels_the_agent():
    class Waits(ScriptedModel):
        async def __call__(self, *args, **kwargs):
            await asyncio.sleep(30)

    async def cancelled() -> None:
        task = WorkflowTask(task=Task(task_id="t", main_query="?"), episode_id="e", group_id="g")
        await asyncio.wait_for(MathAgentWorkflow().execute(task, Waits()), 0.05)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(cancelled())


@table(
    ("content", "text"),
    [
        (r"\boxed{\frac{1}{2}}", r"\boxed{\frac{1}{2}}"),
        ([{"type": "text", "text": r"\boxed{\frac{1}{2}}"}], r"\boxed{\frac{1}{2}}"),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "5"}], "5"),
        ([], ""),
    ],
)
def test_final_answer_of_every_shape_of_reply(content, text):
    assert final_answer(Msg("a", content, role="assistant")) == text


def test_final_answer_of_a_reply_without_text():
    assert final_answer(SimpleNamespace(get_text_content=lambda: None)) == ""


@table(("expression", "text"), [("2+3", "5"), ("2+", "Error: cannot read '2+' as arithmetic"), (7, "7")])
def test_calculator_tool_answers_in_text(expression, text):
    assert calculator(expression).content[0]["text"] == text


def test_the_models_code_runs_in_the_sandbox_without_a_warning_where_nothing_is_missing(caplog):
    peep = "import os, socket\nprint(sorted(os.environ))\nsocket.socket()"
    model = ScriptedModel(call("execute_python_code", code=peep), r"\boxed{42}")
    run(model)
    told = str(model.calls[1][0][-1]["content"])
    assert "PermissionError" in told
    assert "ASTUNER_HOME" not in told
    assert "PYTEST_CURRENT_TEST" not in told
    assert not available().missing or "container" in caplog.text
    assert available().missing or not caplog.records


def test_a_broken_sandbox_ends_the_episode_as_an_environment_failure(monkeypatch):
    """AgentScope would show the model an error, and the judge would score what it makes of that."""

    def broken(self, *_):
        raise SandboxFailed("no more processes")

    monkeypatch.setattr(PythonSandbox, "_run", broken)
    model = ScriptedModel(call("execute_python_code", code="print(6 * 7)"), r"\boxed{42}")
    with pytest.raises(EnvironmentFailed, match="no more processes"):
        run(model)
