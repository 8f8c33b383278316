"""Finding what an experiment names: plugins, what they register, and the user's own code."""

from __future__ import annotations

import importlib
import warnings

_WAS_HERE = ("CORE", "DISABLE_VARIABLE", "Plugin", "PluginManager", "Status", "TRACE_VARIABLE", "load_plugins")


def __getattr__(name: str) -> object:
    """What was in here when this was one module, for one release."""
    if name not in _WAS_HERE:
        raise AttributeError(f"module 'astuner.plugins' has no attribute {name!r}")
    where = f"astuner.plugins.{name} is astuner.plugins.loader.{name} now"
    warnings.warn(f"{where}; the old name goes with the next release", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module("astuner.plugins.loader"), name)
