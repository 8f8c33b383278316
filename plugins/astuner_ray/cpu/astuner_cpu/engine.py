"""Rollout engine on a CPU whose weights come from a trainer, for the rollout servers of VERL and Trinity.

It wraps the local backbone's engine and knows nothing about VERL, Trinity, Ray or HTTP.  Invariant: every token is
sampled from the weights loaded at that time, given all preceding tokens, and its log-probability matches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from astuner import ModelSection
from astuner.contracts.types import FinishReason, SamplingParams
from astuner_local.engine import LocalEngine
from astuner_local.modeling import load_model


class PromptError(ValueError):
    """The prompt or its parameters are not supported; the message explains why."""


@dataclass(eq=False)
class Request:
    """One prompt and the tokens generated for it so far."""

    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: int = 0
    """Version of the weights that sampled its last token."""
    reason: FinishReason = FinishReason.CANCELLED

    @property
    def finished(self) -> bool:
        return self.reason is not FinishReason.CANCELLED

    @property
    def stopped(self) -> bool:
        """Whether its last token is an end token or completes a stop string."""
        return self.reason is FinishReason.STOP


def read_sampling(given: Mapping[str, Any], *, eos: Collection[int], default_tokens: int, room: int) -> SamplingParams:
    """Read sampling parameters under vLLM's names, which VERL's and Trinity's servers accept.

    :param eos: The model's end tokens, which end a generation unless ``ignore_eos`` is set.
    :param default_tokens: Number of tokens if ``max_tokens`` is missing.
    :param room: Tokens left in the context; an upper limit.
    :raises ValueError: A parameter is unknown, or has a value that this engine would ignore.
    """
    rest = dict(given)
    rest.pop("logprobs", None)  # they are always computed
    most = rest.pop("max_tokens", None) or rest.pop("max_new_tokens", None) or default_tokens
    ends = set(rest.pop("stop_token_ids", None) or ())
    strings = rest.pop("stop", None) or ()
    if not rest.pop("ignore_eos", False):
        ends |= set(eos)
    if rest.pop("repetition_penalty", 1.0) != 1.0:
        raise ValueError("rollouts on a CPU do not support repetition_penalty; leave it at 1.0")
    names = {"temperature": float, "top_p": float, "top_k": int, "seed": int}
    read = {name: kind(rest.pop(name)) for name, kind in names.items() if rest.get(name) is not None}
    if unknown := sorted(set(rest) - set(names)):
        raise ValueError(f"rollouts on a CPU do not support the sampling parameter {unknown[0]!r}")
    return SamplingParams(
        max_tokens=max(1, min(int(most), room)),
        stop_token_ids=tuple(sorted(ends)),
        stop=(strings,) if isinstance(strings, str) else tuple(strings),
        **read,
    )


class CpuEngine:
    """One model on this machine's CPU."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        max_model_len: int | None = None,
        default_tokens: int | None = None,
        defaults: Mapping[str, Any] | None = None,
        seed: int = 0,
        max_rows: int = 256,
        max_prefill_tokens: int = 8192,
        dtype: str = "float32",
    ) -> None:
        """Load the model.

        :param max_model_len: Most tokens of prompt and response together; None: the model's number of positions.
        :param default_tokens: Longest response if a request has no limit; None: limited by the context only.
        :param defaults: Sampling parameters of requests that do not set them, under vLLM's names.
        :param seed: Seed of requests without one.
        :param max_rows: Most requests decoded concurrently, as vLLM's ``max_num_seqs``.
        :param max_prefill_tokens: Most tokens in a forward pass over new requests, as vLLM's
            ``max_num_batched_tokens``.
        :param dtype: Type of weights and passes, by its name in `ModelSection`; loaded weights are rounded to it.
        :raises ValueError: A parameter in ``defaults`` is unknown.
        :raises ConfigError: The local backbone cannot run the model, see `astuner_local.modeling.load_model`.
        """
        self._defaults = {name: value for name, value in (defaults or {}).items() if value is not None}
        read_sampling(self._defaults, eos=(), default_tokens=1, room=1)  # fail now instead of at each request
        loaded = load_model(ModelSection(path=str(model_path), device="cpu", dtype=dtype))
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self._ends = loaded.eos_token_ids
        self.engine = LocalEngine(
            loaded.model,
            tokenizer_eos_ids=(),  # a request may ignore them
            max_model_len=max_model_len,
            max_num_seqs=max_rows,
            prefill_tokens=max_prefill_tokens,
            seed=seed,
            decode=loaded.tokenizer.decode,
        )
        self.max_model_len = self.engine.max_model_len
        self._default_tokens = default_tokens or self.max_model_len
        self._running: set[Request] = set()
        self._paused: ExitStack | None = None
        """Context manager of the current pause; closing it ends the pause."""
        self._rejecting = False
        self._gate = asyncio.Condition()
        self._changing = asyncio.Lock()
        """Lock for pausing the engine or changing its weights."""

    @property
    def version(self) -> int:
        """Version of the weights, as counted by the caller that loads them."""
        return self.engine.policy_version

    @version.setter
    def version(self, version: int) -> None:
        self.engine.policy_version = version

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any] | None = None, *, n: int = 1
    ) -> list[Request]:
        """Return ``n`` requests, each with its tokens [response] and their log-probabilities [response].

        They are finished unless `pause` stopped them.  Cancelling the call removes them from the batch immediately.

        :param sampling: Parameters under vLLM's names.
        :raises PromptError: The prompt contains invalid tokens or fills the context, or a parameter is unknown.
        :raises ModelFailed: The engine has failed, now or earlier.
        """
        requests = [self._request(prompt_ids, sampling or {}, i) for i in range(n)]
        await asyncio.gather(*map(self._answer, requests))
        return requests

    async def pause(self, *, reject: bool = False) -> int:
        """Stop all requests, admit none until `resume`, and return the number of stopped requests.

        :param reject: Stop new requests as well instead of letting them wait.
        """
        self._rejecting = reject
        stopped = len(self._running)
        async with self._changing:
            if self._paused is None:
                self._paused = ExitStack()
                await asyncio.to_thread(self._paused.enter_context, self.engine.paused(cut=True))
        await self._open_gate()  # release requests that wait because of an earlier pause if this one rejects
        return stopped

    async def resume(self) -> None:
        """Admit requests again."""
        async with self._changing:
            if self._paused is not None:
                self._paused.close()
            self._paused, self._rejecting = None, False
        await self._open_gate()

    async def load(self, weights: Mapping[str, Tensor], version: int | None, *, at_once: bool) -> None:
        """Replace the weights.

        :param version: Version of the weights; None: unchanged.
        :param at_once: Replace them between two tokens, so that running requests continue with the new weights, as in
            vLLM under Trinity; otherwise wait until no request is running.
        :raises ValueError: A tensor is missing, unknown or has the wrong shape; nothing is changed.
        """
        wanted = fitting(self.model, weights)

        @torch.no_grad()
        def change() -> None:
            for name, tensor in weights.items():
                wanted[name].copy_(tensor)
            self.engine.weights_updated(self.version if version is None else version)

        def between() -> None:
            with self.engine.paused(cut=at_once):
                change()

        async with self._changing:
            await asyncio.to_thread(change if self._paused is not None else between)

    async def _answer(self, request: Request) -> None:
        """Generate until the request is finished or a pause stops it; new weights do not end it."""
        asked = request.sampling
        while not request.finished:
            async with self._gate:
                await self._gate.wait_for(lambda: self._paused is None or self._rejecting)
                if self._paused is not None:
                    return
            self._running.add(request)
            done = len(request.tokens)
            seed = None if asked.seed is None else asked.seed + done  # avoid drawing the same random numbers again
            try:
                more = await self.engine.generate(
                    [*request.prompt, *request.tokens], replace(asked, max_tokens=asked.max_tokens - done, seed=seed)
                )
            finally:
                self._running.discard(request)
            request.tokens += more.response_ids
            request.logprobs += more.logprobs
            request.version, request.reason = more.policy_version, more.finish_reason
            if self._paused is not None:
                return

    async def _open_gate(self) -> None:
        async with self._gate:
            self._gate.notify_all()

    def _request(self, prompt_ids: Sequence[int], given: Mapping[str, Any], index: int) -> Request:
        words = self.model.config.vocab_size
        if not prompt_ids or not all(type(token) is int and 0 <= token < words for token in prompt_ids):
            raise PromptError(f"a prompt must contain one or more tokens from 0 to {words - 1}")
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise PromptError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {self.max_model_len}"
            )
        try:
            sampling = read_sampling(
                {**self._defaults, **given}, eos=self._ends, default_tokens=self._default_tokens, room=room
            )
        except (TypeError, ValueError) as e:
            raise PromptError(str(e)) from None
        seed = None if sampling.seed is None else sampling.seed + index
        return Request(list(prompt_ids), replace(sampling, seed=seed))


def fitting(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of ``model`` if ``weights`` match them; tied tensors may be missing.

    :raises ValueError: A tensor is missing, unknown or has the wrong shape.
    """
    wanted = dict(model.state_dict())
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    if wrong := sorted((set(wanted) - set(weights) - tied) | (set(weights) - set(wanted))):
        which = "is missing" if wrong[0] in wanted else "is not in the model"
        raise ValueError(f"the trainer's weights do not match the server's: {wrong[0]} {which}")
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(f"the trainer's {name} is {tuple(tensor.shape)}, the server's {tuple(wanted[name].shape)}")
    return wanted
