"""AgentScope's `execute_python_code`, run in the sandbox: registered, described and answered as AgentScope's own."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from astuner_sandbox import PythonSandbox, SandboxFailed, SandboxLimits, python_tool
from tests.table import table

ROOT = Path(__file__).parents[3]
VERSION_2 = ROOT / ".venv-frameworks" / "bin" / "python"

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # AgentScope's dependencies warn while they are imported
    pytest.importorskip("agentscope", reason="needs the extra 'agentscope'")
    from agentscope.tool import Toolkit, execute_python_code


@pytest.fixture(scope="module")
def sandbox():
    with PythonSandbox(SandboxLimits(seconds=30)) as made:
        yield made


def call(toolkit: Toolkit, **arguments) -> str:
    async def answer() -> str:
        use = {"type": "tool_use", "id": "1", "name": "execute_python_code", "input": arguments}
        (response,) = [r async for r in await toolkit.call_tool_function(use)]
        (block,) = response.content
        return block["text"]

    return asyncio.run(answer())


def toolkit_with(function) -> Toolkit:
    toolkit = Toolkit()
    toolkit.register_tool_function(function)
    return toolkit


def shape(schema: dict) -> dict:
    """A tool's schema without the sentences."""
    function = schema["function"]
    fields = {
        n: {k: v for k, v in f.items() if k != "description"} for n, f in function["parameters"]["properties"].items()
    }
    return {"name": function["name"], "fields": fields, "required": function["parameters"]["required"]}


def test_it_is_offered_to_the_model_as_agentscopes_own(sandbox) -> None:
    (ours,) = toolkit_with(python_tool(sandbox)).get_json_schemas()
    (theirs,) = toolkit_with(execute_python_code).get_json_schemas()
    assert shape(ours) == shape(theirs)
    assert "print" in ours["function"]["description"]
    assert all(field["description"] for field in ours["function"]["parameters"]["properties"].values())
    assert list(inspect.signature(python_tool(sandbox)).parameters) == list(
        inspect.signature(execute_python_code).parameters
    )


@table("code", ["print(6 * 7)", "", "import sys; print('é'); sys.exit(3)", "print('a')\nprint('b', end='')"])
def test_it_answers_in_agentscopes_words(sandbox, code) -> None:
    arguments = {"code": code, "timeout": 30}
    assert call(toolkit_with(python_tool(sandbox)), **arguments) == call(toolkit_with(execute_python_code), **arguments)


def test_time_is_up(sandbox) -> None:
    text = call(toolkit_with(python_tool(sandbox)), code="print(1)\nwhile True: pass", timeout=0.5)
    assert text.startswith("<returncode>-1</returncode><stdout>1\n</stdout><stderr>TimeoutError")


@table("timeout", ["soon", None, -1, 0, "nan", 10**400, [1]])
def test_a_timeout_that_makes_no_sense_is_told_to_the_model(sandbox, timeout) -> None:
    assert "timeout must be a positive number" in call(
        toolkit_with(python_tool(sandbox)), code="print(1)", timeout=timeout
    )


@table("arguments", [{"code": 42}, {"code": "print(1)", "timeout": "5"}, {"code": "1", "language": "py"}])
def test_odd_arguments_are_taken_for_what_they_mean(sandbox, arguments) -> None:
    assert "<returncode>0</returncode>" in call(toolkit_with(python_tool(sandbox)), **arguments)


def test_a_broken_sandbox_is_told_to_the_workflow() -> None:
    closed, told = PythonSandbox(), []
    closed.close()
    text = call(toolkit_with(python_tool(closed, on_failure=told.append)), code="print(1)")
    assert "sandbox was closed" in text  # what AgentScope makes of it
    assert [type(e) for e in told] == [SandboxFailed]


TWO = """
import asyncio, json
from agentscope.message import ToolCallBlock
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, Toolkit, ToolChunk
from astuner_sandbox import python_tool

async def main():
    allow = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")
    tool = FunctionTool(python_tool(), permission=allow)
    chunk = await tool.call(code="print(6 * 7)")
    assert isinstance(chunk, ToolChunk)
    toolkit = Toolkit(tools=[tool])
    schemas = await toolkit.get_tool_schemas()
    said = []
    call = ToolCallBlock(id="1", name="execute_python_code", input=json.dumps({"code": "print(6 * 7)", "timeout": 20}))
    async for part in toolkit.call_tool(call, AgentState()):
        said.append([type(part).__name__, part.content[0].text, str(part.state)])
    print(json.dumps({"text": chunk.content[0].text, "schemas": schemas, "said": said}))

asyncio.run(main())
"""


@pytest.mark.slow  # in another environment
def test_with_agentscope_2(tmp_path) -> None:
    if not VERSION_2.exists():
        pytest.skip(f"{VERSION_2} is not there; `make .venv-frameworks/.done` builds it")
    done = subprocess.run([str(VERSION_2), "-c", TWO], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    answer = "<returncode>0</returncode><stdout>42\n</stdout><stderr></stderr>"
    assert found["text"] == answer
    assert answer in [text for _, text, _ in found["said"]]
    (schema,) = found["schemas"]
    assert schema["function"]["name"] == "execute_python_code"
    assert schema["function"]["parameters"]["required"] == ["code"]
    assert sys.executable != str(VERSION_2)
