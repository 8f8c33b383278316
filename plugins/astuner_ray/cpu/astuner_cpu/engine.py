"""Token ids in, token ids out, from a model whose weights come from a trainer: the local backbone's engine,
as VERL's and Trinity's rollout servers speak to theirs.

Nothing here knows about VERL, Trinity, Ray or HTTP.  Invariant: every token is drawn from the weights that are loaded
when it is drawn, given everything before it, and its log-probability says so.
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
    """A prompt or its parameters cannot be honoured; the message says why."""


@dataclass(eq=False)
class Request:
    """One prompt, and what has been generated for it so far."""

    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: int = 0
    """Of the weights that drew its last token."""
    reason: FinishReason = FinishReason.CANCELLED

    @property
    def finished(self) -> bool:
        return self.reason is not FinishReason.CANCELLED

    @property
    def stopped(self) -> bool:
        """Whether its last token is an end, or completes a stop string."""
        return self.reason is FinishReason.STOP


def read_sampling(given: Mapping[str, Any], *, eos: Collection[int], default_tokens: int, room: int) -> SamplingParams:
    """Read parameters by vLLM's names, which VERL's and Trinity's servers take.

    :param eos: the model's own ends, which end a generation unless ``ignore_eos`` is given.
    :param default_tokens: how many tokens where ``max_tokens`` is not given.
    :param room: how many tokens the context has left; never more, whatever is asked for.
    :raises ValueError: a parameter is unknown, or one that is known has a value that would be ignored here.
    """
    rest = dict(given)
    rest.pop("logprobs", None)  # they are always computed
    most = rest.pop("max_tokens", None) or rest.pop("max_new_tokens", None) or default_tokens
    ends = set(rest.pop("stop_token_ids", None) or ())
    strings = rest.pop("stop", None) or ()
    if not rest.pop("ignore_eos", False):
        ends |= set(eos)
    if rest.pop("repetition_penalty", 1.0) != 1.0:
        raise ValueError("a rollout server on a CPU has no repetition_penalty; leave it at 1.0")
    names = {"temperature": float, "top_p": float, "top_k": int, "seed": int}
    read = {name: kind(rest.pop(name)) for name, kind in names.items() if rest.get(name) is not None}
    if unknown := sorted(set(rest) - set(names)):
        raise ValueError(f"a rollout server on a CPU does not know the sampling parameter {unknown[0]!r}")
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
        """
        :param max_model_len: most tokens of prompt and response together; None: as many as the model has positions.
        :param default_tokens: longest response where a request does not say; None: what the context has room for.
        :param defaults: sampling parameters of requests that do not name them, by vLLM's names.
        :param seed: of requests that have none.
        :param max_rows: most requests decoded at once, as vLLM's ``max_num_seqs``.
        :param max_prefill_tokens: most tokens in a forward pass over those that join, as vLLM's
            ``max_num_batched_tokens``.
        :param dtype: of weights and passes, by its name in `ModelSection`; weights that are loaded are rounded to it.
        :raises ValueError: one of ``defaults`` is not known here.
        :raises ConfigError: the local backbone cannot run the model, see `astuner_local.modeling.load_model`.
        """
        self._defaults = {name: value for name, value in (defaults or {}).items() if value is not None}
        read_sampling(self._defaults, eos=(), default_tokens=1, room=1)  # raises now rather than at each request
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
        """Ends the pause that holds."""
        self._rejecting = False
        self._gate = asyncio.Condition()
        self._changing = asyncio.Lock()
        """Held by whoever pauses the engine, or changes its weights."""

    @property
    def version(self) -> int:
        """Of the weights, as whoever loads them counts."""
        return self.engine.policy_version

    @version.setter
    def version(self, version: int) -> None:
        self.engine.policy_version = version

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any] | None = None, *, n: int = 1
    ) -> list[Request]:
        """``n`` requests, each with its tokens [response] and their log-probabilities [response].

        They are finished, unless `pause` stopped them.  A cancelled call leaves the batch at once.

        :param sampling: parameters by vLLM's names.
        :raises PromptError: the prompt has tokens the model has not, or leaves no room in the context; or a parameter
            is unknown.
        :raises ModelFailed: the engine has failed, now or before.
        """
        requests = [self._request(prompt_ids, sampling or {}, i) for i in range(n)]
        await asyncio.gather(*map(self._answer, requests))
        return requests

    async def pause(self, *, reject: bool = False) -> int:
        """Stop every request and let none in until `resume`; how many were stopped.

        :param reject: stop those that arrive as well, instead of letting them wait.
        """
        self._rejecting = reject
        stopped = len(self._running)
        async with self._changing:
            if self._paused is None:
                self._paused = ExitStack()
                await asyncio.to_thread(self._paused.enter_context, self.engine.paused(cut=True))
        await self._open_gate()  # those that wait behind an earlier pause, should this one reject
        return stopped

    async def resume(self) -> None:
        """Let requests in again."""
        async with self._changing:
            if self._paused is not None:
                self._paused.close()
            self._paused, self._rejecting = None, False
        await self._open_gate()

    async def load(self, weights: Mapping[str, Tensor], version: int | None, *, at_once: bool) -> None:
        """Take over ``weights``.

        :param version: of the weights; None: as before.
        :param at_once: between two tokens, and the requests that run go on with them, as vLLM's do in Trinity;
            otherwise once nothing is being generated.
        :raises ValueError: a tensor is missing, has no place in the model or has another shape; nothing is changed.
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
        """Generate until it is finished or a pause stops it; new weights let it go on with them."""
        asked = request.sampling
        while not request.finished:
            async with self._gate:
                await self._gate.wait_for(lambda: self._paused is None or self._rejecting)
                if self._paused is not None:
                    return
            self._running.add(request)
            done = len(request.tokens)
            seed = None if asked.seed is None else asked.seed + done  # the same numbers would be drawn again
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
            raise PromptError(f"a prompt is one or more tokens from 0 to {words - 1}")
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
    """The tensors of ``model``, into which ``weights`` fit; tensors tied to others may be left out of these.

    :raises ValueError: a tensor is missing, has no place in the model or has another shape.
    """
    wanted = dict(model.state_dict())
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    if wrong := sorted((set(wanted) - set(weights) - tied) | (set(weights) - set(wanted))):
        which = "is missing" if wrong[0] in wanted else "has no place in the model"
        raise ValueError(f"the trainer's weights are not the server's: {wrong[0]} {which}")
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(f"the trainer's {name} is {tuple(tensor.shape)}, the server's {tuple(wanted[name].shape)}")
    return wanted
