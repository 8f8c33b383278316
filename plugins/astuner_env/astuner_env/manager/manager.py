"""What can be asked of the service, in terms of environments and instances; how these come to life and to their end.

Invariants.  One thing at a time happens in an instance.  A request with an id is carried out at most once.  A release
never waits for what is under way: it kills it, as is killed what takes too long.  An instance that is gone is never
made anew behind its client's back: its state is lost, and every later request for it is told so.  Whatever ends an
instance, its process is dead before its slot is given to another, and what it wrote is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astuner import in_daemon_thread
from astuner.contracts.errors import RunError
from astuner_env.manager.capacity import Share, excesses
from astuner_env.manager.metrics import Metrics
from astuner_env.manager.process import Process, ProcessGone, log_tail
from astuner_env.manager.refusal import Latest, Loss, Refusal, absence
from astuner_env.manager.served import ServedEnvironment
from astuner_sandbox.isolation.scratch import Root, clear
from astuner_sandbox.isolation.zygotes import Keeper, ZygoteFailed

_KEPT_ANSWERS = 4
"""How many answers are kept; a client has one action under way, so it can miss the last answer only."""
_REMEMBERED_IDS = 1000
"""How many ids without an answer are known; clients send again only what is under way."""


class Replays:
    """The actions of one instance that carried an id: a request that is sent again gets the first one's answer.

    A client whose answer was lost on the way cannot know whether its action was carried out, so it gives every action
    an id and may send it again, also while the first one is still under way.  Invariant: for one id of the last
    thousand, the work is begun once.
    """

    def __init__(self) -> None:
        self._answers: dict[str, tuple[Any, asyncio.Task[Any]]] = {}
        self._older: Latest[None] = Latest(_REMEMBERED_IDS)

    async def once(
        self, request_id: str, action: Any, work: Callable[[], Coroutine[Any, Any, Any]]
    ) -> tuple[Any, bool]:
        """The answer of ``work``, and whether it was begun earlier; raises what it raised.

        :raises Refusal: bad_request; the id belonged to another action, or to one too long ago.
        """
        if request_id in self._older:
            raise Refusal(
                "bad_request",
                f"the request {request_id!r} was carried out already, and its answer is no longer kept; "
                "give every action a request_id of its own",
            )
        found = self._answers.get(request_id)
        if found is not None and _written(found[0]) != _written(action):
            raise Refusal(
                "bad_request",
                f"the request_id {request_id!r} was used for another action; give every action one of its own",
            )
        again = found is not None
        if found is None:
            found = action, asyncio.ensure_future(work())
            found[1].add_done_callback(_look_at)
            self._answers[request_id] = found
            self._forget()
        return await asyncio.shield(found[1]), again

    def _forget(self) -> None:
        for request_id in [r for r, (_, task) in self._answers.items() if task.done()][:-_KEPT_ANSWERS]:
            del self._answers[request_id]
            self._older[request_id] = None


def _written(action: Any) -> str:
    return json.dumps(action, sort_keys=True)  # 1, 1.0 and true are equal in Python, and are three actions


def _look_at(task: asyncio.Future[Any]) -> None:
    """A done callback: if nobody waits for the error any more, asyncio need not complain."""
    if not task.cancelled():
        task.exception()


@dataclass(eq=False)
class Instance:
    """What the manager keeps about an instance; it alone writes to it."""

    id: str
    environment: ServedEnvironment
    task_id: str
    folder: Path
    """Its scratch folder; `output` lies beside it."""
    created: float
    used: float
    process: Process | None = None
    beginning: asyncio.Future[Any] | None = None
    watch: asyncio.Future[None] | None = None
    clearing: asyncio.Task[None] | None = None
    has_slot: bool = False
    steps: int = 0
    is_over: bool = False
    replays: Replays = field(default_factory=Replays)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    loss: Loss | None = None
    """How it ended; None while it lives."""

    @property
    def output(self) -> Path:
        """The file with what its process prints."""
        return self.folder.with_name(self.folder.name + ".log")

    @property
    def is_busy(self) -> bool:
        """Whether something is under way in it, its creation included."""
        return self.lock.locked()


log = logging.getLogger("astuner_env.instances")

START_TIMEOUT = 180.0
"""Seconds to import an environment; a first import from a cold disk is slow."""
CLOSE_TIMEOUT = 5.0
"""Seconds an environment has to put its things away before its process is killed."""
_DEATH = 10.0
_LARGEST_OUTPUT = 16 << 20
RETRY_AFTER = 5
"""Seconds after which a client that found no slot may ask again."""
LONGEST_QUEUE = 1024
REMEMBERED = 10_000
"""Instances that are gone and whose end is still known, for who asks after them."""


class Slots:
    """How many instances may exist at once, and who waits for the next one; for one event loop.

    First come, first served.  Invariant: at most `size` slots are taken; one that is given to a waiter who has
    meanwhile gone away goes to the next.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def take(self, patience: float, *, first: bool = False) -> None:
        """Wait for a slot.

        :param patience: seconds to wait.
        :param first: before all others: the caller has just given one up.
        :raises Refusal: busy; none became free, or too many wait already.
        """
        if self.taken < self.size and not self._waiting:
            self.taken += 1
            return
        if len(self._waiting) >= LONGEST_QUEUE:
            raise self._busy(f"and {LONGEST_QUEUE} requests wait for one")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.appendleft(turn) if first else self._waiting.append(turn)
        try:
            await asyncio.wait({turn}, timeout=patience)
        except asyncio.CancelledError:
            if turn.done():
                self.give_back()
            else:
                self._waiting.remove(turn)
            raise
        if not turn.done():
            self._waiting.remove(turn)
            raise self._busy(f"and none became free within {patience:g} s")

    def give_back(self) -> None:
        """A slot is free: the next waiter has it."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self.taken -= 1

    def _busy(self, why: str) -> Refusal:
        return Refusal(
            "busy",
            f"all {self.size} instances are taken, {why}; ask again later, or start the service with a larger "
            "--max-instances",
            retry_after=RETRY_AFTER,
        )


class Manager:
    """Serves environments to one event loop.

    :param root: a folder of its own, with one for each environment's zygote and each instance; nothing is written
        elsewhere, and no name in it comes from a request.
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
        self.slots = Slots(max_instances)
        self.instances: dict[str, Instance] = {}
        self.ends: Latest[Loss] = Latest(REMEMBERED)
        self.is_stopping = False
        self._patience = patience
        self._clock = clock
        self._root = root
        self._keepers = {e.name: self._keeper(e) for e in environments}
        self._clearings: set[asyncio.Task[None]] = set()
        self._listing = asyncio.Semaphore(2)
        self._listers: set[Instance] = set()

    async def start(self) -> None:
        """Import every environment, each in its own interpreter.

        :raises RunError: one cannot be; says which, why, and what to type.
        """
        await asyncio.gather(*map(self._start, self._keepers))

    async def _start(self, name: str) -> None:
        try:
            await in_daemon_thread(self._keepers[name].ready, name="astuner-zygote-start")
        except ZygoteFailed as e:
            hint = self.environments[name].hint
            how = f"\ntype: {hint}" if hint else ""
            raise RunError(f"the environment {name!r} cannot be served: {e}{how}") from None

    def _keeper(self, environment: ServedEnvironment) -> Keeper:
        name, home = environment.name, self._root.path / environment.name / "zygote"
        home.mkdir(mode=0o700, parents=True)

        def died(pid: int | None) -> None:
            log.warning("a zygote died", extra={"environment": name, "pid": pid})
            self.metrics.zygote_restarts.labels(name).inc()

        return Keeper(environment.zygote(home), START_TIMEOUT, died)

    async def stop(self) -> None:
        """End every instance and every zygote, without waiting for what is under way."""
        self.is_stopping = True
        for instance in list(self.instances.values()):
            self._end(instance, Loss("stopped", "ended with the service"))
        closing = (in_daemon_thread(it.close, name="astuner-zygote-close") for it in self._keepers.values())
        await asyncio.gather(*closing)
        if self._clearings:
            await asyncio.wait(self._clearings, timeout=_DEATH)

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
        found = self.instances.get(instance_id)
        if found is None:
            raise absence(instance_id, self.ends.get(instance_id))
        return found

    def zygotes(self) -> dict[str, int]:
        """Environment -> the pid of the living process that its instances are forked from."""
        return {name: keeper.pid for name, keeper in self._keepers.items() if keeper.pid is not None}

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
        seconds = environment.provider.create_timeout
        async with self._listing:
            lister = self._new(environment, "", "")
            self._listers.add(lister)
            try:
                lister.process = await self._fork(lister)
                with self.metrics.seconds[environment.name, "tasks"].time():
                    answer: dict[str, Any] = await lister.process.ask(question, seconds)
                return answer
            except asyncio.TimeoutError:
                raise Refusal("timeout", f"the tasks did not come within {seconds:g} s") from None
            except ProcessGone as e:
                how = lister.loss.message if lister.loss is not None else f"ended: {e}"
                raise Refusal("env_error", f"the process that lists the tasks {how}") from None
            finally:
                self._listers.discard(lister)
                await self._clear(lister)

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
        if self.is_stopping:
            raise Refusal("busy", "the service is stopping", retry_after=30)
        instance_id = instance_id or secrets.token_hex(16)
        before = self.instances.get(instance_id)
        successor = before is not None and before.has_slot
        if before is not None:
            self._end(before, Loss("replaced", "was replaced by another create with the same id"))
        self.ends.pop(instance_id, None)
        instance = self._new(environment, str(task["task_id"]), instance_id)
        question = {"op": "reset", "task": dict(task), "params": dict(params)}
        async with instance.lock:  # what is asked of it meanwhile waits
            self.instances[instance_id] = instance
            work = self._begin(instance, question, self._patience, successor=successor, is_wanted=is_wanted)
            instance.beginning = asyncio.ensure_future(work)
            try:
                answer = await instance.beginning
            except BaseException as e:
                was_ended = instance.loss is not None and isinstance(e, asyncio.CancelledError)
                self._end(instance, Loss("failed", "could not be created"))
                if not was_ended:
                    raise
            if instance.loss is not None:
                raise absence(instance_id, instance.loss)
            if not is_wanted():
                loss = Loss("abandoned", "was given up: its client went away while it was made")
                self._end(instance, loss)
                raise absence(instance_id, loss)
        self.metrics.created.labels(environment.name).inc()
        log.info("instance created", extra=_fields(instance))
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
                result: dict[str, Any] = await self._ask(instance, question, instance.environment.provider.step_timeout)
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
            seconds = instance.environment.provider.evaluate_timeout
            result: dict[str, Any] = await self._ask(instance, {"op": "evaluate"}, seconds)
            return result

    async def describe(self, instance_id: str) -> Any:
        """What `Environment.describe` says."""
        instance = self.instance(instance_id)
        async with instance.lock:
            return await self._ask(instance, {"op": "describe"}, instance.environment.provider.step_timeout)

    async def release(self, instance_id: str) -> bool:
        """End an instance; False when there is none. Returns when its process is dead."""
        instance = self.instances.get(instance_id)
        if instance is None:
            return False
        await asyncio.shield(self._end(instance, Loss("released", "was released"), kindly=not instance.is_busy))
        return True

    async def sweep(self) -> None:
        """End what nobody has asked for too long; keep what processes print within bounds."""
        now = self._clock()
        for instance in list(self.instances.values()):
            if not instance.is_busy and now - instance.used > self.idle_ttl:
                loss = Loss("expired", f"was ended because nobody asked it anything for {self.idle_ttl:g} s")
                self._end(instance, loss, kindly=True)
        for instance in list(self.instances.values()):
            with contextlib.suppress(OSError):  # it printed nothing yet, or is gone
                if instance.output.stat().st_size > _LARGEST_OUTPUT:
                    os.truncate(instance.output, 0)

    async def hold_limits(self) -> None:
        """End what has more memory or more processes than it may, with all that it started."""
        zygotes = self.zygotes()
        shares = {
            instance: Share(
                instance.process.pid,
                zygotes.get(instance.environment.name),
                instance.environment.max_memory_mb,
                instance.environment.provider.max_processes,
            )
            for instance in [*self.instances.values(), *self._listers]
            if instance.process is not None
        }
        if not shares:
            return
        found = await in_daemon_thread(excesses, shares, name="astuner-env-limits")
        for instance, (kind, how) in found.items():
            loss = Loss(kind, f"was ended: it {how}")
            if instance not in self._listers:
                self._end(instance, loss)
            elif instance.process is not None:
                instance.loss = loss
                instance.process.kill()

    # -------------------------------------------------------------- life and end

    def _new(self, environment: ServedEnvironment, task_id: str, instance_id: str) -> Instance:
        """An instance that has no process yet and is in no table."""
        home = self._root.path / environment.name
        home.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have tidied temporary files up
        folder = Path(tempfile.mkdtemp(prefix="i-", dir=home))
        return Instance(instance_id, environment, task_id, folder, now := self._clock(), now)

    async def _begin(
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
        process = instance.process = await self._fork(instance)
        instance.watch = asyncio.ensure_future(self._watch(instance, process))
        left = max(1.0, instance.environment.provider.create_timeout - (self._clock() - began))
        answer: dict[str, Any] = await self._ask(instance, question, left)
        instance.is_over = bool(answer["terminated"] or answer["truncated"])
        return answer

    async def _fork(self, instance: Instance) -> Process:
        """A process for an instance; raises `Refusal` when none can be made."""
        environment = instance.environment
        options = {
            "entry": environment.provider.target,
            "environment": environment.name,
            "folder": str(instance.folder),
            "max_memory_mb": environment.max_memory_mb,
        }
        try:
            return await Process.start(self._keepers[environment.name], options, instance.output)
        except ZygoteFailed as e:
            log.error("no process can be started", extra={"environment": environment.name, "error": str(e)})
            last = str(e).strip().splitlines()[-1:] or ["it said nothing"]
            how = f"type: {environment.hint}" if environment.hint else "look at the service's log"
            what = f"no process of the environment {environment.name!r} can be started; {how}"
            raise Refusal("env_error", what, place=f" ({last[0][:500]})", traceback=str(e)) from None

    async def _ask(self, instance: Instance, question: Mapping[str, Any], seconds: float) -> Any:
        """Ask the process of an instance whose lock the caller holds.

        :raises Refusal: it is gone, was killed because it took too long, or its environment raised.
        """
        if instance.loss is not None or instance.process is None:
            raise absence(instance.id, instance.loss)
        operation = str(question["op"])
        try:
            with self.metrics.seconds[instance.environment.name, operation].time():
                answer = await instance.process.ask(question, seconds)
        except asyncio.TimeoutError:
            took = f"was killed: {operation} took longer than {seconds:.3g} s"
            self._end(instance, Loss("timeout", took))
            raise Refusal("timeout", f"Instance {instance.id} {took}; its state is lost", reason="timeout") from None
        except ProcessGone as e:
            self._crashed(instance, str(e))
            raise absence(instance.id, instance.loss) from None
        except Refusal as e:
            if e.code == "env_error":
                log.error("environment raised", extra={**_fields(instance), "op": operation, "error": e.traceback})
            raise
        finally:
            instance.used = self._clock()
        if instance.loss is not None:
            raise absence(instance.id, instance.loss)
        return answer

    def _end(self, instance: Instance, loss: Loss, *, kindly: bool = False) -> asyncio.Task[None]:
        """Make an instance gone, at once; the task is done when nothing of it is left.

        :param kindly: let it close its environment first.
        """
        if instance.clearing is None:
            instance.loss = loss
            if self.instances.get(instance.id) is instance:
                del self.instances[instance.id]
                if loss.kind not in ("replaced", "failed"):
                    self.ends[instance.id] = loss
            if instance.process is not None and not kindly:
                instance.process.kill()  # which tells whoever waits for its answer
            if not loss.was_asked_for:
                self.metrics.lost.labels(instance.environment.name, loss.kind).inc()
            log.info("instance ended", extra={**_fields(instance), "reason": loss.kind, "how": loss.message})
            instance.clearing = asyncio.get_running_loop().create_task(self._clear_away(instance, kindly))
            self._clearings.add(instance.clearing)
            instance.clearing.add_done_callback(self._clearings.discard)
        return instance.clearing

    async def _clear(self, instance: Instance) -> None:
        """Kill its process, and remove what it wrote when that is dead."""
        if instance.process is not None:
            instance.process.kill()
            if not await instance.process.wait(_DEATH):
                log.error("a process does not die", extra=_fields(instance))
        await in_daemon_thread(clear, instance.folder, instance.output, name="astuner-env-remove")

    async def _watch(self, instance: Instance, process: Process) -> None:
        """Notice the end of a process of which nothing is asked just now."""
        how = await process.end(patience=None)
        if not process.is_late:  # who asked says so
            self._crashed(instance, how)

    def _crashed(self, instance: Instance, how: str) -> None:
        if instance.loss is None:
            said = log_tail(instance.output)
            log.error("instance crashed", extra={**_fields(instance), "how": how, "said": said})
            self._end(instance, Loss("crashed", f"crashed: its process ended ({how})"))

    async def _clear_away(self, instance: Instance, kindly: bool) -> None:
        if instance.beginning is not None and not instance.beginning.done():
            instance.beginning.cancel()
            await asyncio.wait({instance.beginning})
        try:
            if kindly and instance.process is not None:
                with contextlib.suppress(asyncio.TimeoutError, ProcessGone, Refusal):  # it is killed next in any case
                    await instance.process.ask({"op": "close"}, CLOSE_TIMEOUT)
            await self._clear(instance)
        finally:
            if instance.has_slot:
                instance.has_slot = False
                self.slots.give_back()


def _fields(instance: Instance) -> dict[str, Any]:
    """What a log line says of an instance; its id only in part, for who knows it can use it."""
    return {
        "environment": instance.environment.name,
        "instance": instance.id[:12],
        "task_id": instance.task_id[:200],
        "steps": instance.steps,
        "pid": instance.process.pid if instance.process is not None else None,
    }
