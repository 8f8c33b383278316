"""Where episodes run on a cluster: Ray actors that hold the agent, its judge, and an engine.

The driver decides what runs and when (core's `RolloutPool`); a worker runs one episode after another, many at once,
and sends each back whole.  Invariant: a worker that dies takes nothing with it but its own episodes, and these start
over in another one or are counted as lost, never scored.  A machine that joins a cluster of several in mid-run gets a
worker of its own.
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
"""What cancelled episodes have to come to their end; then their workers end with them."""
LOOK_SECONDS = 5.0
"""How often the cluster's machines are looked at."""


Connect: TypeAlias = "Callable[[], InferenceEngine]"


class EpisodeWorker:
    """Runs episodes; an asynchronous Ray actor."""

    def __init__(self, runner: EpisodeRunner, environ: Mapping[str, str], model: str, connect: Connect) -> None:
        """:param environ: variables that agents and judges need, e.g. where the environment service listens."""
        os.environ.update(environ)
        self._runner = runner
        self._runner.config = relocate(runner.config)
        trusted = runner.config.astuner.model.trust_remote_code
        codec = make_codec(self._runner.config, load_tokenizer(model, trust_remote_code=trusted))
        self._models = one_model(connect(), codec)
        self._runner.prepare()
        self._running = 0

    async def run(self, workflow_task: WorkflowTask, sampling: SamplingParams) -> Episode:
        """One attempt at one task, from prompt to verdict."""
        self._running += 1
        try:
            return await self._runner.run(workflow_task, self._models, sampling)
        finally:
            self._running -= 1

    async def judge_group(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Attempts at one task that `run` left open, with their verdicts."""
        self._running += 1
        try:
            return await self._runner.judge_group(episodes)
        finally:
            self._running -= 1

    async def pid(self) -> int:
        """The worker's process."""
        return os.getpid()

    async def close(self) -> None:
        """Wait for the episodes that are being cancelled, and stop what they may have started."""
        while self._running:
            await asyncio.sleep(0.05)
        await self._runner.close()


class _Lost(Exception):
    """Worker after worker died of it; says how."""


@dataclass
class _Seat:
    """A place in the fleet: the actor in it, and the episodes it is running."""

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

        :param connect: makes a worker's engine, in the worker.
        :param model: the model's folder, or its Hugging Face name: for its tokenizer.
        :param note: tells the person that a worker died.
        :param here: on the machine of the caller; otherwise they are spread over the cluster's.
        :raises RunError: a worker cannot be made there.
        """
        import ray

        rollout = runner.config.astuner.rollout
        self._max_retries, self._note = rollout.max_retries, note
        self._arguments = (runner, dict(environ), model, connect)
        self._options = {
            "num_cpus": 0,  # what an agent's own code needs is small; GPUs and trainers hold the machine
            "max_concurrency": rollout.max_env_worker + 8,  # every episode may land here, and `close` must get through
        }
        self._where = _on(ray.get_runtime_context().get_node_id()) if here else "SPREAD"
        self._machines = _machines()
        # where files do not travel, as in a cluster of one, a machine that joins has none
        grows = not here and "working_dir" in ray.get_runtime_context().runtime_env
        self._look_at = time.monotonic() + LOOK_SECONDS if grows else math.inf
        self._coming: dict[Any, _Seat] = {}
        """What a worker says when it can work -> its seat, on machines that have joined."""
        # one machine after another: "SPREAD" of actors that ask for nothing puts all of them on one, a wish (soft) some
        turns = [self._where] if here else [_on(label) for label in sorted(self._machines)]
        self._seats = [_Seat(self._start(turns[n % len(turns)])) for n in range(workers)]
        self.pids()  # a worker that cannot even be made would look like one that died

    async def run(self, workflow_task: WorkflowTask, sampling: SamplingParams) -> Episode:
        """One attempt, in the worker that has least to do; over again in another if that one dies.

        :raises AstunerError: what an episode cannot catch, e.g. a mistake in the config.
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
        """Attempts at one task that `run` left open, with their verdicts; asked of another worker if one dies.

        :raises AstunerError: as `run`.
        """
        try:
            judged: Sequence[Episode]
            judged, _ = await self._somewhere("judge_group", episodes)
        except _Lost as e:
            return [episode.closed(StopReason.JUDGE_FAILED, str(e)) for episode in episodes]
        return judged

    async def _somewhere(self, method: str, *arguments: Any) -> tuple[Any, int]:
        """What a worker's ``method`` returns, in the worker that has least to do; how many died of it before.

        :raises _Lost: worker after worker died.
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
            except RayError as e:  # it died, was evicted for its memory, or its node is gone
                why, lost = f"the worker that ran it died: {last_words(e)}", lost + 1
                await self._replace(seat, actor, last_words(e))
            finally:
                seat.running -= 1
        raise _Lost(f"{why} ({lost} times)")

    def pids(self) -> list[int]:
        """The workers' processes.

        :raises RunError: one of them is gone.
        :raises asyncio.CancelledError: the task that asks was cancelled, which cancels what it asks.
        """
        import ray
        from ray.exceptions import RayError, TaskCancelledError

        try:
            return [int(pid) for pid in ray.get([seat.actor.pid.remote() for seat in self._seats])]
        except TaskCancelledError:
            raise asyncio.CancelledError from None
        except RayError as e:
            raise RunError(
                f"an episode worker cannot run: {last_words(e)}; is everything that the agent imports installed on "
                "every machine of the Ray cluster?"
            ) from e

    def close(self) -> None:
        """End all workers; episodes that were cancelled get a moment to give their worlds back."""
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
        """Start a worker on each machine that has joined; take in those that have come up meanwhile."""
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
                self._note(f"a machine has joined the cluster, but no episode can run there: {last_words(e)}")
                continue
            self._seats.append(seat)
            self._note(f"a machine has joined the cluster; episodes run there too, in {len(self._seats)} workers now")

    async def _replace(self, seat: _Seat, dead: Any, why: str) -> None:
        import ray

        async with seat.lock:
            if seat.actor is dead:  # many episodes see the same death
                self._note(f"an episode worker died, and its episodes ({seat.running}) start over: {why}")
                ray.kill(dead)  # a node that cannot be reached may run it still
                seat.actor = self._start()


async def _finished(reference: Any) -> Any:
    """What was asked for, or what went wrong with it as it was raised there."""
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
    """Ray's labels of the cluster's machines that work."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
