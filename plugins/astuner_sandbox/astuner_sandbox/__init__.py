"""Running Python that a model wrote: its own process, little it may use up, nothing of the run it can see.

`PythonSandbox` runs code, `shared` is the process-wide one, `python_tool` makes AgentScope's tool of it.  The names
are loaded when touched, because a part of this package also runs inside the sandbox.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from astuner_sandbox.common import shared as shared
    from astuner_sandbox.python import PythonSandbox as PythonSandbox
    from astuner_sandbox.result import CodeResult as CodeResult
    from astuner_sandbox.result import SandboxFailed as SandboxFailed
    from astuner_sandbox.result import SandboxLimits as SandboxLimits
    from astuner_sandbox.tool import python_tool as python_tool

_HOME = {
    "CodeResult": "result",
    "PythonSandbox": "python",
    "SandboxFailed": "result",
    "SandboxLimits": "result",
    "python_tool": "tool",
    "shared": "common",
}

__all__ = [*sorted(_HOME)]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'astuner_sandbox' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"astuner_sandbox.{_HOME[name]}"), name)
    return value
