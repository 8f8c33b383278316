"""Losses in plain torch, token by token as the papers write them: the transformers forward, one sample at a time.

It knows nothing of ASTuner's trainers and objectives, so that an engine's loss and gradient can be held against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from astuner.config.schema import AlgorithmSection, TrainerCommon
from astuner.contracts.types import Sample

TEMPERATURE = 0.8
OWN = f"{Path(__file__).with_name('own.py')}->soft_clip"
"""A loss as a person writes it beside an experiment."""
LOSS_ROUNDING = 5e-5
"""Absolute: a loss is what is left of terms like ``advantage · log p`` of size 10, each right to about 1e-6 of that in
float32, and how they round differs from processor to processor. A forgotten term shows at 1e-2."""


def distribution(model: Any, sample: Sample) -> torch.Tensor:
    """Log-probabilities of every token after each of the sample's. [T, V]"""
    ids = torch.tensor([list(sample.input_ids)])
    return torch.log_softmax(model(input_ids=ids).logits[0].float() / TEMPERATURE, -1)


def aggregation(samples: Sequence[Sample], mode: str, constant_length: int) -> dict[str, float]:
    """Weight of each trained token by episode, from the definition of the mode."""
    tokens: dict[str, int] = {}
    for s in samples:
        tokens[s.episode_id] = tokens.get(s.episode_id, 0) + sum(s.loss_mask)
    episodes = len(tokens)
    return {
        e: {
            "token-mean": 1 / sum(tokens.values()),
            "seq-mean-token-sum": 1 / episodes,
            "seq-mean-token-mean": 1 / (episodes * n),
            "seq-mean-token-sum-norm": 1 / (episodes * constant_length),
        }[mode]
        for e, n in tokens.items()
    }


def token_loss(name: str, log_p: Any, old: float, mean_log_ratio: Any, advantage: float, a: AlgorithmSection) -> Any:
    ratio = torch.exp(log_p - old)
    low, high = 1 - a.clip_ratio_low, 1 + a.clip_ratio_high
    if name == "gspo":
        ratio = torch.exp(mean_log_ratio)
    if name == OWN:
        heat = 20.0 if advantage < 0 else 10.0
        return -4 / heat * torch.sigmoid(heat * (torch.exp(mean_log_ratio) - 1)) * advantage
    if name == "cispo":
        weight = min(max(ratio.item(), low), high)
        return -weight * advantage * log_p
    if name == "rloo":
        return -advantage * log_p
    unclipped, clipped = ratio * advantage, torch.clamp(ratio, low, high) * advantage
    return -(unclipped if unclipped.item() < clipped.item() else clipped)


def step_loss(
    model: Any, reference: Any, samples: Sequence[Sample], config: TrainerCommon, *, constant_length: int = 16
) -> torch.Tensor:
    """What a step minimises, as ``config`` says. A scalar, with a gradient to the weights of ``model``."""
    a = config.algorithm
    weights = aggregation(samples, a.loss_agg_mode, constant_length)
    total = torch.zeros(())
    for s in samples:
        table = distribution(model, s)
        with torch.no_grad():
            of_reference = distribution(reference, s) if config.use_kl_loss else None
        at = [t for t, trained in enumerate(s.loss_mask) if trained]
        log_ps = [table[t - 1, s.input_ids[t]] for t in at]
        rollout = [s.logprobs[t] for t in at]
        old = [x.item() for x in log_ps] if a.rollout_is not in ("auto", "none") else rollout
        mean_log_ratio = sum(x - o for x, o in zip(log_ps, old, strict=True)) / len(at)
        gaps = [x.item() - r for x, r in zip(log_ps, rollout, strict=True)]
        for i, t in enumerate(at):
            loss = token_loss(a.loss, log_ps[i], old[i], mean_log_ratio, s.advantage, a)
            if a.rollout_is not in ("auto", "none"):
                w = math.exp(sum(gaps) if a.rollout_is.startswith("sequence") else gaps[i])
                if a.rollout_is.endswith("truncate"):
                    w = min(w, a.rollout_is_threshold)
                elif w > a.rollout_is_threshold:
                    w = 0.0
                loss = loss * w
            if of_reference is not None:
                d = log_ps[i] - of_reference[t - 1, s.input_ids[t]]
                kl = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d, "low_var_kl": torch.exp(-d) - 1 + d}
                loss = loss + config.kl_loss_coef * kl[config.kl_loss_type]
            if config.entropy_coeff:
                row = table[t - 1]
                loss = loss + config.entropy_coeff * (row.exp() * row).sum()
            total = total + weights[s.episode_id] * loss
    return total


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the trainable weights."""
    names, weights = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights), strict=True))
