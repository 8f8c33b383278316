"""What can be asked of the service, in terms of environments and instances.

Invariants.  One thing at a time happens in an instance.  A request with an id is carried out at most once.  A release
never waits for what is under way: it kills it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astuner_env.manager.ends import absence
from astuner_env.manager.folders import Root
from astuner_env.manager.instance import Instance
from astuner_env.manager.lives import Lives, fields
from astuner_env.manager.metrics import Metrics
from astuner_env.manager.process import ProcessGone
from astuner_env.manager.refusal import Loss, Refusal
from astuner_env.manager.replays import look_at
from astuner_env.manager.served import ServedEnvironment

log = logging.getLogger("astuner_env.instances")


@dataclass(frozen=True)
class Room:
    """How much room there is for instances."""

    active: int
    size: int
    waiting: int
    """Requests that wait for a slot."""


class Manager:
    """Serves environments to one event loop.

    :param idle_ttl: seconds after which an instance that nobody asks is ended.
    :param patience: seconds a request for a new instance waits for a slot.
    :param clock: monotonic seconds.
    """

    def __init__(
        self,
        environments: Sequence[ServedEnvironment],
        root: Root,
        metrics: Metrics,
        *,
        max_instances: int,
        idle_ttl: float,
        patience: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.environments = {e.name: e for e in environments}
        self.metrics = metrics
        self.idle_ttl = idle_ttl
        self.lives = Lives(environments, root, metrics, max_instances, clock)
        self._patience = patience
        self._clock = clock
        self._listing = asyncio.Semaphore(2)

    async def start(self) -> None:
        """Import every environment, each in its own interpreter.

        :raises RunError: one cannot be.
        """
        await self.lives.start()

    async def stop(self) -> None:
        """End every instance and every zygote, without waiting for what is under way."""
        await self.lives.stop()

    def environment(self, name: str | None) -> ServedEnvironment:
        """The environment called ``name``; none or ``default`` means the only one.

        :raises Refusal: unknown_env.
        """
        if name in (None, "", "default") and len(self.environments) == 1:
            return next(iter(self.environments.values()))
        found = self.environments.get(name or "")
        if found is None:
            known = ", ".join(sorted(self.environments))
            raise Refusal("unknown_env", f"unknown env_type {name!r}; this service has {known}")
        return found

    def instance(self, instance_id: str) -> Instance:
        """The living instance with this id.

        :raises Refusal: unknown_instance, or instance_lost and how.
        """
        found = self.lives.instances.get(instance_id)
        if found is None:
            raise self.lives.ends.refusal(instance_id)
        return found

    def room(self) -> Room:
        """How much there is just now."""
        slots = self.lives.slots
        return Room(active=len(self.lives.instances), size=slots.size, waiting=slots.waiting)

    def zygotes(self) -> dict[str, int]:
        """Environment -> the pid of the living process that its instances are forked from."""
        return self.lives.zygotes()

    def count(self, environment: str) -> int:
        """How many instances of an environment there are."""
        return sum(i.environment.name == environment for i in self.lives.instances.values())

    def status(self, instance_id: str) -> dict[str, Any]:
        """What is known about an instance, without asking it; raises as `instance`."""
        found, now = self.instance(instance_id), self._clock()
        return {
            "instance_id": found.id,
            "environment": found.environment.name,
            "task_id": found.task_id,
            "steps": found.steps,
            "is_over": found.is_over,
            "is_busy": found.is_busy,
            "age": round(now - found.created, 3),
            "idle": round(now - found.used, 3),
        }

    async def tasks(
        self, environment: ServedEnvironment, split: str, params: Mapping[str, Any], *, offset: int = 0, limit: int = -1
    ) -> dict[str, Any]:
        """The tasks of a split, asked of a throw-away process: ``{"tasks": [...], "total": int}``.

        :param limit: the most to return; -1 returns all of them, by their ids only.
        """
        question = {"op": "tasks", "split": split, "params": dict(params), "offset": offset, "limit": limit}
        seconds = environment.create_timeout
        async with self._listing:
            lister = self.lives.new(environment, "", "")
            try:
                lister.process = await self.lives.fork(lister)
                work = lister.process.ask(question, seconds)
                answer: dict[str, Any] = await self.lives.timed(environment, "tasks", work)
                return answer
            except asyncio.TimeoutError:
                raise Refusal("timeout", f"the tasks did not come within {seconds:g} s") from None
            except ProcessGone as e:
                raise Refusal("env_error", f"the process that lists the tasks ended: {e}") from None
            except Refusal as e:
                raise _as(e, "unknown_split") from None
            finally:
                await self.lives.clear(lister)

    async def create(
        self,
        environment: ServedEnvironment,
        task: Mapping[str, Any],
        params: Mapping[str, Any],
        instance_id: str | None = None,
        *,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> tuple[Instance, dict[str, Any]]:
        """A new instance, started on a task, and the first `StepResult`'s fields.

        :param task: ``task_id``, and optionally ``main_query`` and ``metadata``.
        :param instance_id: an instance of this id is replaced: its client asks again because it got no answer.
        :param is_wanted: whether the client still waits.
        """
        lives = self.lives
        if lives.is_stopping:
            raise Refusal("busy", "the service is stopping", retry_after=30)
        instance_id = instance_id or secrets.token_hex(16)
        before = lives.instances.get(instance_id)
        successor = before is not None and before.has_slot
        if before is not None:
            lives.end(before, Loss("replaced", "was replaced by another create with the same id"))
        lives.ends.remove(instance_id)
        instance = lives.new(environment, str(task["task_id"]), instance_id)
        question = {"op": "reset", "task": dict(task), "params": dict(params)}
        async with instance.lock:  # what is asked of it meanwhile waits
            lives.instances[instance_id] = instance
            work = lives.begin(instance, question, self._patience, successor=successor, is_wanted=is_wanted)
            instance.beginning = asyncio.ensure_future(work)
            instance.beginning.add_done_callback(look_at)
            try:
                answer = await instance.unless_gone(_result(instance.beginning))
            except BaseException as e:
                lives.end(instance, Loss("failed", "could not be created"))
                raise (_as(e, "unknown_task") if isinstance(e, Refusal) else e) from None
            if not is_wanted():
                loss = Loss("abandoned", "was given up: its client went away while it was made")
                lives.end(instance, loss)
                raise absence(instance_id, loss)
        self.metrics.created.labels(environment.name).inc()
        log.info("instance created", extra=fields(instance))
        return instance, answer

    async def step(self, instance_id: str, action: Mapping[str, Any], request_id: str | None = None) -> dict[str, Any]:
        """Act; a `StepResult`'s fields.

        :param request_id: makes it at most once: sent again, it returns the first one's answer.
        """
        instance = self.instance(instance_id)

        async def act() -> dict[str, Any]:
            async with instance.lock:
                if instance.loss is None and instance.is_over:
                    raise Refusal("over", f"the episode of instance {instance_id} is over; create another one")
                question = {"op": "step", "action": dict(action)}
                result: dict[str, Any] = await self.lives.ask(instance, question, instance.environment.step_timeout)
                instance.steps += 1
                instance.is_over = bool(result["terminated"] or result["truncated"])
                return result

        if request_id is None:
            return await act()
        answer, again = await instance.replays.once(request_id, action, act)
        if again:
            self.metrics.replayed.labels(instance.environment.name).inc()
        return dict(answer)

    async def evaluate(self, instance_id: str) -> dict[str, Any]:
        """An `Evaluation`'s fields, with ``success`` true or false."""
        instance = self.instance(instance_id)
        async with instance.lock:
            seconds = instance.environment.evaluate_timeout
            result: dict[str, Any] = await self.lives.ask(instance, {"op": "evaluate"}, seconds)
            return result

    async def describe(self, instance_id: str) -> Any:
        """What `Environment.describe` says."""
        instance = self.instance(instance_id)
        async with instance.lock:
            return await self.lives.ask(instance, {"op": "describe"}, instance.environment.step_timeout)

    async def release(self, instance_id: str) -> bool:
        """End an instance; False when there is none. Returns when its process is dead."""
        instance = self.lives.instances.get(instance_id)
        if instance is None:
            return False
        await asyncio.shield(self.lives.end(instance, Loss("released", "was released"), kindly=not instance.is_busy))
        return True

    async def sweep(self) -> None:
        """End what nobody has asked for too long."""
        now = self._clock()
        for instance in list(self.lives.instances.values()):
            if not instance.is_busy and now - instance.used > self.idle_ttl:
                loss = Loss("expired", f"was ended because nobody asked it anything for {self.idle_ttl:g} s")
                self.lives.end(instance, loss, kindly=True)
        self.lives.shorten_outputs()


async def _result(task: asyncio.Future[Any]) -> Any:
    return await task


def _as(refusal: Refusal, code: str) -> Refusal:
    """A ValueError of the environment's means one thing in each operation."""
    return Refusal(code, refusal.message, traceback=refusal.traceback) if refusal.code == "bad_request" else refusal
