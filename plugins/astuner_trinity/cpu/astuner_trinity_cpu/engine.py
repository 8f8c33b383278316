"""Token ids in, token ids out, from a transformers model in float32 whose weights may change while it generates.

Nothing here knows about Trinity, Ray or HTTP.  Invariant: every token is drawn from the weights that are loaded when
it is drawn, given everything before it, and its log-probability says so; after a change of weights the requests that
run go on with the new ones, as vLLM's do in Trinity.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from astuner_cpu.decoder import Decoder, Request
from astuner_cpu.sampling import read_sampling
from astuner_cpu.serving import Serving
from astuner_cpu.weights import end_tokens, load_weights

MAX_ROWS = 256
"""Most requests decoded at once, as vLLM's ``max_num_seqs``."""
MAX_PREFILL_TOKENS = 8192
"""Most tokens in a forward pass over those that join, as vLLM's ``max_num_batched_tokens``."""


class PromptError(ValueError):
    """A prompt or its parameters cannot be honoured; the message says why."""


class CpuEngine:
    """One model on this machine's CPU."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        tokenizer_ends: int | list[int] | None = None,
        max_model_len: int | None = None,
        default_tokens: int | None = None,
        defaults: Mapping[str, Any] | None = None,
        seed: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        """
        :param tokenizer_ends: the tokenizer's end tokens; the model's own are known.
        :param max_model_len: most tokens of prompt and response together; None: as many as the model has positions.
        :param default_tokens: longest response where a request does not say; None: what the context has room for.
        :param defaults: sampling parameters of requests that do not name them, by vLLM's names.
        :param seed: where the seeds of requests that have none start.
        :raises ValueError: one of ``defaults`` is not known here.
        """
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            str(model_path),
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=trust_remote_code,
        )  # in evaluation mode, as from_pretrained leaves it
        self.max_model_len = max_model_len or self.model.config.max_position_embeddings
        self.version = 0
        """Of the weights, as whoever loads them counts."""
        self.decode: Callable[[list[int]], str] | None = None
        """The text of tokens, for stop strings; set by whoever has the tokenizer."""
        self._ends = end_tokens(tokenizer_ends, self.model.generation_config.eos_token_id)
        self._default_tokens = default_tokens or self.max_model_len
        self._defaults = {name: value for name, value in (defaults or {}).items() if value is not None}
        read_sampling(self._defaults, eos=(), default_tokens=1, room=1)  # raises now rather than at each request
        self._seeds = random.Random(seed)
        self._serving = Serving(Decoder(self.model, max_rows=MAX_ROWS, max_prefill_tokens=MAX_PREFILL_TOKENS))

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any] | None = None, *, n: int = 1
    ) -> list[Request]:
        """``n`` finished requests, each with its tokens [response] and their log-probabilities [response].

        A cancelled call leaves the batch at once.

        :param sampling: parameters by vLLM's names.
        :raises PromptError: the prompt has tokens the model has not, or leaves no room in the context; or a parameter
            is unknown.
        """
        requests = [self._request(prompt_ids, sampling or {}, i) for i in range(n)]
        await asyncio.gather(*map(self._serving.generate, requests))
        return requests

    def finish_reason(self, request: Request) -> str:
        """OpenAI's word for why a finished request ended."""
        return "stop" if request.stopped else "length"

    async def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> Tensor:
        """Log-probability of each token but the first, given those before it: [len(token_ids) - 1]."""
        self._check(token_ids, room=0)

        @torch.inference_mode()
        def compute() -> Tensor:
            ids = torch.tensor([list(token_ids)])
            logits: Tensor = self.model(input_ids=ids).logits[0, :-1].float()
            return torch.log_softmax(logits / temperature, -1).gather(-1, ids[0, 1:, None])[:, 0].clone()

        return await self._serving.between_steps(compute)

    async def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take over ``weights`` between two tokens; requests that run go on with them.

        :raises ValueError: a tensor is missing, has no place in the model or has another shape; nothing is changed.
        """

        def change() -> None:
            load_weights(self.model, weights)
            self.version = version

        await self._serving.swap(change)

    def _request(self, prompt_ids: Sequence[int], given: Mapping[str, Any], index: int) -> Request:
        room = self._check(prompt_ids, room=1)
        try:
            sampling = read_sampling(
                {**self._defaults, **given}, eos=self._ends, default_tokens=self._default_tokens, room=room
            )
        except (TypeError, ValueError) as e:
            raise PromptError(str(e)) from None
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed + index
        if sampling.stop_strings and self.decode is None:
            raise PromptError("stop strings need a tokenizer, which the OpenAI server of this engine has")
        return Request(list(prompt_ids), sampling, torch.Generator().manual_seed(seed), self.decode)

    def _check(self, ids: Collection[int], *, room: int) -> int:
        """How many tokens the context has left.

        :param room: how many it must have.
        """
        words = self.model.config.vocab_size
        if not ids or not all(type(token) is int and 0 <= token < words for token in ids):
            raise PromptError(f"a prompt is one or more tokens from 0 to {words - 1}")
        left = self.max_model_len - len(ids)
        if left < room:
            raise PromptError(f"a prompt of {len(ids)} tokens leaves no room in a context of {self.max_model_len}")
        return int(left)
