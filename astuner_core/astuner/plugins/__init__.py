"""Find the objects that an experiment names: plugins, their providers, and user code."""

from __future__ import annotations

_OF_LOADER = ("CORE", "DISABLE_PLUGINS", "Plugin", "PluginManager", "PluginStatus", "TRACE_VARIABLE", "load_plugins")


def __getattr__(name: str) -> object:
    """Return a name of `astuner.plugins.loader`, imported lazily: `user_code` also works without pluggy."""
    if name not in _OF_LOADER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from astuner.plugins import loader

    return getattr(loader, name)
