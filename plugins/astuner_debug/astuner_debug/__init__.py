"""Debugging tools: ``astuner config``, ``chat``, ``eval``, ``doctor`` and ``kill``, the debug backbone, breakpoints."""
