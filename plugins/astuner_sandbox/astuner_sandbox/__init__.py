"""Running Python that a model wrote: its own process, little it may use up, nothing of the run it can see.

`PythonSandbox` runs code, `shared` is the process-wide one, `python_tool` makes AgentScope's tool of it.  The names
stand in ``__init__.pyi`` and are loaded when touched, because a part of this package also runs inside the sandbox.
"""

from __future__ import annotations

from astuner import public_names

_HOME, __getattr__ = public_names(__name__, __file__)

__all__ = sorted(_HOME)
