"""Continuous batching: decide which request runs in which slot, and what is computed next.

A step admits waiting requests, computes at most `prefill_tokens` prompt tokens, and decodes one token for every running
sequence.  A prefix that a prompt shares with any slot is copied instead of computed: earlier turns of its conversation,
the prompt of its group, a common system prompt.  A request whose prompt is currently computed by another request waits
for it.

Invariants: requests are admitted in order of arrival (one that waits for a shared prefix may be passed); an admitted
request has space up to its `max_tokens`, so it is never preempted; `Slot.valid` never counts a key of old weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields

import torch

from astuner.contracts.types import FinishReason, SamplingParams
from astuner_local.engine.batch import DecodeBatch
from astuner_local.engine.forward import Chunk, Forward
from astuner_local.engine.kv_cache import KVCache

_WORTH_WAITING = 32
"""Least number of tokens that another request's prefill must save to make waiting worthwhile."""


@dataclass
class EngineStats:
    """Counters of an engine; subtract two readings for one step."""

    requests: int = 0
    """Admitted requests."""
    cancelled: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens computed in a prefill; the others came from cached keys (or are the last one of a prompt)."""
    generated_tokens: int = 0
    """Tokens of finished requests."""
    decode_steps: int = 0
    decoded_rows: int = 0
    """Tokens computed in decode steps, including those of canceled requests."""

    @property
    def mean_batch(self) -> float:
        """Sequences per decode step; 0 without decode steps."""
        return self.decoded_rows / self.decode_steps if self.decode_steps else 0.0

    @property
    def reused_share(self) -> float:
        """Share of prompt tokens that needed no prefill."""
        return 1 - self.prefilled_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __sub__(self, earlier: EngineStats) -> EngineStats:
        return EngineStats(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})


def common_prefix(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """Return the length of the longest common prefix, at most `limit`, by bisection over fast slice comparisons."""
    low, high = 0, min(len(a), len(b), limit)
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass
class Slot:
    """A row of the cache from the scheduler's view."""

    index: int
    tokens: list[int] = field(default_factory=list)
    valid: int = 0
    """Keys of `tokens[:valid]` are in the cache."""
    session: str = ""
    """Conversation that uses the slot; empty for calls without a session."""
    busy: bool = False
    """Whether a request is running in it."""
    last_used: int = 0

    def shared(self, prompt: Sequence[int]) -> int:
        """Return how many leading tokens of `prompt` have keys here; the last token is always recomputed."""
        return common_prefix(self.tokens, prompt, min(self.valid, len(prompt) - 1))

    def forget(self) -> None:
        self.tokens, self.valid, self.session = [], 0, ""


def find_own(free: Iterable[Slot], session: str, prompt: Sequence[int]) -> Slot | None:
    """Return the free slot of this conversation; without a session, the longest anonymous one that it extends."""
    if session:
        return next((slot for slot in free if slot.session == session), None)
    extended = (slot for slot in free if slot.valid and not slot.session and slot.shared(prompt) == slot.valid)
    return max(extended, key=lambda slot: slot.valid, default=None)


@dataclass(eq=False)
class Request:
    """One generation in progress. The scheduler fills the lower half."""

    prompt: list[int]
    sampling: SamplingParams
    limit: int
    """Most tokens of prompt and response together."""
    stop_ids: frozenset[int]
    session: str = ""
    at_stop: Callable[[list[int]], bool] | None = None
    """Returns whether the last token of a response completes a stop string; None without stop strings."""
    slot: Slot | None = None
    awaited: Slot | None = None
    """Slot in which another request's prefill, for which this one waited, has computed more of its prompt."""
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Scheduler:
    """Scheduler; its methods must be called by one thread at a time."""

    def __init__(self, forward: Forward, cache: KVCache, *, prefill_tokens: int, seed: int) -> None:
        self._forward, self._cache, self._prefill_tokens = forward, cache, prefill_tokens
        self._batch = DecodeBatch(forward, cache, seed=seed)
        self._slots: list[Slot] = []
        self._waiting: deque[Request] = deque()
        self._prefilling: deque[Request] = deque()
        self._decoding: dict[int, Request] = {}
        self._watched: set[int] = set()
        """Decoding requests with stop strings."""
        self._clock = 0
        self._longest = 0  # longest request since the last flush
        self.stats = EngineStats()

    @property
    def running(self) -> int:
        """Admitted requests."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    @torch.inference_mode()
    def cancel(self, request: Request) -> None:
        """Free the resources of a request; does nothing if it is already finished."""
        slot = request.slot
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._prefilling:
            self._prefilling.remove(request)
        elif slot is not None and self._decoding.get(slot.index) is request:
            del self._decoding[slot.index]
            self._watched.discard(slot.index)
            self._batch.stop([slot.index])
        else:
            return
        self.stats.cancelled += 1
        if slot is not None:
            self._release(slot)

    @torch.inference_mode()
    def stop_all(self) -> list[Request]:
        """End every admitted request with its tokens so far, and return them."""
        stopped = [*self._prefilling, *self._decoding.values()]
        said = self._batch.read([(i, len(r.prompt), self._batch.end(i)) for i, r in self._decoding.items()])
        for request, answer in zip(self._decoding.values(), said, strict=True):
            request.response, request.logprobs = answer
        for request in stopped:
            request.finish_reason = FinishReason.CANCELLED
            self.cancel(request)
        return stopped

    @torch.inference_mode()
    def flush(self) -> None:
        """Drop all keys, because the weights have changed. Nothing may be running."""
        if self.running:
            raise RuntimeError(f"{self.running} requests are running; their keys cannot be dropped")
        for slot in self._slots:
            slot.forget()
        if self._longest and self._cache.width > 2 * self._cache.width_for(self._longest):
            # One very long request must not reduce the number of slots for all later ones.
            self._resize(0, self._cache.width_for(self._longest))
        self._longest = 0

    @torch.inference_mode()
    def step(self, *, admit: bool = True) -> list[Request]:
        """Advance every running sequence by one token; return the finished requests."""
        finished: list[Request] = []
        if admit:
            self._admit()
        if self._prefilling:
            finished += self._prefill()
            if admit:
                self._admit()  # requests that waited for this prefill join the next decode step
        if self._decoding:
            self.stats.decode_steps += 1
            self.stats.decoded_rows += len(self._decoding)
            finished += self._finish(self._batch.step())
        return finished

    def _come_to_stop(self) -> list[tuple[int, int]]:
        """Return (slot, end) of running rows whose text now contains a stop string."""
        found = []
        for index in self._watched:
            request, end = self._decoding[index], self._batch.end(index)
            [(tokens, _)] = self._batch.read([(index, len(request.prompt), end)])
            if request.at_stop is not None and request.at_stop(tokens):
                found.append((index, end))
        return found

    # --- admission ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        deferred: list[Request] = []
        while self._waiting and len(deferred) < self._cache.max_slots:
            request = self._waiting[0]
            slot = self._find_slot(request)
            if slot is None:
                break
            self._waiting.popleft()
            source, shared = self._best_source(request, slot)
            request.awaited = self._being_computed(request.prompt, shared)
            if request.awaited is not None:
                deferred.append(request)
                continue
            if source is not slot:
                self._cache.copy_prefix(source.index, slot.index, shared)
            self._occupy(slot, request, shared)
        self._waiting.extendleft(reversed(deferred))

    def _best_source(self, request: Request, slot: Slot) -> tuple[Slot, int]:
        """Return the slot that holds most of the prompt, running or not, and the number of shared tokens."""
        prompt, others = request.prompt, self._slots
        source, shared = slot, slot.shared(prompt)
        if shared and shared == slot.valid:  # the prompt continues its own conversation
            others = [] if request.awaited is None else [request.awaited]
        for other in others:
            if shared == len(prompt) - 1:
                break
            # To share more, it must agree on the next token: one comparison instead of searching all of them.
            if other.valid > shared and other.tokens[shared] == prompt[shared] and (n := other.shared(prompt)) > shared:
                source, shared = other, n
        return source, shared

    def _being_computed(self, prompt: Sequence[int], shared: int) -> Slot | None:
        """Return the slot whose running prefill will soon share enough more than `shared` tokens with this prompt."""
        for other in self._prefilling:
            if len(other.prompt) <= shared or other.prompt[shared] != prompt[shared]:
                continue  # see `_best_source`
            soon = common_prefix(other.prompt, prompt, len(prompt) - 1)
            if soon - shared >= _WORTH_WAITING or (soon > shared and soon == len(prompt) - 1):
                return other.slot
        return None

    def _occupy(self, slot: Slot, request: Request, shared: int) -> None:
        slot.tokens, slot.valid, slot.session, slot.busy = request.prompt, shared, request.session, True
        request.slot = slot
        if shared == len(request.prompt) - 1:
            self._start(request)  # the first decode step computes the last token: no prefill needed
        else:
            self._prefilling.append(request)
        self._longest = max(self._longest, request.limit)
        self.stats.requests += 1
        self.stats.prompt_tokens += len(request.prompt)

    def _find_slot(self, request: Request) -> Slot | None:
        """Return a free slot that is wide enough, growing the cache if needed; None if the request must wait.

        In order of preference: the conversation's own slot; for a call without a session, a slot that the prompt
        extends; an empty slot; a new slot; the slot that has been idle longest.
        """
        cache = self._cache
        width = max(cache.width, cache.width_for(request.limit))
        allowed = cache.slots_at(width)
        if self.running >= allowed or any(slot.busy for slot in self._slots[allowed:]):
            return None
        if width > cache.width:
            self._resize(min(cache.slots, allowed), width)
        free = [slot for slot in self._slots if not slot.busy]
        own = find_own(free, request.session, request.prompt)
        if own is not None:
            return own
        empty = next((slot for slot in free if not slot.valid), None)
        if empty is None and cache.slots < allowed:
            first_new = cache.slots
            wanted = cache.slots + len(self._waiting)
            self._resize(min(allowed, 1 << (wanted - 1).bit_length()), width)
            return self._slots[first_new]
        return empty or min(free, key=lambda slot: slot.last_used)

    def _resize(self, slots: int, width: int) -> None:
        self._cache.resize(slots, width)
        self._batch.follow_cache()
        self._slots = self._slots[:slots] + [Slot(index) for index in range(len(self._slots), slots)]

    # --- computing ----------------------------------------------------------------------------------------------

    def _prefill(self) -> list[Request]:
        """Run one forward pass over chunks of prompts whose padded size stays within the limit."""
        chunks: list[Chunk] = []
        chosen: list[Request] = []
        longest = 0
        for request in self._prefilling:
            slot = _slot(request)
            rest = len(request.prompt) - slot.valid
            size = min(rest, self._prefill_tokens)
            if chunks and (len(chunks) + 1) * max(longest, size) > self._prefill_tokens:
                continue
            longest = max(longest, size)
            tokens = request.prompt[slot.valid : slot.valid + size]
            chunks.append(Chunk(slot.index, tokens, slot.valid, is_last=size == rest))
            chosen.append(request)
        logits = self._forward.prefill(self._cache, chunks)
        self.stats.prefilled_tokens += sum(len(chunk.tokens) for chunk in chunks)
        complete: list[int] = []
        for request, chunk in zip(chosen, chunks, strict=True):
            self._prefilling.remove(request)
            _slot(request).valid += len(chunk.tokens)
            if chunk.is_last:
                self._start(request)
                complete.append(chunk.slot)
            else:
                self._prefilling.append(request)  # at the end, so that other prompts get their turn
        return self._finish(self._batch.advance(complete, logits)) if complete else []

    def _start(self, request: Request) -> None:
        slot = _slot(request)
        self._batch.start(slot.index, request.prompt, request.limit, request.sampling, request.stop_ids)
        self._decoding[slot.index] = request
        if request.at_stop is not None:
            self._watched.add(slot.index)

    def _finish(self, ends: Sequence[tuple[int, int]]) -> list[Request]:
        """End the rows of ``ends``, and rows that have reached a stop string."""
        self._watched.difference_update(index for index, _ in ends)
        at_stop = self._come_to_stop() if self._watched else []
        self._watched.difference_update(index for index, _ in at_stop)
        over = [*ends, *at_stop]
        if not over:
            return []
        finished = [self._decoding.pop(index) for index, _ in over]
        said = self._batch.read([(i, len(r.prompt), end) for (i, end), r in zip(over, finished, strict=True)])
        for request, answer, end in zip(finished, said, over, strict=True):
            slot = _slot(request)
            request.response, request.logprobs = answer
            stopped = request.response[-1] in request.stop_ids or end in at_stop
            request.finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            slot.tokens = request.prompt + request.response
            slot.valid = len(slot.tokens) - 1  # the last token was drawn, not computed
            self._release(slot)
            self.stats.generated_tokens += len(request.response)
        self._batch.stop([index for index, _ in over])
        return finished

    def _release(self, slot: Slot) -> None:
        self._clock += 1
        slot.busy, slot.last_used = False, self._clock


def _slot(request: Request) -> Slot:
    assert request.slot is not None, "an admitted request has a slot"
    return request.slot
