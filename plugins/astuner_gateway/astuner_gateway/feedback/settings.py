"""The keys of the service, the workflow and the task reader; nothing else, since configs are checked with them."""

from __future__ import annotations

from pydantic import Field

from astuner.contracts.section import Section

URL_VARIABLE = "ASTUNER_FEEDBACK_URL"
"""Where the service that was started beside a run listens."""
TOKEN_VARIABLE = "ASTUNER_FEEDBACK_TOKEN"
"""What the run's episodes show it; the key for applications is another one."""


class ServiceConfig(Section):
    host: str = "127.0.0.1"
    """Where it listens for the application and for episodes; anything but loopback needs `key_env`."""
    port: int = Field(0, ge=0, le=65535)
    """Its port; 0 takes a free one, which changes with every run."""
    key_env: str | None = None
    """The environment variable with the application's key (16 characters or more); null makes a new one every run."""
    wait_timeout: float = Field(30.0, ge=0)
    """Seconds a request that begins a conversation waits for an episode; then it is told to come again (503)."""


class WorkflowConfig(Section):
    no_groups = "with the workflow feedback every episode is another conversation"
    rating_timeout: float = Field(300.0, gt=0)
    """Seconds after its last reply in which a conversation must be rated or go on; then its episode starts over."""
    agent: str | None = None
    """The agent, or role, of `astuner.agents` that speaks; null where the experiment names none."""


class ConversationsConfig(Section):
    count: int = Field(1000, ge=1)
    """Conversations in one epoch."""
