"""The environment service from the run's side: its client, the environment behind it, and how it is started.

The service itself is a plugin (``astuner-env``), or any other that speaks the same routes.  Invariant: what the service
did not say is never made up; a call that has no answer raises `EnvironmentFailed`.
"""

from __future__ import annotations

from astuner_env.env_service.client import EnvClient, RemoteEnvironment, find_client, service_url

__all__ = ["EnvClient", "RemoteEnvironment", "find_client", "service_url"]
