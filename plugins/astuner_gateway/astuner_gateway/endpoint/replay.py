"""Attach retries to the generation that they repeat, so that retries do not generate twice.

A `Job` is one generation; requests attach to it and wait. A request is a retry if it declares itself as one (the retry
count of client libraries, or an ``Idempotency-Key``), or if it equals a request whose client disconnected before it
received the reply. A retry attaches to that generation, running or finished; a retry count matches a delivered reply
for one minute only. Any other request is a new draw, even if it is equal: agents sample several times this way.

A generation without a client continues for a grace period, in case a retry comes, and is then canceled. A reply that no
client received is reported as lost, so that it is not trained. All code here runs on the server's event loop.
Invariant: the memory for finished generations is bounded and released when the episode ends.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from astuner_gateway.endpoint.errors import ApiError

KEPT_BYTES = 32 << 20
"""Maximum bytes of finished replies over all episodes."""

RETRY_SECONDS = 60.0
"""Seconds after delivery in which a retry can still receive the same reply."""

_KEPT_ALIKE = 16
"""Maximum number of delivered replies to equal requests that are kept for retries."""

Outcome = bytes | ApiError


def outcome_of(task: asyncio.Future[Outcome]) -> Outcome:
    """Return the outcome of a finished generation; a canceled one belongs to an episode that has ended."""
    if task.cancelled():
        return ApiError(403, "the episode has ended and its model accepts no more calls", code="episode_over")
    return task.result()


@dataclass(frozen=True)
class Identity:
    """Properties that two requests must share to count as equal."""

    key: bytes
    """Digest of the key."""
    route: str
    content: bytes
    """Digest of the body."""


@dataclass(eq=False)
class Job:
    """One generation and the number of its waiting requests."""

    identity: Identity
    name: str
    """Idempotency-Key of the request; empty if it has none."""
    on_lost: Callable[[], None]
    """Called when a reply that no client received is forgotten."""
    task: asyncio.Task[Outcome] = field(init=False)
    attempt: int = 0
    """Highest retry count of an attached request."""
    waiting: int = 0
    delivered: bool = False
    delivered_at: float = 0.0
    """Time of the last delivery by the loop's clock."""
    _timer: asyncio.TimerHandle | None = None

    @property
    def lost(self) -> bool:
        """Whether no client has received the reply or waits for it."""
        return not self.waiting and not self.delivered


class Replays:
    """The generations to which a request can attach.

    :param grace: Seconds that a generation continues without a client.
    """

    def __init__(self, grace: float, kept_bytes: int = KEPT_BYTES) -> None:
        self._grace = grace
        self._most = kept_bytes
        self._jobs: dict[Identity, list[Job]] = {}
        self._named: dict[tuple[bytes, str, str], Job] = {}
        self._finished: OrderedDict[Job, int] = OrderedDict()
        self._kept = 0

    def attach(
        self,
        identity: Identity,
        start: Callable[[], Coroutine[None, None, Outcome]],
        *,
        retry: int = 0,
        name: str = "",
        on_lost: Callable[[], None] = lambda: None,
    ) -> Job:
        """Return the generation that answers this request. `detach` must follow.

        :param start: Starts a new generation; its outcome is bytes or an `ApiError`, and it raises nothing.
        :param retry: Number of times that the client has sent the request before.
        :param name: Idempotency-Key of the request.
        :param on_lost: Called when a reply made by ``start`` is forgotten before any client received it.
        :raises ApiError: 400, the Idempotency-Key belongs to another request.
        """
        job = self._find(identity, retry, name)
        if job is None:
            job = Job(identity, name, on_lost)
            self._jobs.setdefault(identity, []).append(job)
            if name:
                self._named[identity.key, identity.route, name] = job
            job.task = asyncio.ensure_future(start())
            job.task.add_done_callback(functools.partial(self._done, job))
        job.attempt = max(job.attempt, retry)
        job.waiting += 1
        if job._timer is not None:
            job._timer.cancel()
            job._timer = None
        return job

    def detach(self, job: Job, *, delivered: bool) -> None:
        """End the wait of a request: it was answered (``delivered``), or its client is gone."""
        job.waiting -= 1
        if delivered:
            job.delivered, job.delivered_at = True, asyncio.get_running_loop().time()
        if not job.waiting and not job.task.done():
            job._timer = asyncio.get_running_loop().call_later(self._grace, self._end, job)
        if job.delivered:
            given = [other for other in self._jobs.get(job.identity, ()) if other.delivered and not other.waiting]
            for old in given[:-_KEPT_ALIKE]:
                self._forget(old)

    def cancel(self, keys: Callable[[bytes], bool]) -> None:
        """Cancel and forget all jobs whose key digest satisfies ``keys``."""
        for identity in [identity for identity in self._jobs if keys(identity.key)]:
            for job in list(self._jobs[identity]):
                self._end(job)

    def __len__(self) -> int:
        return sum(len(jobs) for jobs in self._jobs.values())

    def _find(self, identity: Identity, retry: int, name: str) -> Job | None:
        if name:
            job = self._named.get((identity.key, identity.route, name))
            if job is not None and job.identity != identity:
                raise ApiError(
                    400,
                    "this Idempotency-Key was already used for another body. Create a new one for each request",
                    code="idempotency_key_reused",
                )
            return job
        oldest = asyncio.get_running_loop().time() - RETRY_SECONDS
        candidates = [
            job
            for job in self._jobs.get(identity, ())
            if not job.name and (not job.delivered or job.waiting or job.delivered_at >= oldest)
        ]
        # Prefer a generation that lost its client. A retry may also arrive before the broken connection is detected; it
        # then gets any generation that this client may have started.
        candidates.sort(key=lambda job: (not job.lost, job.task.done()))
        return next((job for job in candidates if job.lost or job.attempt < retry), None)

    def _done(self, job: Job, _: asyncio.Task[Outcome]) -> None:
        """Keep a reply; forget an error, so that a retry generates again."""
        if job._timer is not None:
            job._timer.cancel()
        if not isinstance(outcome := outcome_of(job.task), bytes):
            self._forget(job)
            return
        if job in self._jobs.get(job.identity, ()):  # false if the episode has ended
            self._finished[job] = len(outcome)
            self._kept += len(outcome)
            while self._kept > self._most:
                self._forget(next(iter(self._finished)))

    def _end(self, job: Job) -> None:
        job.task.cancel()
        self._forget(job)  # immediately: a retry that arrives during the cancellation generates again

    def _forget(self, job: Job) -> None:
        jobs = self._jobs.get(job.identity, [])
        if job in jobs:
            jobs.remove(job)
        if not jobs:
            self._jobs.pop(job.identity, None)
        named = job.identity.key, job.identity.route, job.name
        if self._named.get(named) is job:
            del self._named[named]
        self._kept -= self._finished.pop(job, 0)
        if job.lost and job.task.done():
            job.on_lost()
