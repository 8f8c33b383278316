"""Muon's step for one hidden matrix (Jordan 2024, https://kellerjordan.github.io/posts/muon/), on every backbone.

It uses bfloat16 on GPUs and float32 on CPUs. Most CPUs emulate bfloat16, which takes nearly twenty times as long and
would dominate the update of a small model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's quintic. Five rounds bring singular values to between about 0.7 and 1.2."""
ROUNDS = 5
UPDATE_RMS = 0.2
"""Close to the RMS of AdamW's updates, so that one rate suits all weights (Liu et al. 2025, arXiv:2502.16982)."""


def look_ahead(grad: Tensor, momentum: Tensor, beta: float) -> Tensor:
    """Update `momentum` with `grad` in place, and return Nesterov's momentum in the dtype of the computation."""
    momentum.lerp_(grad, 1 - beta)
    return grad.lerp(momentum, beta).to(torch.float32 if grad.device.type == "cpu" else torch.bfloat16)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return approximately the nearest orthogonal matrix: the same singular vectors, with singular values near 1."""
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)  # the iteration diverges for singular values above 1
    for _ in range(ROUNDS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def move(weight: Tensor, direction: Tensor, *, rate: float, weight_decay: float) -> None:
    """Change `weight` in place by an orthogonal matrix, or this process's part of it."""
    weight.mul_(1 - rate * weight_decay)
    weight.add_(direction, alpha=-rate * UPDATE_RMS * math.sqrt(max(weight.shape)))
