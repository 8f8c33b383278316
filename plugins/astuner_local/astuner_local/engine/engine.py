"""`LocalEngine`: the scheduler in a thread of its own, behind the asyncio contract of `astuner.InferenceEngine`.

Callers on any event loop (and several at once) hand requests over; the thread hands results back with
``call_soon_threadsafe``.  Requests that become ready in one turn of a loop arrive together, so that they are
prefilled together.

Invariants: while `LocalEngine.paused` holds, nothing is running, so no generation ever straddles an update of the
weights; when the thread fails, every caller gets `ModelFailed`, now and later, and nobody waits for ever.
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
"""Turns of an event loop within which an agent that waits for nothing else has read its answer and asks again."""
_PATIENCE = 0.05
"""Seconds to wait for that, at most."""

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Generation]"]
_Answer = tuple["asyncio.Future[Generation]", "Generation | ModelFailed"]


class Turns:
    """Whose turn it is to compute, where several engines share one CPU: a lock that is fair, as `threading.Lock`, which
    may give itself back to whoever just had it, is not.

    Two engines that step at the same time would share the cores badly: each brings as many threads as there are, and
    with small models both wait for Python's one lock more than they compute.  So they take turns, a step each, and a
    step has all threads.  Invariant: turns are given in the order in which they were asked for.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked = self._ended = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Wait for the turn, and keep it until the block ends."""
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
    """Generates with a transformers causal LM that lives in this process and may be trained in place.

    Log-probabilities are of the distribution that was sampled from; at temperature 0 (greedy) of the one at
    temperature 1.  See `astuner_local.engine.batch.sample`.
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
        """
        :param model: of a supported family (`modeling.check_supported`), wrapped by peft or not. Unless it is
            wrapped, some of its parameters become views of fused matrices; it stays usable as before.
        :param tokenizer_eos_ids: end every generation, besides the request's own stop tokens.
        :param max_model_len: None takes the model's context.
        :param max_num_seqs: sequences decoded at once; more requests wait in order.
        :param kv_token_budget: cached tokens over all sequences; None takes a quarter of the memory at most.
        :param prefill_tokens: prompt tokens computed between two decode steps, at most.
        :param seed: of generations without a seed of their own.
        :param merge_adapters: False: adapters are applied beside the base weights, which several models then share.
        :param turns: shared by the engines of one CPU, so that one of them computes at a time.
        :param decode: the text of token ids, for stop strings; None: they are left to whoever asks.
        :raises astuner.contracts.errors.ConfigError: the architecture is not supported, or its context is shorter.
        """
        weights = FusedWeights(model, merge_adapters=merge_adapters)
        dims = weights.dimensions
        if max_model_len is not None and max_model_len > dims.context:
            raise ConfigError(
                f"astuner.rollout.max_model_len is {max_model_len}, but the model was made for {dims.context} tokens; "
                f"write {dims.context} or less"
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
        """Whether agents have had the time to ask again, or need none."""
        self._paused = False
        self._cutting = False
        """Whether what runs ends with what it has, instead of going on to its end."""
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
                f"the prompt holds token ids from {min(prompt)} to {max(prompt)}, but the model knows 0 to "
                f"{vocab - 1}; tokenizer and model do not belong together"
            )
        if sampling.max_tokens < 1 or sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
            raise ModelFailed(f"{sampling} cannot be honoured: max_tokens >= 1, temperature >= 0, 0 < top_p <= 1")

    def _post(self, loop: asyncio.AbstractEventLoop, request: Request, future: asyncio.Future[Generation]) -> None:
        with self._changed:
            self._waiters[request] = (loop, future)
            outbox = self._outboxes.setdefault(loop, [])
            outbox.append(request)
            if len(outbox) == 1:
                loop.call_soon(self._send, loop)

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand over everything that one turn of the loop has produced."""
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
        """A reading of the counters."""
        return replace(self._scheduler.stats)

    # --- trainer's side -----------------------------------------------------------------------------------------

    @contextmanager
    def paused(self, *, cut: bool = False) -> Iterator[None]:
        """Wait until what is running is finished, and start nothing new until the block ends.

        Requests that arrive meanwhile wait.  Cached keys are dropped at the end, whatever happened inside.

        :param cut: end what is running with what it has, as `FinishReason.CANCELLED`, instead of waiting for it.
        :raises RunError: the engine has failed or is closed.
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
        """Make the model's present weights the ones that generate, and stamp generations with `policy_version`.

        :raises RunError: called outside `paused`, where generations could have seen half an update.
        """
        if not self._paused:
            raise RunError("weights_updated was called while the engine runs; change weights inside engine.paused()")
        self._weights.refresh()
        self.policy_version = policy_version

    def close(self) -> None:
        """Stop the thread; callers that still wait get `ModelFailed`. May be called twice."""
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
        """What callers get once the thread has ended; a new exception each, since each raise adds to its traceback."""
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
            # Handed to every caller, now and later: there is nobody above a thread who could handle it.
            with self._changed:
                self._failure = failure
                self._changed.notify_all()
        self._fail_waiters()

    def _await_work(self) -> bool:
        """Take over what has arrived; park while there is nothing to do. False when the engine closes."""
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
        """Let agents that go on at once ask their next question before the next step, so that they all join in it.

        They want the same cores and Python's one lock, so steps meanwhile would be slow, and of a few sequences only.
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
            policy_version=self.policy_version,  # nothing runs across an update, so it is still that of the start
        )

    def _fail_waiters(self) -> None:
        with self._changed:
            waiters = list(self._waiters.values())
            self._waiters.clear()
        for loop, future in waiters:
            _call(loop, _resolve, [(future, self._over())])


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> bool:
    """Call ``function`` on a loop; False where that is closed, so that nobody is left who waits."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


def _lap(loop: asyncio.AbstractEventLoop, left: int, heard: threading.Event) -> None:
    """Tell after so many turns of the loop."""
    if left:
        loop.call_soon(_lap, loop, left - 1, heard)
    else:
        heard.set()


def _resolve(answers: list[_Answer]) -> None:
    for future, answer in answers:
        if future.done():  # cancelled while the answer was on its way
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


_ROOM = 4
"""Tokens of a stop string that may have no bytes of their own."""


def comes_to_stop(ids: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> bool:
    """Whether the last of ``ids`` completes one of ``stops``; asked after each token, it reads the end alone.

    :param stops: none of them empty.
    :param decode: the text of token ids.
    """
    longest = max(len(stop.encode()) for stop in stops) + _ROOM
    end = decode(ids[-longest:])
    if not any(stop in end for stop in stops):
        return False
    whole = decode(ids)  # the end alone may decode to something else
    return any(stop in whole for stop in stops)
