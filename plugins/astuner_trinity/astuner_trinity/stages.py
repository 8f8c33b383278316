"""Trinity's explorer and trainer with loops that report all errors.

Trinity's own loops log an exception, end, and report success; these report it to the run, which exits with its cause.
The work of a step and the synchronization are Trinity's (`explore_step`, `need_sync`, `sync_weight`, `train_step`,
`save_checkpoint`).

Explorer step k is train step k (`astuner_trinity.batches`).  A validation measures the current weights of the rollout
engines, which keep them until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import ray
from trinity.common.config import Config
from trinity.common.constants import RunningStatus, SyncStyle
from trinity.common.experience import Experience
from trinity.explorer.explorer import Explorer
from trinity.trainer.trainer import Trainer
from trinity.utils.monitor import Monitor

from astuner_trinity import mailbox
from astuner_trinity.session import Session
from astuner_trinity.workflow import group_tasks

_LOOK = 0.2
"""Seconds between checks whether the other side needs new weights."""


class RunExplorer(Explorer):
    """Trinity's explorer."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._patience = float(config.synchronizer.sync_timeout)
        self._weights = asyncio.Lock()
        """Lock for exchanging or measuring weights; in ``fully_async``, two tasks do so concurrently."""

    async def explore(self) -> None:
        """Explore until the run has no more draws, then wait for the last weights and measure them."""
        while await self._step():
            if await self.need_sync():
                self._at(f"waiting for weights newer than step {self.model_version}")
                await self.sync_weight()
            await self._validate()
        await self.finish_current_steps()
        self._at("waiting for the last weights")
        await self._reach(self.config.trainer.total_steps)
        await self._validate()
        await self.synchronizer.set_explorer_status.remote(RunningStatus.STOPPED, old_status=RunningStatus.RUNNING)

    async def begin(self) -> None:
        """Take the first weights, saved ones in a resumed run, and measure them if due."""
        await self._reach(self.explore_step_num)
        await self._validate()

    async def need_sync(self) -> bool:
        """Return Trinity's decision, and report the current activity."""
        self._at(f"rolling out step {self.explore_step_num}")
        due: bool = await super().need_sync()
        return due

    async def stop(self) -> None:
        """Stop all work and the engines."""
        await self.shutdown()

    async def _step(self) -> bool:
        """Start the next step; return False if there is none."""
        self._at(f"waiting for the draws of step {self.explore_step_num + 1}")
        try:
            tasks = await self.taskset.read()
        except StopAsyncIteration:
            return False
        self.explore_step_num += 1
        if self.sync_style == SyncStyle.FULLY_ASYNC:
            while len(self._inflight_train_steps) >= self.config.explorer.max_inflight_batches:
                oldest = self._inflight_train_steps.popleft()
                self._at(f"rolling out step {oldest}")
                await self._finish_explore_step(step=oldest)
                self.last_monitored_step = oldest
            self._inflight_train_steps.append(self.explore_step_num)
        await self.rollout_coordinator.submit_batch.remote(
            batch_id=self.explore_step_num, tasks=tasks, batch_type="train", min_wait_num=self.min_wait_num
        )
        return True

    async def _reach(self, step: int) -> None:
        """Wait until the engines have the weights of ``step`` or newer ones."""
        while self.model_version < step:
            if self.sync_style == SyncStyle.FULLY_ASYNC:
                await asyncio.sleep(_LOOK)  # the task that watches the trainer takes the weights
            else:
                await self.sync_weight()

    async def _finish_explore_step(self, step: int) -> None:
        """Finish a step; Trinity's own method would limit the full step to the timeout of one group."""
        if step > self.last_monitored_step:
            await self.rollout_coordinator.finalize_train_batch.remote(step, timeout=self._patience)
            await mailbox.ask(Session.rolled_out, step)

    async def _pull_latest_weights(self) -> None:
        async with self._weights, mailbox.reported("taking new weights"):
            await super()._pull_latest_weights()
        mailbox.tell(Session.weights_taken, self.model_version)

    async def _nccl_weights_update(self) -> None:
        async with self._weights, mailbox.reported("taking new weights"):
            await super()._nccl_weights_update()
        mailbox.tell(Session.weights_taken, self.model_version)

    async def _validate(self) -> None:
        async with self._weights:
            if await mailbox.ask(Session.is_validation_due, self.model_version):
                self._at(f"validating the weights of step {self.model_version}")
                batch = f"{self.model_version}/validation"
                tasks = group_tasks(await mailbox.ask(Session.begin_validation, self.model_version), validation=True)
                await self.rollout_coordinator.submit_batch.remote(batch_id=batch, tasks=tasks, batch_type="eval")
                await self.rollout_coordinator.finalize_eval_batch.remote(batch, timeout=self._patience)
                await mailbox.ask(Session.end_validation)

    def _at(self, doing: str) -> None:
        mailbox.tell(Session.at, "explorer", doing)


class RunTrainer(Trainer):
    """Trinity's trainer."""

    def __init__(self, config: Config, mini_batches: int) -> None:
        """:param mini_batches: Optimizer steps per batch."""
        super().__init__(config)
        self._mini_batches = mini_batches
        self._stopping, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()

    async def train(self) -> None:
        """Train to the last step, or until `stop`."""
        self._idle.clear()
        try:
            while self.train_step_num < self.total_steps and not self._stopping.is_set():
                if (batch := await self._batch()) is None:
                    break
                await self._step(batch)
        finally:
            self._idle.set()
        await self.synchronizer.set_trainer_status.remote(RunningStatus.STOPPED)

    async def stop(self) -> None:
        """Stop after the current step, and wait for its end."""
        self._stopping.set()
        await self._idle.wait()

    async def _batch(self) -> list[Experience] | None:
        """Return the next batch, or None if the run stops; meanwhile serve the explorer's requests for weights."""
        self._at(f"waiting for the batch of step {self.train_step_num + 1}")
        reading = asyncio.ensure_future(self.sample_strategy.sample(self.train_step_num + 1))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            while not reading.done() and not stopping.done():
                if await self.need_sync():
                    await self.sync_weight()
                await asyncio.wait({reading, stopping}, timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED)
            return reading.result()[0] if reading.done() else None
        finally:
            reading.cancel()
            stopping.cancel()

    async def _step(self, batch: list[Experience]) -> None:
        step = self.train_step_num + 1
        self._at(f"training step {step}")
        self.engine.config.actor.ppo_mini_batch_size = len(batch) // self._mini_batches
        metrics = await self.train_step(batch)
        if step == self.total_steps or await self.need_sync():
            self._at(f"sending the weights of step {step}")
            metrics |= await self.sync_weight()
        await mailbox.ask(Session.step_trained, step, {name: float(value) for name, value in metrics.items()})
        if await mailbox.ask(Session.is_save_due, step):
            await self.save()

    async def save(self) -> None:
        """Save the last step, and report it to the run."""
        self._at(f"saving step {self.train_step_num}")
        began = time.perf_counter()
        await self.save_checkpoint(block_until_saved=True, save_as_hf=True)
        await mailbox.ask(Session.saved, self.train_step_num, time.perf_counter() - began)

    def _at(self, doing: str) -> None:
        mailbox.tell(Session.at, "trainer", doing)


class LentTrainer(RunTrainer):
    """Trainer that another command lends (`astuner_trinity.lending`)."""

    def __init__(self, config: Config, mini_batches: int, *, pinned: bool) -> None:
        """:param pinned: Whether to use GPUs of this machine; otherwise Ray selects them."""
        with gpus_here() if pinned else contextlib.nullcontext():
            super().__init__(config, mini_batches)


@contextlib.contextmanager
def gpus_here() -> Iterator[None]:
    """Make VERL's trainer in this process reserve GPUs of this machine; Trinity has no key for this."""
    from trinity.trainer.verl import trainer as trainers

    theirs = trainers.ResourcePoolManager
    home = ray.get_runtime_context().get_node_id()
    (address,) = [node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == home]

    class PoolHere(theirs):  # type: ignore[misc, valid-type]
        def create_resource_pool(self) -> None:
            super().create_resource_pool()
            for pool in self.resource_pool_dict.values():
                pool.accelerator_type = f"node:{address}"  # required next to each GPU; Ray's resource of a machine

    trainers.ResourcePoolManager = PoolHere
    try:
        yield
    finally:
        trainers.ResourcePoolManager = theirs


class NoMonitor(Monitor):
    """Monitor without trackers, because the run's log sinks write them.

    The run receives the trainer's metrics with each step, and computes those of the explorer itself, over episodes.
    """

    def __init__(self, project: str, group: str, name: str, role: str, config: Any = None) -> None:
        super().__init__(project=project, name=name, role=role, config=config)

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        """Ignore metrics: see the class."""

    def close(self) -> None:
        """Do nothing: no file is open."""
