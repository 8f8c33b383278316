"""The next model, when another one was promoted: loaded beside the one that answers, which ends what it has begun.

Invariants: no request is refused or cut short by a switch; whatever goes wrong with the next model, the one that
answers goes on; a model is closed when nobody waits for it any more.
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
"""Seconds between looks whether another one was promoted."""


async def _nothing() -> None:
    return None


@dataclass(eq=False)
class Answering:
    """One model that is loaded, and who talks with it. Used on one event loop."""

    about: About
    conversations: Conversations
    close: Callable[[], Awaitable[None]] = _nothing
    note: str = ""
    """What a person should know about it."""
    _under_way: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def asked(self) -> Iterator[Answering]:
        """While the block runs, somebody waits for it."""
        self._under_way += 1
        self._idle.clear()
        try:
            yield self
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def retire(self) -> None:
        """Close it when nobody waits for it any more; nobody may ask it from now on."""
        if self._under_way:
            await self._idle.wait()
        await self.close()


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Loads the models of an experiment so that they can be talked with.

    :param policy: None: the first one.
    :param workflow: the experiment's agent answers.
    """

    config: Config
    policy: str | None
    workflow: bool
    sampling: SamplingParams

    def load(self, checkpoint: str) -> Answering:
        """
        :param checkpoint: as ``--checkpoint`` says it.
        :raises astuner.contracts.errors.CheckpointError: there is no such checkpoint.
        :raises astuner.contracts.errors.ConfigError: there is no such policy.
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
            await in_daemon_thread(loaded.close)  # an engine is waited for

        return Answering(about, Conversations(speaker.voice), close, one.note)


def promoted_now(config: Config) -> str | None:
    """What ``--checkpoint`` would call the promoted one, whatever is promoted later; None: nothing ever was.

    :raises astuner.contracts.errors.CheckpointError: the file that says so is damaged.
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
    """Until it is cancelled, have the handler answer with what is promoted.

    :param serving: what of ``wanted`` answers now; None: something else.
    :param wanted: the checkpoint that should answer; None: there is none.
    :param load: called beside the event loop.
    :param switched: is told who answers from now on.
    :param remark: tells a person something.
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
                serving = now  # one that cannot be loaded is tried once
                following = await in_daemon_thread(load, now)
            except Exception as e:  # whatever a damaged checkpoint makes a library raise, the server goes on
                if (told := f"what was promoted cannot be served: {e}; {handler.current.about.name} goes on") != failed:
                    remark(failed := told)
                continue
            failed = ""
            task = asyncio.create_task(handler.switch(following).retire())
            ending.add(task)
            task.add_done_callback(ending.discard)
            switched(following.about)
    finally:
        await asyncio.gather(*ending, return_exceptions=True)
