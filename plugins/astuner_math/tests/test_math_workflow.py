"""The math agent with the real AgentScope, 1.x or 2.x, the real `ModelTuner` and scripted replies.

`make test-agentscope-1` runs these tests with AgentScope 1.x.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("agentscope")

from astuner import ModelTuner, WorkflowOutput
from astuner.chat.codec import ChatCodec
from astuner.config.schema import AstunerSection
from astuner.contracts.errors import EnvironmentFailed, PromptTooLong
from astuner.contracts.types import SamplingParams, Turn
from astuner.plugins.loader import load_plugins
from astuner.rollout.models import one_model
from astuner.rollout.turns import EpisodeRecorder
from astuner.testing import FakeEngine, check_workflow, make_tokenizer, workflow_task
from astuner_math.workflow import MathAgentConfig, MathAgentWorkflow, calculator
from astuner_sandbox import PythonSandbox, SandboxFailed
from astuner_sandbox.isolation.confine import available
from tests.table import table

TASK = workflow_task("What is 6 * 7?")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def play(engine: FakeEngine, **settings: Any) -> tuple[WorkflowOutput, Sequence[Turn]]:
    """Play one episode of the math agent; return its output and turns."""
    config: Any = SimpleNamespace(
        astuner=AstunerSection.model_validate({"model": {"path": "fake"}}), plugins=load_plugins()
    )
    recorder = EpisodeRecorder()
    tuner = ModelTuner(
        models=one_model(engine, ChatCodec(engine.tokenizer)),
        recorder=recorder,
        sampling=SamplingParams(max_tokens=1000),
        config=config,
        workflow_task=TASK,
    )
    output = await MathAgentWorkflow(MathAgentConfig(**settings)).execute(TASK, tuner)
    return output, recorder.turns


def run(*replies: str, **settings: Any) -> tuple[WorkflowOutput, Sequence[Turn]]:
    return asyncio.run(play(FakeEngine(replies), **settings))


def tools_of(turn: Turn) -> list[Any]:
    """The tools that the model sees, except the one by which AgentScope 1.0.7 ends a reply."""
    functions = [tool["function"] for tool in turn.tools]
    return [function for function in functions if function["name"] != "generate_response"]


def test_calculator_is_offered_called_and_answered() -> None:
    output, (first, second) = run(call("calculator", expression="6 * 7"), r"It is \boxed{42}.", tool="calculator")
    assert output.metadata == {"final_answer": r"It is \boxed{42}."}
    assert output.response == r"It is \boxed{42}."
    assert output.reward is None
    (tool,) = tools_of(first)
    assert (tool["name"], tool["parameters"]["required"]) == ("calculator", ["expression"])
    system, user = first.request
    assert r"\boxed{}" in system["content"]
    assert user["content"] == "What is 6 * 7?"
    (result,) = second.request
    assert (result["role"], result["content"]) == ("tool", "42")
    assert second.continues == first.index


def test_prompts_are_the_same_in_every_episode() -> None:
    output = check_workflow(MathAgentWorkflow, TASK, replies=[call("execute_python_code", code="print(42)"), "42"])
    assert output.metadata == {"final_answer": "42"}


def test_python_is_the_quick_starts_tool() -> None:
    output, (first, second) = run(call("execute_python_code", code="print(6 * 7)"), r"\boxed{42}")
    assert output.metadata == {"final_answer": r"\boxed{42}"}
    assert [tool["name"] for tool in tools_of(first)] == ["execute_python_code"]
    assert "<stdout>42\n</stdout>" in second.request[-1]["content"]


def test_no_tool() -> None:
    output, (turn,) = run(r"\boxed{42}", tool="none")
    assert output.metadata == {"final_answer": r"\boxed{42}"}
    assert tools_of(turn) == []


def test_a_reply_without_text_is_an_empty_answer() -> None:
    output, _ = asyncio.run(play(FakeEngine(lambda prompt: ""), tool="none"))  # which 1.0.7 asks again
    assert output.metadata == {"final_answer": ""}


def test_reasoning_is_not_part_of_the_answer() -> None:
    output, _ = run("<think>\nhm\n</think>\n\n5", tool="none")
    assert "5" in output.metadata["final_answer"]


def test_tool_errors_reach_the_model() -> None:
    _, (_, second) = run(call("calculator", expression="6 / 0"), r"\boxed{0}", tool="calculator")
    assert second.request[-1]["content"] == "Error: division by zero"


def test_an_argument_of_another_type_reaches_the_calculator() -> None:
    _, (_, second) = run(call("calculator", expression=7), r"\boxed{7}", tool="calculator")
    assert second.request[-1]["role"] == "tool"


def test_max_iters_ends_the_tool_calls_with_an_answer() -> None:
    output, turns = run(call("calculator", expression="6 * 7"), r"\boxed{42}", tool="calculator", max_iters=1)
    assert output.metadata == {"final_answer": r"\boxed{42}"}
    assert len(turns) == 2


def test_the_system_prompt_can_be_replaced() -> None:
    _, (turn,) = run(r"\boxed{42}", tool="none", system_prompt="Be brief.")
    assert turn.request[0]["content"] == "Be brief."


def test_a_prompt_that_is_too_long_ends_the_episode() -> None:
    with pytest.raises(PromptTooLong):
        asyncio.run(play(FakeEngine(["42"], max_model_len=20), tool="none"))


def test_cancelling_the_episode_cancels_the_agent() -> None:
    class Waits(FakeEngine):
        cancelled = False

        async def generate(self, *arguments: Any, **options: Any) -> Any:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                self.cancelled = True
                raise

    engine = Waits([], make_tokenizer())

    async def cancelled() -> None:
        await play(FakeEngine(["42"]), tool="none")  # imports AgentScope, which takes longer than the time limit
        await asyncio.wait_for(play(engine, tool="none"), 0.2)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(cancelled())
    assert engine.cancelled


@table(("expression", "text"), [("2+3", "5"), ("2+", "Error: cannot read '2+' as arithmetic"), (7, "7")])
def test_calculator_tool_answers_in_text(expression: Any, text: str) -> None:
    assert calculator(expression) == text


def test_the_models_code_runs_in_the_sandbox_without_a_warning_where_nothing_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peep = "import os, socket\nprint(sorted(os.environ))\nsocket.socket()"
    _, turns = run(call("execute_python_code", code=peep), r"\boxed{42}")
    result = turns[1].request[-1]["content"]
    assert "PermissionError" in result
    assert "ASTUNER_HOME" not in result
    assert "PYTEST_CURRENT_TEST" not in result
    assert not available().missing or "container" in caplog.text
    assert available().missing or not caplog.records


def test_a_broken_sandbox_ends_the_episode_as_an_environment_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """AgentScope would show the model an error, and the judge would score the answer to that."""

    def broken(self: Any, *_: Any) -> Any:
        raise SandboxFailed("no more processes")

    monkeypatch.setattr(PythonSandbox, "_run", broken)
    with pytest.raises(EnvironmentFailed, match="no more processes"):
        run(call("execute_python_code", code="print(6 * 7)"), r"\boxed{42}")
