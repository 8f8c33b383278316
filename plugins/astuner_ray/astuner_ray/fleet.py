"""Run episodes on a cluster in Ray actors that hold the agent, its judge and an engine.

The driver decides what runs and when (core's `RolloutPool`); a worker runs many episodes concurrently and returns each
when it is complete.  Invariant: if a worker dies, only its own episodes are affected; they start over in another worker
or count as lost, and are never scored.  A machine that joins a multi-machine cluster during a run gets a worker.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from astuner import EpisodeRunner, one_model
from astuner.contracts.backbone import InferenceEngine
from astuner.contracts.errors import RunError
from astuner.contracts.types import Episode, SamplingParams, StopReason, WorkflowTask
from astuner_models.serving import load_tokenizer, make_codec
from astuner_ray.cluster import last_words, relocate

CLOSE_SECONDS = 10.0
"""Seconds that cancelled episodes have to finish before their workers end."""
LOOK_SECONDS = 5.0
"""Seconds between checks for new machines."""


Connect: TypeAlias = "Callable[[], InferenceEngine]"


class EpisodeWorker:
    """Asynchronous Ray actor that runs episodes."""

    def __init__(self, runner: EpisodeRunner, environ: Mapping[str, str], model: str, connect: Connect) -> None:
        """:param environ: Variables that agents and judges need, e.g. the address of the environment service."""
        os.environ.update(environ)
        self._runner = runner
        self._runner.config = relocate(runner.config)
        trusted = runner.config.astuner.model.trust_remote_code
        codec = make_codec(self._runner.config, load_tokenizer(model, trust_remote_code=trusted))
        self._models = one_model(connect(), codec)
        self._runner.prepare()
        self._running = 0

    async def run(self, workflow_task: WorkflowTask, sampling: SamplingParams) -> Episode:
        """Run one attempt at a task, from prompt to verdict."""
        self._running += 1
        try:
            return await self._runner.run(workflow_task, self._models, sampling)
        finally:
            self._running -= 1

    async def judge_group(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Return attempts at one task, which `run` left open, with their verdicts."""
        self._running += 1
        try:
            return await self._runner.judge_group(episodes)
        finally:
            self._running -= 1

    async def pid(self) -> int:
        """Return the PID of the worker."""
        return os.getpid()

    async def close(self) -> None:
        """Wait for episodes that are being cancelled, and stop what they started."""
        while self._running:
            await asyncio.sleep(0.05)
        await self._runner.close()


class _Lost(Exception):
    """All workers that ran it died; the message explains how."""


@dataclass
class _Seat:
    """A slot of the fleet: its actor and the number of episodes running in it."""

    actor: Any
    running: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Fleet:
    """The workers of a run; an `astuner.rollout.models.EpisodeHost`."""

    def __init__(
        self,
        runner: EpisodeRunner,
        connect: Connect,
        *,
        workers: int,
        environ: Mapping[str, str],
        model: str,
        note: Callable[[str], None],
        here: bool = False,
    ) -> None:
        """Start ``workers`` actors.

        :param connect: Creates a worker's engine inside the worker.
        :param model: Folder or Hugging Face name of the model, for its tokenizer.
        :param note: Called with a message when a worker dies.
        :param here: Start all workers on the caller's machine instead of spreading them over the cluster.
        :raises RunError: A worker cannot be created.
        """
        import ray

        rollout = runner.config.astuner.rollout
        self._max_retries, self._note = rollout.max_retries, note
        self._arguments = (runner, dict(environ), model, connect)
        self._options = {
            "num_cpus": 0,  # an agent's own code needs little; GPUs and trainers reserve the machine
            "max_concurrency": rollout.max_env_worker + 8,  # all episodes may run here, and `close` must get through
        }
        self._where = _on(ray.get_runtime_context().get_node_id()) if here else "SPREAD"
        self._machines = _machines()
        # in a single-machine cluster files do not travel, so a machine that joins would lack them
        grows = not here and "working_dir" in ray.get_runtime_context().runtime_env
        self._look_at = time.monotonic() + LOOK_SECONDS if grows else math.inf
        self._coming: dict[Any, _Seat] = {}
        """Future of a new worker's PID -> its slot, on machines that have joined."""
        # assign machines in turn: "SPREAD" places actors without resources on one machine, soft affinity on a few
        turns = [self._where] if here else [_on(label) for label in sorted(self._machines)]
        self._seats = [_Seat(self._start(turns[n % len(turns)])) for n in range(workers)]
        self.pids()  # fail now: a worker that cannot be created would look like one that died

    async def run(self, workflow_task: WorkflowTask, sampling: SamplingParams) -> Episode:
        """Run one attempt in the least busy worker; start over in another worker if that one dies.

        :raises AstunerError: An error that an episode cannot handle, e.g. a mistake in the config.
        """
        try:
            episode: Episode
            episode, lost = await self._somewhere("run", workflow_task, sampling)
        except _Lost as e:
            return Episode(
                workflow_task=workflow_task,
                turns=(),
                output=None,
                verdict=None,
                stop_reason=StopReason.WORKER_LOST,
                error=str(e),
                retries=self._max_retries,
            )
        return replace(episode, retries=episode.retries + lost)

    async def judge_group(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        """Return attempts at one task, which `run` left open, with their verdicts; retry if a worker dies.

        :raises AstunerError: See `run`.
        """
        try:
            judged: Sequence[Episode]
            judged, _ = await self._somewhere("judge_group", episodes)
        except _Lost as e:
            return [episode.closed(StopReason.JUDGE_FAILED, str(e)) for episode in episodes]
        return judged

    async def _somewhere(self, method: str, *arguments: Any) -> tuple[Any, int]:
        """Call ``method`` in the least busy worker; return its result and the number of workers that died before.

        :raises _Lost: Worker after worker died.
        """
        from ray.exceptions import RayError

        why, lost = "", 0
        while lost <= self._max_retries:
            await self._look()
            seat = min(self._seats, key=lambda s: s.running)
            actor = seat.actor
            seat.running += 1
            try:
                return await _finished(getattr(actor, method).remote(*arguments)), lost
            except RayError as e:  # it died, was evicted because of its memory, or its node is gone
                why, lost = f"the worker that ran it died: {last_words(e)}", lost + 1
                await self._replace(seat, actor, last_words(e))
            finally:
                seat.running -= 1
        raise _Lost(f"{why} ({lost} times)")

    def pids(self) -> list[int]:
        """Return the PIDs of the workers.

        :raises RunError: A worker is gone.
        :raises asyncio.CancelledError: The calling task was cancelled.
        """
        import ray
        from ray.exceptions import RayError, TaskCancelledError

        try:
            return [int(pid) for pid in ray.get([seat.actor.pid.remote() for seat in self._seats])]
        except TaskCancelledError:
            raise asyncio.CancelledError from None
        except RayError as e:
            raise RunError(
                f"an episode worker cannot start: {last_words(e)}. Check that the agent's imports are installed on "
                "every machine of the Ray cluster"
            ) from e

    def close(self) -> None:
        """End all workers; cancelled episodes get `CLOSE_SECONDS` to release their environments."""
        import ray

        closing = [seat.actor.close.remote() for seat in self._seats]
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        for seat in (*self._seats, *self._coming.values()):
            ray.kill(seat.actor)

    def _start(self, where: Any = None) -> Any:
        import ray

        options = {**self._options, "scheduling_strategy": where or self._where}
        return ray.remote(EpisodeWorker).options(**options).remote(*self._arguments)

    async def _look(self) -> None:
        """Start a worker on each machine that has joined, and add workers that have started meanwhile."""
        import ray
        from ray.exceptions import RayError

        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_SECONDS
        machines = await asyncio.to_thread(_machines)
        for label in machines - self._machines:
            actor = self._start(_on(label))
            self._coming[actor.pid.remote()] = _Seat(actor)
        self._machines |= machines
        for ready in ray.wait(list(self._coming), num_returns=len(self._coming), timeout=0)[0] if self._coming else ():
            seat = self._coming.pop(ready)
            try:
                ray.get(ready)
            except RayError as e:
                self._note(f"a machine joined the cluster, but episodes cannot run on it: {last_words(e)}")
                continue
            self._seats.append(seat)
            self._note(f"a machine joined the cluster; episodes now run in {len(self._seats)} workers")

    async def _replace(self, seat: _Seat, dead: Any, why: str) -> None:
        import ray

        async with seat.lock:
            if seat.actor is dead:  # several episodes notice the same death
                self._note(f"an episode worker died; its {seat.running} episodes start over: {why}")
                ray.kill(dead)  # an unreachable node may still run it
                seat.actor = self._start()


async def _finished(reference: Any) -> Any:
    """Return the result of a remote call, or raise its error as it was raised in the worker."""
    import ray
    from ray.exceptions import RayTaskError, TaskCancelledError

    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
    except TaskCancelledError:
        raise asyncio.CancelledError from None
    except RayTaskError as e:
        raise e.cause from None


def _on(machine: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(machine, soft=False)


def _machines() -> set[str]:
    """Return Ray's IDs of the cluster's live machines."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
