"""How instances come to life and to their end.

Invariants.  An instance that is gone is never made anew behind its client's back: its state is lost, and every later
request for it is told so.  Whatever ends an instance, its process is dead before its slot is given to another, and
what it wrote is removed.  What takes too long is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from astuner.contracts.errors import RunError
from astuner.support.threads import in_daemon_thread
from astuner_env.manager.ends import Ends, absence
from astuner_env.manager.folders import Root, remove
from astuner_env.manager.instance import Instance
from astuner_env.manager.keeper import Keeper, not_started
from astuner_env.manager.metrics import Metrics
from astuner_env.manager.process import Process, ProcessGone, log_tail
from astuner_env.manager.refusal import Loss, Refusal
from astuner_env.manager.served import ServedEnvironment
from astuner_env.manager.slots import Slots
from astuner_sandbox.isolation.zygotes import ZygoteFailed

T = TypeVar("T")

log = logging.getLogger("astuner_env.instances")

CLOSE_TIMEOUT = 5.0
"""Seconds an environment has to put its things away before its process is killed."""
_DEATH = 10.0
_LARGEST_OUTPUT = 16 << 20


class Lives:
    """The instances of a service, their processes, and the zygotes they are forked from; for one event loop.

    :param clock: monotonic seconds.
    """

    def __init__(
        self,
        environments: Sequence[ServedEnvironment],
        root: Root,
        metrics: Metrics,
        max_instances: int,
        clock: Callable[[], float],
    ) -> None:
        self.slots = Slots(max_instances)
        self.instances: dict[str, Instance] = {}
        self.ends = Ends()
        self.is_stopping = False
        self._metrics = metrics
        self._clock = clock
        self._root = root
        self._keepers = {
            e.name: Keeper(e, root.home(e.name), metrics.zygote_restarts.labels(e.name).inc) for e in environments
        }
        self._clearings: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the zygotes.

        :raises RunError: one does not come up; says which, why, and what to type.
        """
        await asyncio.gather(*(self._start(keeper) for keeper in self._keepers.values()))

    async def _start(self, keeper: Keeper) -> None:
        try:
            await keeper.start()
        except ZygoteFailed as e:
            name, hint = keeper.environment.name, keeper.environment.hint
            how = f"\ntype: {hint}" if hint else ""
            raise RunError(f"the environment {name!r} cannot be served: {e}{how}") from None

    async def stop(self) -> None:
        """End everything, without waiting for what is under way."""
        self.is_stopping = True
        for instance in list(self.instances.values()):
            self.end(instance, Loss("stopped", "ended with the service"))
        await asyncio.gather(*(keeper.close() for keeper in self._keepers.values()))
        if self._clearings:
            await asyncio.wait(self._clearings, timeout=_DEATH)

    def zygotes(self) -> dict[str, int]:
        """Environment -> its living zygote's pid."""
        return {name: keeper.pid for name, keeper in self._keepers.items() if keeper.pid is not None}

    def new(self, environment: ServedEnvironment, task_id: str, instance_id: str) -> Instance:
        """An instance that has no process yet and is in no table."""
        return Instance(instance_id, environment, task_id, self._root.scratch(environment.name), self._clock())

    async def begin(
        self,
        instance: Instance,
        question: Mapping[str, Any],
        patience: float,
        *,
        successor: bool,
        is_wanted: Callable[[], bool],
    ) -> dict[str, Any]:
        """Wait for a slot, fork a process, and have it answer its first question.

        :param successor: it replaces one that had a slot, and so is the next to get one.
        """
        await self.slots.take(patience, first=successor)
        instance.has_slot = True
        if not is_wanted():
            raise Refusal("unknown_instance", "its client went away", reason="abandoned")
        began = self._clock()
        process = instance.process = await self.fork(instance)
        instance.watch = asyncio.ensure_future(self._watch(instance, process))
        left = max(1.0, instance.environment.create_timeout - (self._clock() - began))
        answer: dict[str, Any] = await self.ask(instance, question, left)
        instance.is_over = bool(answer["terminated"] or answer["truncated"])
        return answer

    async def fork(self, instance: Instance) -> Process:
        """A process for an instance; raises `Refusal` when none can be made."""
        environment = instance.environment
        options = {"entry": environment.entry, "environment": environment.name, "folder": str(instance.folder)}
        try:
            return await self._keepers[environment.name].fork(options, instance.output)
        except ZygoteFailed as e:
            log.error("no process can be started", extra={"environment": environment.name, "error": str(e)})
            raise not_started(environment, e) from None

    async def ask(self, instance: Instance, question: Mapping[str, Any], seconds: float) -> Any:
        """Ask the process of an instance whose lock the caller holds.

        :raises Refusal: it is gone, was killed because it took too long, or its environment raised.
        """
        if instance.loss is not None or instance.process is None:
            raise absence(instance.id, instance.loss)
        operation = str(question["op"])
        try:
            answer = await self.timed(instance.environment, operation, instance.process.ask(question, seconds))
        except asyncio.TimeoutError:
            took = f"was killed: {operation} took longer than {seconds:.3g} s"
            self.end(instance, Loss("timeout", took))
            raise Refusal("timeout", f"Instance {instance.id} {took}; its state is lost", reason="timeout") from None
        except ProcessGone as e:
            self._crashed(instance, str(e))
            raise absence(instance.id, instance.loss) from None
        except Refusal as e:
            if e.code == "env_error":
                log.error("environment raised", extra={**fields(instance), "op": operation, "error": e.traceback})
            raise
        finally:
            instance.used = self._clock()
        if instance.loss is not None:
            raise absence(instance.id, instance.loss)
        return answer

    async def timed(self, environment: ServedEnvironment, operation: str, work: Awaitable[T]) -> T:
        """Await ``work`` and note how long it took."""
        began = time.monotonic()
        try:
            return await work
        finally:
            self._metrics.took(environment.name, operation, time.monotonic() - began)

    def end(self, instance: Instance, loss: Loss, *, kindly: bool = False) -> asyncio.Task[None]:
        """Make an instance gone, at once; the task is done when nothing of it is left.

        :param kindly: let it close its environment first.
        """
        if instance.clearing is None:
            instance.loss = loss
            if self.instances.get(instance.id) is instance:
                del self.instances[instance.id]
                if loss.kind not in ("replaced", "failed"):
                    self.ends.add(instance.id, loss)
            instance.gone.set()
            if instance.process is not None and not kindly:
                instance.process.kill()  # so that whoever waits for its answer need not look at `gone`
            if not loss.was_asked_for:
                self._metrics.lost.labels(instance.environment.name, loss.kind).inc()
            log.info("instance ended", extra={**fields(instance), "reason": loss.kind, "how": loss.message})
            instance.clearing = asyncio.get_running_loop().create_task(self._clear_away(instance, kindly))
            self._clearings.add(instance.clearing)
            instance.clearing.add_done_callback(self._clearings.discard)
        return instance.clearing

    async def clear(self, instance: Instance) -> None:
        """Kill its process, and remove what it wrote when that is dead."""
        if instance.process is not None:
            instance.process.kill()
            if not await instance.process.wait(_DEATH):
                log.error("a process does not die", extra=fields(instance))
        await in_daemon_thread(remove, instance.folder, instance.output, name="astuner-env-remove")

    def shorten_outputs(self) -> None:
        """Keep what processes print within bounds."""
        for instance in list(self.instances.values()):
            with contextlib.suppress(OSError):  # it printed nothing yet, or is gone
                if instance.output.stat().st_size > _LARGEST_OUTPUT:
                    os.truncate(instance.output, 0)

    async def _watch(self, instance: Instance, process: Process) -> None:
        """Notice the end of a process of which nothing is asked just now."""
        how = await process.end(patience=None)
        if not process.is_late:  # who asked says so
            self._crashed(instance, how)

    def _crashed(self, instance: Instance, how: str) -> None:
        if instance.loss is None:
            said = log_tail(instance.output)
            log.error("instance crashed", extra={**fields(instance), "how": how, "said": said})
            self.end(instance, Loss("crashed", f"crashed: its process ended ({how})"))

    async def _clear_away(self, instance: Instance, kindly: bool) -> None:
        if instance.beginning is not None and not instance.beginning.done():
            instance.beginning.cancel()
            await asyncio.wait({instance.beginning})
        try:
            if kindly and instance.process is not None:
                with contextlib.suppress(asyncio.TimeoutError, ProcessGone, Refusal):  # it is killed next in any case
                    await instance.process.ask({"op": "close"}, CLOSE_TIMEOUT)
            await self.clear(instance)
        finally:
            if instance.has_slot:
                instance.has_slot = False
                self.slots.give_back()


def fields(instance: Instance) -> dict[str, Any]:
    """What a log line says of an instance; its id only in part, for who knows it can use it."""
    return {
        "environment": instance.environment.name,
        "instance": instance.id[:12],
        "task_id": instance.task_id[:200],
        "steps": instance.steps,
        "pid": instance.process.pid if instance.process is not None else None,
    }
