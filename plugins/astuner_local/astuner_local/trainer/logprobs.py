"""Log-probabilities of given tokens from hidden states, without storing large logits.

Logits of N tokens over a vocabulary of V take N x V x 4 bytes, and automatic differentiation keeps several copies.
Above `DENSE_LIMIT` bytes the vocabulary head runs over chunks of tokens, and its backward pass recomputes each chunk's
logits, so memory stays at one chunk (at about 1.3 times the compute).

Invariant: both paths return log softmax(logits / temperature) in float32, of the same logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from astuner.contracts.errors import ConfigError

DENSE_LIMIT = 512 * 2**20
"""Bytes of float32 logits above which the head runs in chunks."""
CHUNK = 256
"""Tokens per chunk: at 256 the extra compute is about a third, at 64 two thirds."""


def token_logprobs(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    row: Tensor | None = None,
    temperature: float,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each target, and the entropy of the distribution it was drawn from.

    :param hidden: [M, h] of the tokens before the targets.
    :param head: Linear from h to V.
    :param targets: int64 [N].
    :param row: int64 [N], index in ``hidden`` of the token before each target; None: M is N, in the same order.
    :param temperature: Sampling temperature of the rollout, above 0.
    :param entropy_grad: Whether the entropy is differentiable too, which keeps two more copies of the logits.
    :param chunk: Tokens per chunk; None: chosen by memory.
    :returns: Natural log-probabilities [N] and entropies [N] in nats (None unless requested), float32.
    """
    if row is None:
        row = torch.arange(len(targets), device=targets.device)
    if chunk is None and len(hidden) * head.weight.shape[0] * 4 > DENSE_LIMIT:  # type: ignore[index]
        chunk = CHUNK
    if chunk is not None:
        if type(head) is not nn.Linear:
            raise ConfigError(
                f"the vocabulary head is a {type(head).__name__}, but only a plain linear layer can run in chunks; "
                "remove the head from astuner.model.lora.target_modules, or lower trainer_common.micro_batch_tokens"
            )
        logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden.index_select(0, row), head.weight, head.bias, targets, temperature, chunk
        )
        return logprobs, (entropy if entropy_grad else entropy.detach()) if with_entropy else None
    log_p = _log_softmax(head(hidden), temperature)
    logprobs = log_p.view(-1).index_select(0, row * log_p.shape[1] + targets)
    if not entropy_grad:
        log_p = log_p.detach()
    return logprobs, -(log_p.exp() * log_p).sum(-1).index_select(0, row) if with_entropy else None


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.float()
    return torch.log_softmax(logits if temperature == 1 else logits / temperature, -1)


class _ChunkedLogprobs(torch.autograd.Function):
    """Chunked log-probabilities with recomputation in the backward pass.

    With z = logits / T, p = softmax(z), y the target and H the entropy:
    d log p_y / dz_j = 1[j = y] - p_j   and   dH / dz_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = [], []
        for h, y in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True):
            log_p = _log_softmax(F.linear(h, weight, bias), temperature)
            logprobs.append(log_p.gather(-1, y[:, None])[:, 0])
            entropies.append(-(log_p.exp() * log_p).sum(-1))
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        for start in range(0, len(targets), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            h = hidden[rows]
            log_p = _log_softmax(F.linear(h, weight, bias), ctx.temperature)
            p = log_p.exp()
            by_entropy = grad_entropy[rows, None]
            grad_z = -p * (grad_logprobs[rows, None] + by_entropy * (log_p + entropy[rows, None]))
            grad_z.scatter_add_(-1, targets[rows, None], grad_logprobs[rows, None])
            grad_logits = grad_z.div_(ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += (grad_logits.T @ h).float()
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0).float()
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )
