"""Define the config keys of the service, the workflow and the task reader, without imports of their code."""

from __future__ import annotations

from pydantic import Field

from astuner.contracts.section import Section

URL_VARIABLE = "ASTUNER_FEEDBACK_URL"
"""Variable with the address of the service that was started with a run."""
TOKEN_VARIABLE = "ASTUNER_FEEDBACK_TOKEN"
"""Variable with the key of the run's episodes; applications use a different key."""


class ServiceConfig(Section):
    """Settings of the service `feedback`."""

    host: str = "127.0.0.1"
    """Address for the application and the episodes. Any address except loopback requires `key_env`."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the service; 0 selects a free one, which changes with every run."""
    key_env: str | None = None
    """Environment variable with the application's key (16 characters or more); null creates a new key for every run."""
    wait_timeout: float = Field(30.0, ge=0)
    """Seconds that a request which starts a conversation waits for an episode before the service answers 503."""


class WorkflowConfig(Section):
    """Settings of the workflow `feedback`."""

    no_groups = "with the workflow feedback every episode is a different conversation"
    rating_timeout: float = Field(300.0, gt=0)
    """Seconds after the last reply in which a conversation must be rated or continued; then its episode starts over."""
    agent: str | None = None
    """Agent or role of `astuner.agents` that answers; null if the experiment names none."""


class ConversationsConfig(Section):
    """Settings of the task reader `conversations`."""

    count: int = Field(1000, ge=1)
    """Conversations per epoch."""
