"""The sizes of the loss terms equal the L1 norms of their gradients with respect to the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from astuner import AlgorithmSection, TrainerCommon
from astuner_objectives.step import logit_gradients, token_losses

TERMS: dict[str, dict[str, Any]] = {
    "policy alone": {},
    "a small KL": {"use_kl_loss": True, "kl_loss_coef": 0.02},
    "a large KL": {"use_kl_loss": True, "kl_loss_coef": 100.0},
    "k2": {"use_kl_loss": True, "kl_loss_coef": 1.0, "kl_loss_type": "k2"},
    "k1": {"use_kl_loss": True, "kl_loss_coef": 1.0, "kl_loss_type": "k1"},
    "an entropy bonus": {"entropy_coeff": 1.0},
    "an entropy penalty": {"entropy_coeff": -0.5},
    "all three": {"use_kl_loss": True, "kl_loss_coef": 0.5, "entropy_coeff": 0.01},
    "gspo": {"algorithm": AlgorithmSection(loss="gspo", clip_ratio_low=0.5, clip_ratio_high=0.5)},
    "cispo": {"algorithm": AlgorithmSection(loss="cispo")},
    "reinforce": {"algorithm": AlgorithmSection(loss="rloo")},
}


@pytest.mark.parametrize("terms", TERMS)
def test_sizes_equal_the_gradients_with_respect_to_the_logits(terms: str) -> None:
    settings = TrainerCommon(**TERMS[terms])
    generator = torch.Generator().manual_seed(0)
    n, vocabulary = 12, 7
    logits = (2 * torch.randn(n, vocabulary, generator=generator)).requires_grad_()
    chosen = torch.randint(vocabulary, (n,), generator=generator)
    reference = torch.randn(n, vocabulary, generator=generator).log_softmax(-1)[range(n), chosen]
    logs = logits.log_softmax(-1)
    logprobs, entropy = logs[range(n), chosen], -(logs.exp() * logs).sum(-1)
    weight = torch.rand(n, generator=generator)
    losses = token_losses(
        settings,
        logprobs=logprobs,
        rollout=logprobs.detach() + 0.01,
        old=logprobs.detach() + 0.01,
        advantage=torch.randn(3, generator=generator).repeat_interleave(4),
        owner=torch.arange(3).repeat_interleave(4),
        reference=reference,
        entropy=entropy,
    )
    sizes = logit_gradients(settings, losses, logprobs=logprobs, weight=weight, entropy=entropy)
    assert all(not size.requires_grad for size in sizes.values())

    def exact(term: Any) -> float:
        (gradient,) = torch.autograd.grad((weight * term).sum(), logits, retain_graph=True)
        return float(gradient.abs().sum() / 2)

    expected = {"policy"} | ({"kl"} if settings.use_kl_loss else set())
    expected |= {"entropy"} if settings.entropy_coeff else set()
    assert set(sizes) == {f"logit_grad/{name}" for name in expected}
    assert float(sizes["logit_grad/policy"]) == pytest.approx(exact(losses.policy), rel=1e-4)
    if losses.kl is not None:
        assert float(sizes["logit_grad/kl"]) == pytest.approx(exact(settings.kl_loss_coef * losses.kl), rel=1e-4)
    if settings.entropy_coeff:
        assert float(sizes["logit_grad/entropy"]) >= exact(settings.entropy_coeff * entropy)
    (weight * losses.total).sum().backward()  # the graph is still there
    assert logits.grad is not None
