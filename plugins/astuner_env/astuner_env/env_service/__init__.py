"""Connect a run to an environment service: client, remote environment and service process.

The service is the plugin ``astuner-env`` or another program with the same routes. Invariant: missing answers are never
filled in; a call without an answer raises `EnvironmentFailed`.
"""

from __future__ import annotations

from astuner_env.env_service.client import EnvClient, RemoteEnvironment, find_client, service_url

__all__ = ["EnvClient", "RemoteEnvironment", "find_client", "service_url"]
