"""Retries do not generate twice.

A `Job` is one generation; requests attach to it and wait.  A request is a retry when it says so (the count that client
libraries send, or an ``Idempotency-Key``), or when it is the same as one whose client went away without its reply; then
it attaches to that generation, running or finished; a count reaches what was delivered only for a minute.  Any other
request is a new draw, however equal it is: that is how an agent samples twice.

A generation without a client goes on for a while, in case a retry comes, and is then cancelled.  A reply that nobody
came for in the end is reported as lost, so that it is not trained.  Everything here runs on the server's event loop.
Invariant: what is kept of finished generations is bounded, and ends with the episode.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from astuner_gateway.endpoint.errors import ApiError

KEPT_BYTES = 32 << 20
"""Of finished replies, over all episodes."""

RETRY_SECONDS = 60.0
"""After its delivery, a reply is for no retry any more."""

_KEPT_ALIKE = 16
"""Delivered replies to the same request; a retry comes soon after, or never."""

Outcome = bytes | ApiError


def outcome_of(task: asyncio.Future[Outcome]) -> Outcome:
    """What a generation that is done came to; one that was cancelled is one of an episode that is over."""
    if task.cancelled():
        return ApiError(403, "the episode is over; its model answers no more calls", code="episode_over")
    return task.result()


@dataclass(frozen=True)
class Identity:
    """What two requests must have in common to be the same."""

    key: bytes
    """Digest of the key."""
    route: str
    content: bytes
    """Digest of the body."""


@dataclass(eq=False)
class Job:
    """One generation, and who waits for it."""

    identity: Identity
    name: str
    """The request's Idempotency-Key; empty for none."""
    on_lost: Callable[[], None]
    """Called when a reply is forgotten that nobody has got."""
    task: asyncio.Task[Outcome] = field(init=False)
    attempt: int = 0
    """The highest retry count that has attached."""
    waiting: int = 0
    delivered: bool = False
    delivered_at: float = 0.0
    """By the loop's clock, the last time."""
    _timer: asyncio.TimerHandle | None = None

    @property
    def lost(self) -> bool:
        """Whether nobody has its reply, and nobody waits for it."""
        return not self.waiting and not self.delivered


class Replays:
    """The generations that a request can attach to.

    :param grace: seconds that a generation goes on without a client.
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
        """The generation that answers this request; `detach` must follow.

        :param start: begins a new one; its outcome is bytes or an `ApiError`, and it raises nothing.
        :param retry: how many times the client has sent the request before.
        :param name: its Idempotency-Key.
        :param on_lost: called when a reply that ``start`` made is forgotten and nobody has got it.
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
        """The request is answered (``delivered``), or its client is gone."""
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
        """End and forget all jobs of the keys with these digests."""
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
                    "this Idempotency-Key was sent with another body before; make a new one for each request",
                    code="idempotency_key_reused",
                )
            return job
        oldest = asyncio.get_running_loop().time() - RETRY_SECONDS
        candidates = [
            job
            for job in self._jobs.get(identity, ())
            if not job.name and (not job.delivered or job.waiting or job.delivered_at >= oldest)
        ]
        # First what lost its client; then, for a retry that overtakes the news of the broken connection, any that this
        # client may have meant.
        candidates.sort(key=lambda job: (not job.lost, job.task.done()))
        return next((job for job in candidates if job.lost or job.attempt < retry), None)

    def _done(self, job: Job, _: asyncio.Task[Outcome]) -> None:
        """Keep a reply; forget an error, so that a retry tries again."""
        if job._timer is not None:
            job._timer.cancel()
        if not isinstance(outcome := outcome_of(job.task), bytes):
            self._forget(job)
            return
        if job in self._jobs.get(job.identity, ()):  # not so if the episode has ended
            self._finished[job] = len(outcome)
            self._kept += len(outcome)
            while self._kept > self._most:
                self._forget(next(iter(self._finished)))

    def _end(self, job: Job) -> None:
        job.task.cancel()
        self._forget(job)  # at once: a retry that comes while it ends begins anew

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
