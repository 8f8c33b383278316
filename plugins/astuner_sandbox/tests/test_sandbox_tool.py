"""The tool `execute_python_code` in a `Toolkit` of the installed AgentScope, 1.x or 2.x.

1.x has a tool of this name, whose schema and answers are compared with the sandbox's.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest

from astuner_sandbox import PythonSandbox, SandboxFailed, SandboxLimits, python_tool
from tests.table import table

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # AgentScope's dependencies warn while they are imported
    pytest.importorskip("agentscope", reason="needs the extra 'agentscope'")
    from agentscope.tool import Toolkit

VERSION_2 = metadata.version("agentscope").startswith("2.")
only_1 = pytest.mark.skipif(VERSION_2, reason="AgentScope 2.x has no execute_python_code")


@pytest.fixture(scope="module")
def sandbox():
    with PythonSandbox(SandboxLimits(seconds=30)) as made:
        yield made


async def _answers_2(toolkit: Any, arguments: dict[str, Any]) -> list[Any]:
    from agentscope.message import ToolCallBlock
    from agentscope.state import AgentState

    block = ToolCallBlock(id="1", name="execute_python_code", input=json.dumps(arguments))
    return [part async for part in toolkit.call_tool(block, AgentState())]


async def _answers_1(toolkit: Any, arguments: dict[str, Any]) -> list[Any]:
    block = {"type": "tool_use", "id": "1", "name": "execute_python_code", "input": arguments}
    return [response async for response in await toolkit.call_tool_function(block)]


def call(toolkit: Any, **arguments: Any) -> str:
    """Return the text that the model reads after a call of the tool."""
    response = asyncio.run((_answers_2 if VERSION_2 else _answers_1)(toolkit, arguments))[-1]
    (block,) = response.content
    return block.text if VERSION_2 else block["text"]


def toolkit_with(function: Callable[..., Any]) -> Any:
    if VERSION_2:
        from agentscope.permission import PermissionBehavior, PermissionDecision
        from agentscope.tool import FunctionTool

        allow = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")
        return Toolkit(tools=[FunctionTool(function, permission=allow)])
    toolkit = Toolkit()
    toolkit.register_tool_function(function)
    return toolkit


def schema_of(toolkit: Any) -> dict[str, Any]:
    schemas = asyncio.run(toolkit.get_tool_schemas()) if VERSION_2 else toolkit.get_json_schemas()
    (schema,) = schemas
    return schema


def shape(schema: dict) -> dict:
    """A tool's schema without the sentences."""
    function = schema["function"]
    fields = {
        n: {k: v for k, v in f.items() if k != "description"} for n, f in function["parameters"]["properties"].items()
    }
    return {"name": function["name"], "fields": fields, "required": function["parameters"]["required"]}


def test_it_is_offered_with_a_description_of_every_argument(sandbox) -> None:
    function = schema_of(toolkit_with(python_tool(sandbox)))["function"]
    assert function["name"] == "execute_python_code"
    assert function["parameters"]["required"] == ["code"]
    assert "print" in function["description"]
    assert all(field["description"] for field in function["parameters"]["properties"].values())


@only_1
def test_it_is_offered_to_the_model_as_agentscopes_own(sandbox) -> None:
    from agentscope.tool import execute_python_code

    ours, theirs = (schema_of(toolkit_with(tool)) for tool in (python_tool(sandbox), execute_python_code))
    assert shape(ours) == shape(theirs)
    assert list(inspect.signature(python_tool(sandbox)).parameters) == list(
        inspect.signature(execute_python_code).parameters
    )


def test_it_answers_with_the_codes_output(sandbox) -> None:
    answer = "<returncode>0</returncode><stdout>42\n</stdout><stderr></stderr>"
    assert call(toolkit_with(python_tool(sandbox)), code="print(6 * 7)", timeout=30) == answer


@only_1
@table("code", ["print(6 * 7)", "", "import sys; print('é'); sys.exit(3)", "print('a')\nprint('b', end='')"])
def test_it_answers_in_agentscopes_words(sandbox, code) -> None:
    from agentscope.tool import execute_python_code

    arguments = {"code": code, "timeout": 30}
    assert call(toolkit_with(python_tool(sandbox)), **arguments) == call(toolkit_with(execute_python_code), **arguments)


def test_time_is_up(sandbox) -> None:
    text = call(toolkit_with(python_tool(sandbox)), code="print(1)\nwhile True: pass", timeout=0.5)
    assert text.startswith("<returncode>-1</returncode><stdout>1\n</stdout><stderr>TimeoutError")


@table("timeout", ["soon", None, -1, 0, "nan", 10**400, [1]])
def test_a_timeout_that_makes_no_sense_is_told_to_the_model(sandbox, timeout) -> None:
    text = call(toolkit_with(python_tool(sandbox)), code="print(1)", timeout=timeout)
    refused_by_agentscope = VERSION_2 and "not valid JSON numbers" in text  # of "nan", which it reads as a number
    assert "timeout must be a positive number" in text or refused_by_agentscope


@table("arguments", [{"code": 42}, {"code": "print(1)", "timeout": "5"}, {"code": "1", "language": "py"}])
def test_odd_arguments_are_taken_for_what_they_mean(sandbox, arguments) -> None:
    assert "<returncode>0</returncode>" in call(toolkit_with(python_tool(sandbox)), **arguments)


def test_a_broken_sandbox_is_told_to_the_workflow() -> None:
    closed, told = PythonSandbox(), []
    closed.close()
    text = call(toolkit_with(python_tool(closed, on_failure=told.append)), code="print(1)")
    assert "sandbox was closed" in text  # what AgentScope makes of it
    assert [type(e) for e in told] == [SandboxFailed]
