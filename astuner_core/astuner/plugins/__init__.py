"""Finding what an experiment names: plugins, what they register, and the user's own code."""

from __future__ import annotations

from astuner.plugins.loader import Plugin, PluginManager, Status, load_plugins

__all__ = ["Plugin", "PluginManager", "Status", "load_plugins"]
