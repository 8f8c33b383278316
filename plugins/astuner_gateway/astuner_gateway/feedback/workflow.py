"""Provide the run's side of user feedback: the task reader `conversations` and the workflow `feedback`.

The tasks are placeholders, because users bring their own: an episode is a conversation with a user, and its reward is
the user's rating. The workflow offers the episode's model to the service over a connection that stays open until the
conversation is rated. Invariant: replies that no user received are not trained.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import ConfigError, EnvironmentFailed
from astuner.contracts.task_reader import TaskReader
from astuner.contracts.types import Split, Task, WorkflowOutput, WorkflowTask
from astuner.contracts.workflow import Workflow
from astuner_gateway.feedback.settings import TOKEN_VARIABLE, URL_VARIABLE, ConversationsConfig, WorkflowConfig

if TYPE_CHECKING:
    from astuner import Config, ModelTuner

SILENCE = 60.0
"""Seconds without data after which the service counts as gone; it sends a keep-alive line every ten seconds."""
PATIENCE = 30.0
"""Seconds to retry connecting to the service."""
_PAUSE = 0.5
QUERY = "(what a user asks)"
"""Query of the placeholder tasks, for logs only."""


class ConversationsTaskReader(TaskReader):
    """Read numbered placeholder tasks for training; none for validation, because no user would rate them."""

    config: ConversationsConfig

    def read(self, split: Split) -> Iterator[Task]:
        if split is Split.TRAIN:
            yield from (Task(task_id=f"conversation-{n}", main_query=QUERY) for n in range(self.config.count))


class FeedbackWorkflow(Workflow):
    """Wait for a conversation and its rating."""

    name = "feedback"

    def __init__(self, config: WorkflowConfig) -> None:
        self.config = config

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Offer the episode's model and return the rating as its output.

        :raises ConfigError: The service is missing, or the time limits leave no time for a conversation.
        :raises EnvironmentFailed: The conversation was not rated; the episode starts over (``rollout.max_retries``).
        """
        url, token = os.environ.get(URL_VARIABLE, ""), os.environ.get(TOKEN_VARIABLE, "")
        if not url or not token:
            raise ConfigError(
                "the workflow feedback needs the service feedback. Start the run with: astuner run FILE --with feedback"
            )
        access = model_tuner.base_url_and_key(self.config.agent)
        offer = {
            "base_url": access.base_url,
            "api_key": access.api_key,
            "model": access.model,
            "begin_timeout": self._begin_timeout(model_tuner.config),
            "rating_timeout": self.config.rating_timeout,
        }
        outcome = await _outcome(url, token, offer)
        if "ended" in outcome:
            raise EnvironmentFailed(f"the conversation has no rating: {outcome['ended']}")
        # a reply ID has the form chatcmpl-EPISODE:TURN
        model_tuner.leave_out([int(reply_id.rpartition(":")[2]) for reply_id in outcome["lost"]])
        return WorkflowOutput(
            reward=outcome["reward"],
            metadata={"conversation": outcome["conversation"], "rated": outcome["rated"]},
            metrics={"replies": float(outcome["replies"])},
        )

    def _begin_timeout(self, config: Config) -> float:
        """Return the seconds to wait for a conversation, so that even the last one to start can be rated in time."""
        limit = config.astuner.rollout.episode_timeout
        if self.config.rating_timeout >= limit:
            raise ConfigError(
                f"astuner.rollout.feedback.rating_timeout is {self.config.rating_timeout:g} s, but an episode, "
                f"including the wait for its user, ends after astuner.rollout.episode_timeout = {limit:g} s. Increase "
                "episode_timeout (a day is 86400)"
            )
        return limit - self.config.rating_timeout


async def _outcome(url: str, token: str, offer: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of the offer.

    :raises EnvironmentFailed: The service is gone or rejects the offer.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SILENCE)
    headers = {"Authorization": f"Bearer {token}"}
    give_up = time.monotonic() + PATIENCE
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        while True:
            try:
                async with session.post(f"{url}/episodes", json=offer, headers=headers) as response:
                    if response.status != 200:
                        said = (await response.text())[:500].replace(token, "***")
                        raise EnvironmentFailed(f"the feedback service at {url} answered {response.status}: {said}")
                    return _last_line(await response.read())
            except aiohttp.ClientConnectorError as e:  # the offer was not accepted, so it can be repeated
                if time.monotonic() > give_up:
                    raise EnvironmentFailed(f"cannot connect to the feedback service at {url}: {e}") from e
            except (aiohttp.ClientError, asyncio.TimeoutError) as e:
                raise EnvironmentFailed(
                    f"the feedback service at {url} and its conversation are gone ({type(e).__name__})"
                ) from e
            await asyncio.sleep(_PAUSE)


def _last_line(answer: bytes) -> dict[str, Any]:
    said = answer.strip()  # keep-alive lines are empty
    if not said:
        raise EnvironmentFailed("the feedback service closed the connection without an answer. Was it stopped?")
    found: dict[str, Any] = json.loads(said)
    return found
