"""Provide AgentScope's tool `execute_python_code` in the sandbox, with an unchanged description and result format.

AgentScope 1.x and 2.x expect different result objects; the installed version determines which one is returned.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from astuner_sandbox.python import CodeResult, PythonSandbox, SandboxFailed, shared

if TYPE_CHECKING:
    from agentscope.tool import ToolResponse


def python_tool(
    sandbox: PythonSandbox | None = None, *, on_failure: Callable[[SandboxFailed], object] | None = None
) -> Callable[..., Awaitable[ToolResponse]]:
    """Return an async function to register with a `Toolkit` (1.x) or to wrap in a `FunctionTool` (2.x).

    :param sandbox: Sandbox to use; None for `shared`.
    :param on_failure: Called when the sandbox itself failed. AgentScope turns exceptions of a tool into text for the
        model, so a workflow that should end as failed stores the exception and raises it.
    """

    async def execute_python_code(code: str, timeout: float = 300, **kwargs: Any) -> ToolResponse:
        """Run Python code in a fresh process and return its return code, standard output and standard error. Only
        what the code prints is returned: `print` what you want to know. Files it writes are gone afterwards, and
        there is no network.

        Args:
            code (`str`):
                The Python code to run.
            timeout (`float`, defaults to `300`):
                The most time the code may take, in seconds.

        Returns:
            `ToolResponse`:
                The return code, standard output and standard error of the code.
        """  # noqa: D205  # the model reads this text as the tool's description
        seconds = _seconds(timeout)
        if seconds is None:
            return _response(f"Error: timeout must be a positive number of seconds, not {timeout!r}")
        try:
            return _response(as_text(await (sandbox or shared()).run_async(str(code), seconds)))
        except SandboxFailed as e:
            if on_failure is not None:
                on_failure(e)
            raise

    return execute_python_code


def as_text(result: CodeResult) -> str:
    """Return a result as text for the model."""
    return (
        f"<returncode>{result.returncode}</returncode><stdout>{result.stdout}</stdout><stderr>{result.stderr}</stderr>"
    )


def _seconds(timeout: Any) -> float | None:
    """Return the timeout in seconds; None if the model sent an invalid value."""
    try:
        seconds = float(timeout)
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None


def _response(text: str) -> ToolResponse:
    import agentscope.tool
    from agentscope.message import TextBlock

    kind: Any = getattr(agentscope.tool, "ToolChunk", None) or agentscope.tool.ToolResponse  # 2.x or 1.x
    return kind(content=[TextBlock(type="text", text=text)])
