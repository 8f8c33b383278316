"""`LocalEngine`: the scheduler in a separate thread, behind the asyncio interface `astuner.InferenceEngine`.

Callers on one or several event loops submit requests; the thread returns results with ``call_soon_threadsafe``.
Requests that become ready in one iteration of a loop arrive together, so that they are prefilled together.

Invariants: while `LocalEngine.paused` is active, nothing runs, so no generation spans an update of the weights; if the
thread fails, all current and later callers get `ModelFailed`, and none waits forever.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from astuner import InferenceEngine
from astuner.contracts.errors import ConfigError, ContextOverflow, ModelFailed, RunError
from astuner.contracts.types import Generation, SamplingParams
from astuner_local.engine.forward import Forward
from astuner_local.engine.kv_cache import KVCache, bytes_per_token, default_token_budget
from astuner_local.engine.scheduler import EngineStats, Request, Scheduler
from astuner_local.engine.weights import FusedWeights

_LAPS = 10
"""Event loop iterations within which an agent without other work has read its answer and sent its next request."""
_PATIENCE = 0.05
"""Most seconds to wait for that."""

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Generation]"]
_Answer = tuple["asyncio.Future[Generation]", "Generation | ModelFailed"]


class Turns:
    """A fair lock for computing with several engines on one CPU; `threading.Lock` is not fair.

    Two engines that step concurrently would compete for cores: each uses all threads, and with small models both wait
    for the GIL more than they compute.  So they alternate, one step each.  Invariant: turns are granted in the order of
    requests.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked = self._ended = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Wait for the turn, and hold it until the block ends."""
        with self._changed:
            mine, self._asked = self._asked, self._asked + 1
            self._changed.wait_for(lambda: self._ended == mine)
        try:
            yield
        finally:
            with self._changed:
                self._ended += 1
                self._changed.notify_all()


class LocalEngine(InferenceEngine):
    """Engine for a transformers causal LM in this process, which may be trained in place.

    Log-probabilities belong to the sampling distribution; at temperature 0 (greedy) to the distribution at temperature
    1.  See `astuner_local.engine.batch.sample`.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer_eos_ids: Sequence[int],
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        kv_token_budget: int | None = None,
        prefill_tokens: int = 2048,
        seed: int = 0,
        policy_version: int = 0,
        merge_adapters: bool = True,
        turns: Turns | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """Start the engine's thread.

        :param model: Model of a supported family (`modeling.check_supported`), wrapped by peft or not. Unless wrapped,
            some of its parameters become views of fused matrices; it stays usable.
        :param tokenizer_eos_ids: Tokens that end every generation, in addition to a request's stop tokens.
        :param max_model_len: Context in tokens; None: the model's.
        :param max_num_seqs: Sequences decoded concurrently; further requests wait in order.
        :param kv_token_budget: Cached tokens over all sequences; None: at most a quarter of the memory.
        :param prefill_tokens: Most prompt tokens computed between two decode steps.
        :param seed: Seed of generations without their own seed.
        :param merge_adapters: False applies adapters next to the base weights, which several models can then share.
        :param turns: Lock shared by the engines of one CPU, so that one of them computes at a time.
        :param decode: Returns the text of token IDs, for stop strings; None leaves stop strings to the caller.
        :raises astuner.contracts.errors.ConfigError: The architecture is not supported, or its context is too short.
        """
        weights = FusedWeights(model, merge_adapters=merge_adapters)
        dims = weights.dimensions
        if max_model_len is not None and max_model_len > dims.context:
            raise ConfigError(
                f"astuner.rollout.max_model_len is {max_model_len}, but the context of the model is {dims.context} "
                f"tokens; use {dims.context} or less"
            )
        self.max_model_len = max_model_len or dims.context
        self.policy_version = policy_version
        self._weights = weights
        self._turns = turns
        self._decode = decode
        self._eos_ids = frozenset(tokenizer_eos_ids)
        if kv_token_budget is None:
            kv_token_budget = default_token_budget(bytes_per_token(dims, weights.dtype), weights.device)
        cache = KVCache(
            dims,
            dtype=weights.dtype,
            device=weights.device,
            max_slots=max_num_seqs,
            token_budget=max(kv_token_budget, self.max_model_len),
        )
        forward = Forward(weights, positions=cache.width_for(self.max_model_len) + 1)
        self._scheduler = Scheduler(forward, cache, prefill_tokens=prefill_tokens, seed=seed)
        self._changed = threading.Condition()
        self._inbox: list[Request] = []
        self._cancelled: list[Request] = []
        self._waiters: dict[Request, _Waiter] = {}
        self._outboxes: dict[asyncio.AbstractEventLoop, list[Request]] = {}
        self._heard = threading.Event()
        """Set when agents had time to send their next requests, or need none."""
        self._paused = False
        self._cutting = False
        """Whether running generations end immediately with their tokens so far."""
        self._parked = False
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(torch.get_num_threads(),), name="astuner-engine", daemon=True
        )
        self._thread.start()

    # --- callers' side ------------------------------------------------------------------------------------------

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        prompt = list(prompt_ids)
        self._check(prompt, sampling)
        loop = asyncio.get_running_loop()
        request = Request(
            prompt=prompt,
            sampling=sampling,
            limit=min(len(prompt) + sampling.max_tokens, self.max_model_len),
            stop_ids=self._eos_ids.union(sampling.stop_token_ids),
            session=session,
            at_stop=self._at_stop(sampling.stop),
        )
        future: asyncio.Future[Generation] = loop.create_future()
        self._post(loop, request, future)
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(request)
            raise

    def _at_stop(self, stops: Sequence[str]) -> Callable[[list[int]], bool] | None:
        decode = self._decode
        return None if decode is None or not stops else lambda ids: comes_to_stop(ids, stops, decode)

    def _check(self, prompt: list[int], sampling: SamplingParams) -> None:
        if self._is_over:
            raise self._over()
        if not prompt:
            raise ModelFailed("the prompt is empty; a generation needs at least one prompt token")
        if len(prompt) >= self.max_model_len:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens and the context {self.max_model_len}, which leaves no room to "
                "answer; raise astuner.rollout.max_model_len or shorten the conversation"
            )
        vocab = self._weights.dimensions.vocab
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise ModelFailed(
                f"the prompt contains token IDs from {min(prompt)} to {max(prompt)}, but the model knows 0 to "
                f"{vocab - 1}; tokenizer and model do not match"
            )
        if sampling.max_tokens < 1 or sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
            raise ModelFailed(f"unsupported parameters {sampling}: max_tokens >= 1, temperature >= 0, 0 < top_p <= 1")

    def _post(self, loop: asyncio.AbstractEventLoop, request: Request, future: asyncio.Future[Generation]) -> None:
        with self._changed:
            self._waiters[request] = (loop, future)
            outbox = self._outboxes.setdefault(loop, [])
            outbox.append(request)
            if len(outbox) == 1:
                loop.call_soon(self._send, loop)

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        """Submit all requests of one iteration of the loop."""
        with self._changed:
            self._inbox += [request for request in self._outboxes.pop(loop) if request in self._waiters]
            self._changed.notify_all()
            over = self._is_over
        if over:
            self._fail_waiters()

    def _cancel(self, request: Request) -> None:
        with self._changed:
            if self._waiters.pop(request, None) is not None:
                self._cancelled.append(request)
                self._changed.notify_all()

    def stats(self) -> EngineStats:
        """Return a copy of the counters."""
        return replace(self._scheduler.stats)

    # --- trainer's side -----------------------------------------------------------------------------------------

    @contextmanager
    def paused(self, *, cut: bool = False) -> Iterator[None]:
        """Wait until running generations are finished, and start none until the block ends.

        New requests wait meanwhile.  Cached keys are dropped at the end in any case.

        :param cut: End running generations with their tokens so far (`FinishReason.CANCELLED`) instead of waiting.
        :raises RunError: The engine has failed or is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._paused or self._is_over)
            self._paused, self._cutting = True, cut
            self._heard.set()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._parked or self._is_over)
            if self._is_over:
                self._paused = self._cutting = False
                raise RunError(f"the engine cannot be paused: {self._over()}")
        try:
            yield
        finally:
            self._scheduler.flush()
            with self._changed:
                self._paused = self._cutting = False
                self._changed.notify_all()

    def weights_updated(self, policy_version: int) -> None:
        """Use the model's current weights, and mark generations with `policy_version`.

        :raises RunError: Called outside `paused`, where generations could see a partial update.
        """
        if not self._paused:
            raise RunError("weights_updated was called while the engine runs; change weights inside engine.paused()")
        self._weights.refresh()
        self.policy_version = policy_version

    def close(self) -> None:
        """Stop the thread; waiting callers get `ModelFailed`. Can be called twice."""
        with self._changed:
            self._closing = True
            self._heard.set()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- the thread ---------------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._failure is not None or self._closing

    def _over(self) -> ModelFailed:
        """Return the error for callers after the thread has ended; a new object, because raising adds a traceback."""
        if self._failure is None:
            return ModelFailed("the local engine is closed")
        if isinstance(self._failure, ModelFailed):
            return ModelFailed(str(self._failure))
        failed = ModelFailed(
            f"the local engine has stopped: {type(self._failure).__name__}: {self._failure}; if memory ran out, lower "
            "astuner.rollout.max_num_seqs or astuner.rollout.max_model_len"
        )
        failed.__cause__ = self._failure
        return failed

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # OpenMP keeps it per thread
        try:
            while self._await_work():
                with self._turns.one() if self._turns is not None else nullcontext():
                    cut, admit = self._cutting, not self._paused
                    finished = self._scheduler.stop_all() if cut else self._scheduler.step(admit=admit)
                if finished:
                    self._deliver(finished)
        except Exception as failure:
            # Passed to every caller, now and later: a thread has no caller that could handle it.
            with self._changed:
                self._failure = failure
                self._changed.notify_all()
        self._fail_waiters()

    def _await_work(self) -> bool:
        """Take new requests; wait while there is nothing to do. Return False when the engine closes."""
        scheduler = self._scheduler
        with self._changed:
            while not self._closing:
                for request in self._inbox:
                    scheduler.submit(request)
                for request in self._cancelled:
                    scheduler.cancel(request)
                self._inbox.clear()
                self._cancelled.clear()
                if scheduler.running or (scheduler.waiting and not self._paused):
                    return True
                self._parked = True
                self._changed.notify_all()
                self._changed.wait()
                self._parked = False
            return False

    def _deliver(self, finished: Sequence[Request]) -> None:
        answers: dict[asyncio.AbstractEventLoop, list[_Answer]] = {}
        with self._changed:
            for request in finished:
                waiter = self._waiters.pop(request, None)
                if waiter is not None:
                    loop, future = waiter
                    answers.setdefault(loop, []).append((future, self._generation(request)))
        told = [loop for loop, batch in answers.items() if _call(loop, _resolve, batch)]
        if self._weights.device.type == "cpu":
            self._hear_out(told)

    def _hear_out(self, loops: Sequence[asyncio.AbstractEventLoop]) -> None:
        """Let agents send their next requests before the next step, so that all of them join it.

        Agents need the same cores and the GIL, so a step in the meantime would be slow and cover few sequences.
        """
        for loop in loops:
            self._heard.clear()
            if not self._paused and not self._closing and _call(loop, _lap, loop, _LAPS, self._heard):
                self._heard.wait(_PATIENCE)

    def _generation(self, request: Request) -> Generation:
        assert request.finish_reason is not None, "a finished request has a reason"
        return Generation(
            prompt_ids=request.prompt,
            response_ids=request.response,
            logprobs=request.logprobs,
            finish_reason=request.finish_reason,
            policy_version=self.policy_version,  # nothing runs during an update, so it has not changed since the start
        )

    def _fail_waiters(self) -> None:
        with self._changed:
            waiters = list(self._waiters.values())
            self._waiters.clear()
        for loop, future in waiters:
            _call(loop, _resolve, [(future, self._over())])


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> bool:
    """Call ``function`` on a loop; return False if the loop is closed, so that no caller is waiting."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


def _lap(loop: asyncio.AbstractEventLoop, left: int, heard: threading.Event) -> None:
    """Set ``heard`` after a number of iterations of the loop."""
    if left:
        loop.call_soon(_lap, loop, left - 1, heard)
    else:
        heard.set()


def _resolve(answers: list[_Answer]) -> None:
    for future, answer in answers:
        if future.done():  # cancelled before the answer arrived
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


_ROOM = 4
"""Tokens of a stop string that may have no bytes."""


def comes_to_stop(ids: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> bool:
    """Return whether the last of ``ids`` completes one of ``stops``; called after each token, it decodes only the end.

    :param stops: Non-empty strings.
    :param decode: Returns the text of token IDs.
    """
    longest = max(len(stop.encode()) for stop in stops) + _ROOM
    end = decode(ids[-longest:])
    if not any(stop in end for stop in stops):
        return False
    whole = decode(ids)  # the end alone may decode differently
    return any(stop in whole for stop in stops)
