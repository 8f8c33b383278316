"""Switch to the next promoted model: load it alongside the current one, which finishes its requests.

Invariants: a switch neither rejects nor aborts a request; if the next model fails, the current one continues; a model
is closed when no request waits for it anymore.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from astuner import find_backbone, in_daemon_thread
from astuner_gateway.served.conversations import Conversations
from astuner_gateway.served.model import About, ServedAgent, ServedModel
from astuner_models.hub import Downloads
from astuner_models.promoted import Promotions
from astuner_models.serving import Serving, find_checkpoint, serve_policies

if TYPE_CHECKING:
    from astuner import Config
    from astuner.contracts.types import SamplingParams
    from astuner_gateway.served.handler import Handler

LOOK = 0.5
"""Seconds between checks for a new promotion."""


async def _nothing() -> None:
    return None


@dataclass(eq=False)
class Answering:
    """A loaded model and its conversations. Used on one event loop."""

    about: About
    conversations: Conversations
    close: Callable[[], Awaitable[None]] = _nothing
    note: str = ""
    """Note for the operator."""
    _under_way: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def asked(self) -> Iterator[Answering]:
        """Mark the model as in use while the block runs."""
        self._under_way += 1
        self._idle.clear()
        try:
            yield self
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def retire(self) -> None:
        """Close the model when no request waits for it; no new request may use it."""
        if self._under_way:
            await self._idle.wait()
        await self.close()


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Load the models of an experiment for serving.

    :param policy: Policy to serve; None for the first one.
    :param workflow: Whether the experiment's agent answers.
    """

    config: Config
    policy: str | None
    workflow: bool
    sampling: SamplingParams

    def load(self, checkpoint: str) -> Answering:
        """Load a checkpoint.

        :param checkpoint: Value of ``--checkpoint``.
        :raises astuner.contracts.errors.CheckpointError: The checkpoint does not exist.
        :raises astuner.contracts.errors.ConfigError: The policy does not exist.
        """
        config, folder = self.config, find_checkpoint(self.config, checkpoint)
        backbone, _ = find_backbone(config)
        if folder is None:
            Downloads().require(config, backbone.capabilities)
        with ExitStack() as opened:
            served, models = opened.enter_context(serve_policies(backbone, config, folder))
            one, _ = Serving(config=config, served=served, models=models).policy(self.policy)
            policy = self.policy or next(iter(served))
            about = About.of(config, policy, one.name, checkpoint if folder else "base")
            speaker: ServedModel | ServedAgent
            if self.workflow:
                speaker = ServedAgent(config, models, self.sampling)
            else:
                speaker = ServedModel(config, models[policy], about, self.sampling)
            loaded = opened.pop_all()

        async def close() -> None:
            await speaker.close()
            await in_daemon_thread(loaded.close)  # waits for the engine

        return Answering(about, Conversations(speaker.voice), close, one.note)


def promoted_now(config: Config) -> str | None:
    """Return the promoted checkpoint as a fixed value of ``--checkpoint``; None if nothing was ever promoted.

    :raises astuner.contracts.errors.CheckpointError: The file of promotions is damaged.
    """
    found = Promotions.read(config.run_dir)
    return None if found is None else str(found.model(found.serving) or "base")


async def follow(
    handler: Handler,
    serving: str | None,
    wanted: Callable[[], str | None],
    load: Callable[[str], Answering],
    switched: Callable[[About], None],
    remark: Callable[[str], None],
) -> None:
    """Let the handler answer with the promoted model, until canceled.

    :param serving: Value of ``wanted`` that is currently served; None for anything else.
    :param wanted: Return the checkpoint to serve; None if there is none.
    :param load: Load a checkpoint; called outside of the event loop.
    :param switched: Called with the newly served model.
    :param remark: Print a message for the operator.
    """
    ending: set[asyncio.Task[None]] = set()
    failed = ""
    try:
        while True:
            await asyncio.sleep(LOOK)
            try:
                now = wanted()
                if now is None or now == serving:
                    continue
                serving = now  # a checkpoint that cannot be loaded is tried once
                following = await in_daemon_thread(load, now)
            except Exception as e:  # the server continues, whatever error a damaged checkpoint causes in a library
                told = f"cannot serve the promoted checkpoint: {e}; still serving {handler.current.about.name}"
                if told != failed:
                    remark(failed := told)
                continue
            failed = ""
            task = asyncio.create_task(handler.switch(following).retire())
            ending.add(task)
            task.add_done_callback(ending.discard)
            switched(following.about)
    finally:
        await asyncio.gather(*ending, return_exceptions=True)
