"""Run Python code that a model wrote in a confined process without access to the run.

`PythonSandbox` runs code, `shared` returns the sandbox of this process, and `python_tool` wraps it as an AgentScope
tool. The names are declared in ``__init__.pyi`` and loaded on first access, because a part of this package also runs
inside the sandbox.
"""

from __future__ import annotations

from astuner import public_names

_HOME, __getattr__ = public_names(__name__, __file__)

__all__ = sorted(_HOME)
