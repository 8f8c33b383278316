"""Finding what an experiment names: plugins, what they register, and the user's own code."""

from __future__ import annotations

_OF_LOADER = ("CORE", "DISABLE_PLUGINS", "Plugin", "PluginManager", "PluginStatus", "TRACE_VARIABLE", "load_plugins")


def __getattr__(name: str) -> object:
    """Names of `astuner.plugins.loader`, which is imported then: `user_code` is also used where pluggy is not."""
    if name not in _OF_LOADER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from astuner.plugins import loader

    return getattr(loader, name)
