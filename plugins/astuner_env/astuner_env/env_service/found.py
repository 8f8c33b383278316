"""Whether a task's environment is in the service or in this process, and where the service is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from astuner.contracts.errors import ConfigError
from astuner.plugins.registry import is_code
from astuner_env.env_service.client import EnvClient

if TYPE_CHECKING:
    from astuner.config import Config

URL_VARIABLE = "ASTUNER_ENV_URL"
"""Where a service that was started beside the run listens."""


def service_url(config: Config) -> str:
    """Where the environment service is; empty where there is none."""
    return config.astuner.env_service.url or os.environ.get(URL_VARIABLE, "")


def is_remote(config: Config, env_type: str) -> bool:
    """Whether an environment is the service's: where there is one, unless the experiment says otherwise.

    Code of the user's own and the tasks of the reader ``environment`` stay in this process.
    """
    reader = config.astuner.task_reader.type.rpartition("/")[2]
    if is_code(env_type) or reader == "environment":
        return False
    return reader == "env_service" or bool(service_url(config))


def find_client(config: Config) -> EnvClient:
    """A client of the experiment's service; connects to nothing yet.

    :raises ConfigError: nobody says where it is, or that is no address.
    """
    settings = config.astuner.env_service
    url = service_url(config)
    if not url:
        raise ConfigError(
            "no environment service is known; start one beside the run with --with NAME, or say where it is with "
            f"astuner.env_service.url (or the variable {URL_VARIABLE})"
        )
    return EnvClient(
        url,
        token=os.environ.get(settings.token_env, "") if settings.token_env else "",
        token_name=settings.token_env,
        timeout=settings.timeout,
        busy_timeout=settings.busy_timeout,
    )
