"""Running Python that a model wrote: its own process, little it may use up, nothing of the run it can see.

`PythonSandbox` runs code, `shared` is the process-wide one, `python_tool` makes AgentScope's tool of it.  The names
stand in ``__init__.pyi`` and are loaded when touched, because a part of this package also runs inside the sandbox.
"""

from __future__ import annotations

from importlib import import_module

from astuner import names_of

_HOME = names_of(__file__)

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'astuner_sandbox' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value
