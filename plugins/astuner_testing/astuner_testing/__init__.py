"""Provide checks and fakes for plugin authors (`astuner.testing`) and ``astuner new``."""
