"""Provide the core's part ``environments``: remote environments and classes for the older service.

Invariant: it stores nothing; the URL of the service is looked up on every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from astuner.contracts.environment import Environment
from astuner.contracts.parts import EnvironmentsPart
from astuner.contracts.service import Service
from astuner_env import older_environment
from astuner_env.env_service.client import is_remote

if TYPE_CHECKING:
    from astuner import Config


class Environments(EnvironmentsPart):
    """Environments in the environment service, if one is configured."""

    def hosts(self, config: Config, env_type: str) -> bool:
        return is_remote(config, env_type)

    def connect(self, config: Config, env_type: str) -> Environment:
        from astuner_env.env_service import RemoteEnvironment, find_client

        params = config.astuner.env_service.params
        return RemoteEnvironment(params, client=find_client(config), env_type=env_type)

    def service(self, config: Config, names: Sequence[str]) -> Service:
        from astuner_env.env_service.server import EnvServer

        return EnvServer(names, token_env=config.astuner.env_service.token_env, run_dir=config.run_dir)

    def adapt(self, cls: type) -> type[Environment] | None:
        return older_environment.adapt(cls) if older_environment.is_older(cls) else None

    def prepare_import(self) -> None:
        older_environment.stand_in()
