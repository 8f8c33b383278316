"""The run's side: the task reader `conversations` and the workflow `feedback`.

The tasks are placeholders, since the users bring them: an episode is a conversation with a user, its reward is what the
user thinks of it.  The workflow offers the episode's model to the service, over a connection that is held until
somebody has rated the conversation that was led with it.  Invariant: what reached no user is not trained.
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
"""Seconds without a sign of life after which the service counts as gone; it gives one every ten."""
PATIENCE = 30.0
"""Seconds to go on asking for a service that takes no connection."""
_PAUSE = 0.5
QUERY = "(what a user asks)"
"""For logs; no model gets to see it."""


class ConversationsTaskReader(TaskReader):
    """Numbered empty tasks for training; none for validation, which nobody is there to rate."""

    config: ConversationsConfig

    def read(self, split: Split) -> Iterator[Task]:
        if split is Split.TRAIN:
            yield from (Task(task_id=f"conversation-{n}", main_query=QUERY) for n in range(self.config.count))


class FeedbackWorkflow(Workflow):
    """Waits for a conversation and its rating."""

    name = "feedback"

    def __init__(self, config: WorkflowConfig) -> None:
        self.config = config

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """
        :raises ConfigError: the service is not there at all, or the time limits leave no room for a conversation.
        :raises EnvironmentFailed: nobody rated it; the episode starts over (``rollout.max_retries``).
        """
        url, token = os.environ.get(URL_VARIABLE, ""), os.environ.get(TOKEN_VARIABLE, "")
        if not url or not token:
            raise ConfigError(
                "the workflow feedback needs the service of that name beside the run; write: astuner run FILE "
                "--with feedback"
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
            raise EnvironmentFailed(f"there is no rating: {outcome['ended']}")
        # a reply's id leads to its turn: chatcmpl-EPISODE:TURN
        model_tuner.leave_out([int(reply_id.rpartition(":")[2]) for reply_id in outcome["lost"]])
        return WorkflowOutput(
            reward=outcome["reward"],
            metadata={"conversation": outcome["conversation"], "rated": outcome["rated"]},
            metrics={"replies": float(outcome["replies"])},
        )

    def _begin_timeout(self, config: Config) -> float:
        """Seconds to wait for a conversation, so that one which begins last has time for its rating."""
        limit = config.astuner.rollout.episode_timeout
        if self.config.rating_timeout >= limit:
            raise ConfigError(
                f"astuner.rollout.feedback.rating_timeout is {self.config.rating_timeout:g}, and an episode ends after "
                f"astuner.rollout.episode_timeout = {limit:g} s, waiting for its user included; raise the latter "
                "(a day is 86400)"
            )
        return limit - self.config.rating_timeout


async def _outcome(url: str, token: str, offer: dict[str, Any]) -> dict[str, Any]:
    """What became of the offer.

    :raises EnvironmentFailed: the service is gone, or does not understand.
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
            except aiohttp.ClientConnectorError as e:  # nobody took the offer, so it can be made again
                if time.monotonic() > give_up:
                    raise EnvironmentFailed(f"no feedback service takes a connection at {url}: {e}") from e
            except (aiohttp.ClientError, asyncio.TimeoutError) as e:
                raise EnvironmentFailed(
                    f"the feedback service at {url} is gone, and the conversation with it ({type(e).__name__})"
                ) from e
            await asyncio.sleep(_PAUSE)


def _last_line(answer: bytes) -> dict[str, Any]:
    said = answer.strip()  # signs of life are empty lines
    if not said:
        raise EnvironmentFailed("the feedback service closed the connection without a word; was it stopped?")
    found: dict[str, Any] = json.loads(said)
    return found
