"""The HTTP side: who may ask, what was asked, and how it is answered. `serve` runs it until it is told to stop."""

from astuner_env.server.serve import Service, running, serve

__all__ = ["Service", "running", "serve"]
