"""Manage environments and instances: create, call and end them.

Invariants:

- An instance executes one operation at a time.
- A request with an ID is executed at most once.
- A release never waits for a running operation: it kills the process. A timeout does the same.
- An instance that ended is never recreated implicitly: its state is lost, and later requests for it get an error.
- When an instance ends, its process is dead before its slot is reused, and its files are removed.
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
"""Number of stored answers. A client has one action in flight, so it can miss only the last answer."""
_REMEMBERED_IDS = 1000
"""Number of known request IDs without a stored answer. Clients repeat only the action in flight."""


class Replays:
    """Answers to the actions of one instance that have a request ID, for requests that are sent again.

    If an answer is lost, a client cannot know whether its action was executed. It therefore gives every action an ID
    and may send it again, even while the first request is running. Invariant: the work for each of the last 1,000 IDs
    starts once.
    """

    def __init__(self) -> None:
        self._answers: dict[str, tuple[Any, asyncio.Task[Any]]] = {}
        self._older: Latest[None] = Latest(_REMEMBERED_IDS)

    async def once(
        self, request_id: str, action: Any, work: Callable[[], Coroutine[Any, Any, Any]]
    ) -> tuple[Any, bool]:
        """Return the answer of ``work`` and whether it had started earlier; raise its exception.

        :raises Refusal: bad_request, if the ID belongs to another action or its answer is no longer stored.
        """
        if request_id in self._older:
            raise Refusal(
                "bad_request",
                f"The request {request_id!r} was already executed and its answer is no longer stored. "
                "Use a new request_id for every action.",
            )
        found = self._answers.get(request_id)
        if found is not None and _written(found[0]) != _written(action):
            raise Refusal(
                "bad_request",
                f"The request_id {request_id!r} was used for another action. Use a new request_id for every action.",
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
    return json.dumps(action, sort_keys=True)  # 1, 1.0 and true are equal in Python but are different actions


def _look_at(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a task, so that asyncio does not log it if no one waits for it."""
    if not task.cancelled():
        task.exception()


@dataclass(eq=False)
class Instance:
    """State of an instance; only the manager writes to it."""

    id: str
    environment: ServedEnvironment
    task_id: str
    folder: Path
    """Scratch folder; `output` is next to it."""
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
    """How it ended; None while it is alive."""

    @property
    def output(self) -> Path:
        """File with the standard output and error of its process."""
        return self.folder.with_name(self.folder.name + ".log")

    @property
    def is_busy(self) -> bool:
        """Whether an operation is running, including its creation."""
        return self.lock.locked()


log = logging.getLogger("astuner_env.instances")

START_TIMEOUT = 180.0
"""Seconds to import an environment; the first import from a cold disk is slow."""
CLOSE_TIMEOUT = 5.0
"""Seconds for an environment to clean up before its process is killed."""
_DEATH = 10.0
_LARGEST_OUTPUT = 16 << 20
RETRY_AFTER = 5
"""Seconds after which a client that got no slot may retry."""
LONGEST_QUEUE = 1024
REMEMBERED = 10_000
"""Number of ended instances whose reason is still known."""


class Slots:
    """Slots for instances and a first-in, first-out queue for them, on one event loop.

    Invariant: at most `size` slots are taken. A slot assigned to a cancelled waiter goes to the next one.
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

        :param patience: Seconds to wait.
        :param first: Whether to skip the queue, because the caller has just freed a slot.
        :raises Refusal: busy, if no slot became free or the queue is full.
        """
        if self.taken < self.size and not self._waiting:
            self.taken += 1
            return
        if len(self._waiting) >= LONGEST_QUEUE:
            raise self._busy(f"and {LONGEST_QUEUE} requests are waiting")
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
            raise self._busy(f"and no slot became free within {patience:g} s")

    def give_back(self) -> None:
        """Free a slot and assign it to the next waiter."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self.taken -= 1

    def _busy(self, why: str) -> Refusal:
        return Refusal(
            "busy",
            f"All {self.size} instances are in use {why}. Retry later, or start the service with a larger "
            "--max-instances.",
            retry_after=RETRY_AFTER,
        )


class Manager:
    """Manager of environments and their instances on one event loop.

    :param root: Private folder with a subfolder for each zygote and instance. Nothing is written elsewhere, and no
        name in it comes from a request.
    :param idle_ttl: Seconds after which an idle instance is ended.
    :param patience: Seconds that a request for a new instance waits for a slot.
    :param clock: Returns monotonic seconds.
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
        """Import every environment in its interpreter.

        :raises RunError: An import failed; the message contains the environment, the reason and a command.
        """
        await asyncio.gather(*map(self._start, self._keepers))

    async def _start(self, name: str) -> None:
        try:
            await in_daemon_thread(self._keepers[name].ready, name="astuner-zygote-start")
        except ZygoteFailed as e:
            hint = self.environments[name].hint
            how = f"\nRun: {hint}" if hint else ""
            raise RunError(f"Could not start the environment {name!r}: {e}{how}") from None

    def _keeper(self, environment: ServedEnvironment) -> Keeper:
        name, home = environment.name, self._root.path / environment.name / "zygote"
        home.mkdir(mode=0o700, parents=True)

        def died(pid: int | None) -> None:
            log.warning("a zygote died", extra={"environment": name, "pid": pid})
            self.metrics.zygote_restarts.labels(name).inc()

        return Keeper(environment.zygote(home), START_TIMEOUT, died)

    async def stop(self) -> None:
        """End every instance and every zygote without waiting for running operations."""
        self.is_stopping = True
        for instance in list(self.instances.values()):
            self._end(instance, Loss("stopped", "ended with the service"))
        closing = (in_daemon_thread(it.close, name="astuner-zygote-close") for it in self._keepers.values())
        await asyncio.gather(*closing)
        if self._clearings:
            await asyncio.wait(self._clearings, timeout=_DEATH)

    def environment(self, name: str | None) -> ServedEnvironment:
        """Return the environment called ``name``. An empty name or ``default`` selects the only one.

        :raises Refusal: unknown_env.
        """
        if name in (None, "", "default") and len(self.environments) == 1:
            return next(iter(self.environments.values()))
        found = self.environments.get(name or "")
        if found is None:
            known = ", ".join(sorted(self.environments))
            raise Refusal("unknown_env", f"Unknown env_type {name!r}. Environments of this service: {known}.")
        return found

    def instance(self, instance_id: str) -> Instance:
        """Return the instance with this ID.

        :raises Refusal: unknown_instance, or instance_lost with the reason.
        """
        found = self.instances.get(instance_id)
        if found is None:
            raise absence(instance_id, self.ends.get(instance_id))
        return found

    def zygotes(self) -> dict[str, int]:
        """Return the process ID of each environment's zygote, if it is running."""
        return {name: keeper.pid for name, keeper in self._keepers.items() if keeper.pid is not None}

    def status(self, instance_id: str) -> dict[str, Any]:
        """Return the status of an instance without calling its process; raise like `instance`."""
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
        """Return the tasks of a split from a temporary process: ``{"tasks": [...], "total": int}``.

        :param limit: Maximum number of tasks; -1 returns the IDs of all tasks.
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
                raise Refusal("timeout", f"The environment did not list its tasks within {seconds:g} s.") from None
            except ProcessGone as e:
                how = lister.loss.message if lister.loss is not None else f"ended: {e}"
                raise Refusal("env_error", f"The process that lists the tasks {how}.") from None
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
        """Create an instance on a task; return it and the fields of the first `StepResult`.

        :param task: ``task_id``, and optionally ``main_query`` and ``metadata``.
        :param instance_id: An existing instance with this ID is replaced: its client retries an unanswered request.
        :param is_wanted: Returns whether the client is still waiting.
        """
        if self.is_stopping:
            raise Refusal("busy", "The service is stopping.", retry_after=30)
        instance_id = instance_id or secrets.token_hex(16)
        before = self.instances.get(instance_id)
        successor = before is not None and before.has_slot
        if before is not None:
            self._end(before, Loss("replaced", "was replaced by another create with the same id"))
        self.ends.pop(instance_id, None)
        instance = self._new(environment, str(task["task_id"]), instance_id)
        question = {"op": "reset", "task": dict(task), "params": dict(params)}
        async with instance.lock:  # other requests for the instance wait
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
                loss = Loss("abandoned", "was abandoned: its client disconnected while it was being created")
                self._end(instance, loss)
                raise absence(instance_id, loss)
        self.metrics.created.labels(environment.name).inc()
        log.info("instance created", extra=_fields(instance))
        return instance, answer

    async def step(self, instance_id: str, action: Mapping[str, Any], request_id: str | None = None) -> dict[str, Any]:
        """Execute an action and return the fields of a `StepResult`.

        :param request_id: Guarantees at most one execution: a repeated request returns the first answer.
        """
        instance = self.instance(instance_id)

        async def act() -> dict[str, Any]:
            async with instance.lock:
                if instance.loss is None and instance.is_over:
                    raise Refusal("over", f"The episode of instance {instance_id} is over. Create a new instance.")
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
        """Return the fields of an `Evaluation`, with ``success`` true or false."""
        instance = self.instance(instance_id)
        async with instance.lock:
            seconds = instance.environment.provider.evaluate_timeout
            result: dict[str, Any] = await self._ask(instance, {"op": "evaluate"}, seconds)
            return result

    async def describe(self, instance_id: str) -> Any:
        """Return the result of `Environment.describe`."""
        instance = self.instance(instance_id)
        async with instance.lock:
            return await self._ask(instance, {"op": "describe"}, instance.environment.provider.step_timeout)

    async def release(self, instance_id: str) -> bool:
        """End an instance and wait for its process to die; return False if it does not exist."""
        instance = self.instances.get(instance_id)
        if instance is None:
            return False
        await asyncio.shield(self._end(instance, Loss("released", "was released"), kindly=not instance.is_busy))
        return True

    async def sweep(self) -> None:
        """End idle instances and truncate large output files."""
        now = self._clock()
        for instance in list(self.instances.values()):
            if not instance.is_busy and now - instance.used > self.idle_ttl:
                loss = Loss("expired", f"was ended after {self.idle_ttl:g} s without requests")
                self._end(instance, loss, kindly=True)
        for instance in list(self.instances.values()):
            with contextlib.suppress(OSError):  # no output yet, or the file was removed
                if instance.output.stat().st_size > _LARGEST_OUTPUT:
                    os.truncate(instance.output, 0)

    async def hold_limits(self) -> None:
        """End instances beyond their memory or process limit, with all their processes."""
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
            loss = Loss(kind, f"was ended because it {how}")
            if instance not in self._listers:
                self._end(instance, loss)
            elif instance.process is not None:
                instance.loss = loss
                instance.process.kill()

    # -------------------------------------------------------------- life and end

    def _new(self, environment: ServedEnvironment, task_id: str, instance_id: str) -> Instance:
        """Return an instance without a process that is not registered yet."""
        home = self._root.path / environment.name
        home.mkdir(mode=0o700, parents=True, exist_ok=True)  # temporary files may have been cleaned up
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
        """Wait for a slot, fork a process and return the answer to its first question.

        :param successor: Whether it replaces an instance with a slot and therefore gets the next free slot.
        """
        await self.slots.take(patience, first=successor)
        instance.has_slot = True
        if not is_wanted():
            raise Refusal("unknown_instance", "The client disconnected.", reason="abandoned")
        began = self._clock()
        process = instance.process = await self._fork(instance)
        instance.watch = asyncio.ensure_future(self._watch(instance, process))
        left = max(1.0, instance.environment.provider.create_timeout - (self._clock() - began))
        answer: dict[str, Any] = await self._ask(instance, question, left)
        instance.is_over = bool(answer["terminated"] or answer["truncated"])
        return answer

    async def _fork(self, instance: Instance) -> Process:
        """Return a process for an instance; raise `Refusal` if it cannot be started."""
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
            log.error("could not start a process", extra={"environment": environment.name, "error": str(e)})
            last = str(e).strip().splitlines()[-1:] or ["no output"]
            how = f"Run: {environment.hint}" if environment.hint else "See the service's log."
            what = f"Could not start a process of the environment {environment.name!r}. {how}"
            raise Refusal("env_error", what, place=f" ({last[0][:500]})", traceback=str(e)) from None

    async def _ask(self, instance: Instance, question: Mapping[str, Any], seconds: float) -> Any:
        """Call the process of an instance; the caller holds its lock.

        :raises Refusal: The process is gone, was killed after a timeout, or its environment raised an error.
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
            raise Refusal("timeout", f"Instance {instance.id} {took}; its state is lost.", reason="timeout") from None
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
        """End an instance immediately; the returned task completes when its process and files are gone.

        :param kindly: Whether to let it close its environment first.
        """
        if instance.clearing is None:
            instance.loss = loss
            if self.instances.get(instance.id) is instance:
                del self.instances[instance.id]
                if loss.kind not in ("replaced", "failed"):
                    self.ends[instance.id] = loss
            if instance.process is not None and not kindly:
                instance.process.kill()  # callers that wait for an answer get an error
            if not loss.was_asked_for:
                self.metrics.lost.labels(instance.environment.name, loss.kind).inc()
            log.info("instance ended", extra={**_fields(instance), "reason": loss.kind, "how": loss.message})
            instance.clearing = asyncio.get_running_loop().create_task(self._clear_away(instance, kindly))
            self._clearings.add(instance.clearing)
            instance.clearing.add_done_callback(self._clearings.discard)
        return instance.clearing

    async def _clear(self, instance: Instance) -> None:
        """Kill the process and, when it is dead, remove its files."""
        if instance.process is not None:
            instance.process.kill()
            if not await instance.process.wait(_DEATH):
                log.error("could not kill a process", extra=_fields(instance))
        await in_daemon_thread(clear, instance.folder, instance.output, name="astuner-env-remove")

    async def _watch(self, instance: Instance, process: Process) -> None:
        """Detect the end of an idle process."""
        how = await process.end(patience=None)
        if not process.is_late:  # the caller reports timeouts
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
                with contextlib.suppress(
                    asyncio.TimeoutError, ProcessGone, Refusal
                ):  # the process is killed afterwards in any case
                    await instance.process.ask({"op": "close"}, CLOSE_TIMEOUT)
            await self._clear(instance)
        finally:
            if instance.has_slot:
                instance.has_slot = False
                self.slots.give_back()


def _fields(instance: Instance) -> dict[str, Any]:
    """Return the log fields of an instance, with a shortened ID: anyone who knows the ID can use the instance."""
    return {
        "environment": instance.environment.name,
        "instance": instance.id[:12],
        "task_id": instance.task_id[:200],
        "steps": instance.steps,
        "pid": instance.process.pid if instance.process is not None else None,
    }
