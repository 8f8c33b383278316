"""The token losses at values where the right answer can be written down."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from astuner.config.schema import AlgorithmSection, TrainerCommon
from astuner.contracts.objective import LossInput, TokenLoss
from astuner.plugins import registry
from astuner.plugins.loader import load_plugins
from astuner.rollout.credit import find_loss, token_loss
from astuner.testing import check_loss, check_plugin
from astuner_objectives.step import kl_penalty, old_logprobs, rollout_correction, token_losses
from tests.table import table

OWNER = torch.tensor([0, 0, 1])
NAMES = sorted(name for _, name, _ in load_plugins().offers("loss"))


def inputs(**changes: Any) -> LossInput:
    """Three tokens of two samples, with ratios of 1, unless said otherwise."""
    old = changes.get("old_logprobs", torch.tensor([-2.0, -1.0, -3.0]))
    whole = {
        "logprobs": old,
        "old_logprobs": old,
        "rollout_logprobs": old,
        "advantages": torch.ones(3),
        "owner": OWNER,
        "clip_low": 0.2,
        "clip_high": 0.3,
        **changes,
    }
    return LossInput(**whole)


def loss_of(name: str, ratios: list[float], advantages: list[float]) -> tuple[TokenLoss, list[float]]:
    old = torch.tensor([-2.0, -1.0, -3.0])
    logprobs = (old + torch.tensor(ratios).log()).requires_grad_()
    found = token_loss(name, find_loss(name), inputs(logprobs=logprobs, advantages=torch.tensor(advantages)))
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    return found, gradient.tolist()


def test_the_package_offers_what_the_core_says_it_does() -> None:
    plugin = check_plugin("objectives")
    for kind in ("loss", "advantage estimator"):
        known = {name for (of, name), dist in registry.known_plugins().items() if of == kind}
        assert known == set(plugin.provides[kind])
    assert all(registry.resolve(load_plugins(), "loss", name) for name in NAMES)


@table("name", NAMES)
def test_each_keeps_to_the_contract(name: str) -> None:
    check_loss(find_loss(name))


@table("name", NAMES)
def test_on_policy_gradient_is_the_policy_gradient(name: str) -> None:
    _, gradient = loss_of(name, [1.0, 1.0, 1.0], [2.0, 2.0, -1.0])
    assert gradient == pytest.approx([-2.0, -2.0, 1.0])


@table("name", ["grpo", "dr_grpo", "dapo", "reinforce_plus_plus"])
def test_clipping_stops_the_gradient_on_the_side_it_should(name: str) -> None:
    found, gradient = loss_of(name, [1.5, 0.5, 1.5], [1.0, -1.0, -1.0])
    assert gradient == pytest.approx([0.0, 0.0, 1.5])  # too far up and good, too far down and bad, and not clipped
    assert found.loss.tolist() == pytest.approx([-1.3, 0.8, 1.5])
    assert found.clipped_high.tolist() == [True, False, False]
    assert found.clipped_low.tolist() == [False, True, False]


def test_gspo_uses_the_geometric_mean_of_the_sequence() -> None:
    found, gradient = loss_of("gspo", [1.2, 0.9, 1.1], [1.0, 1.0, -1.0])
    s = math.sqrt(1.2 * 0.9)
    assert found.ratio.tolist() == pytest.approx([s, s, 1.1])
    assert gradient == pytest.approx([-s, -s, 1.1])


def test_gspo_clips_whole_sequences() -> None:
    _, gradient = loss_of("gspo", [2.0, 1.2, 1.0], [1.0, 1.0, 1.0])
    assert gradient == pytest.approx([0.0, 0.0, -1.0])


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    _, gradient = loss_of("cispo", [1.5, 0.5, 1.1], [1.0, -1.0, 1.0])
    assert gradient == pytest.approx([-1.3, 0.8, -1.1])


def test_rloo_ignores_the_ratio() -> None:
    _, gradient = loss_of("rloo", [5.0, 0.1, 1.0], [1.0, -1.0, 2.0])
    assert gradient == pytest.approx([-1.0, 1.0, -2.0])


@table("name", NAMES)
def test_enormous_ratios_stay_finite(name: str) -> None:
    old = torch.tensor([-500.0, 0.0, -1.0])
    logprobs = torch.tensor([0.0, -500.0, -1.0], requires_grad=True)
    found = token_loss(
        name,
        find_loss(name),
        inputs(logprobs=logprobs, old_logprobs=old, advantages=torch.tensor([-1.0, 1.0, 1.0]), clip_high=0.2),
    )
    found.loss.sum().backward()
    assert torch.isfinite(found.loss).all()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_kl_estimators() -> None:
    d = 0.5
    logprobs, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert kl_penalty("k1", logprobs, reference).item() == pytest.approx(d)
    assert kl_penalty("k2", logprobs, reference).item() == pytest.approx(d * d / 2)
    assert kl_penalty("k3", logprobs, reference).item() == pytest.approx(math.exp(-d) - 1 + d)
    assert kl_penalty("low_var_kl", logprobs, reference) == kl_penalty("k3", logprobs, reference)
    with pytest.raises(ValueError, match="k4"):
        kl_penalty("k4", logprobs, reference)


@given(st.lists(st.floats(0.05, 1.0), min_size=2, max_size=6), st.integers(0, 1000))
def test_kl_estimators_have_the_value_and_gradient_they_claim(weights: list[float], seed: int) -> None:
    """k1 and k3 have the exact KL as expectation; k2 has its exact gradient; k1's gradient is zero on average."""
    torch.manual_seed(seed)
    logits = torch.tensor(weights, dtype=torch.float64).log().requires_grad_()
    reference = torch.log_softmax(torch.randn(len(weights), dtype=torch.float64), -1)
    log_p = torch.log_softmax(logits, -1)
    p = log_p.detach().exp()
    exact = (log_p.exp() * (log_p - reference)).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    values = {kind: kl_penalty(kind, log_p, reference) for kind in ("k1", "k2", "k3")}
    assert float((p * values["k1"].detach()).sum()) == pytest.approx(exact.item(), abs=1e-9)
    assert float((p * values["k3"].detach()).sum()) == pytest.approx(exact.item(), abs=1e-9)
    assert (values["k3"] >= -1e-12).all()
    of = {kind: torch.autograd.grad((p * v).sum(), logits, retain_graph=True)[0] for kind, v in values.items()}
    assert of["k2"].tolist() == pytest.approx(exact_gradient.tolist(), abs=1e-9)
    assert of["k1"].abs().max().item() < 1e-9


def test_rollout_correction() -> None:
    rollout = torch.tensor([-1.0, -1.0, -1.0])
    trainer = rollout + torch.tensor([0.5, 2.0, 1.5]).log()

    def weights(mode: str, threshold: float = 1.2) -> list[float]:
        return rollout_correction(mode, inputs(old_logprobs=trainer, rollout_logprobs=rollout), threshold).tolist()

    assert weights("none") == [1.0, 1.0, 1.0]
    assert weights("token-truncate") == pytest.approx([0.5, 1.2, 1.2])
    assert weights("token-mask") == pytest.approx([0.5, 0.0, 0.0])
    assert weights("sequence-truncate") == pytest.approx([1.0, 1.0, 1.2])
    assert weights("sequence-mask") == pytest.approx([1.0, 1.0, 0.0])
    assert weights("sequence-truncate", 9.0) == pytest.approx([1.0, 1.0, 1.5])


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-3, 3)), max_size=20))
def test_sums_and_means_of_samples(pairs: list[tuple[int, float]]) -> None:
    owner = torch.tensor([o for o, _ in pairs], dtype=torch.long)
    values = torch.tensor([v for _, v in pairs], dtype=torch.float64)
    expected = [sum(v for o, v in pairs if o == mine) for mine, _ in pairs]
    of = inputs(owner=owner)
    assert of.sample_sum(values).tolist() == pytest.approx(expected)
    sizes = [sum(o == mine for o, _ in pairs) for mine, _ in pairs]
    assert of.sample_mean(values).tolist() == pytest.approx([e / n for e, n in zip(expected, sizes, strict=True)])


def losses_of(settings: TrainerCommon, **changes: torch.Tensor):
    given = {
        "logprobs": torch.tensor([-1.0, -2.0, -3.0]),
        "rollout": torch.tensor([-1.0, -2.0, -3.0]) - math.log(3),
        "old": torch.tensor([-1.0, -2.0, -3.0]) - math.log(1.5),
        "advantage": torch.tensor([1.0, 1.0, -1.0]),
        "owner": OWNER,
        **changes,
    }
    return token_losses(settings, **given)


def test_the_total_is_corrected_policy_plus_kl_minus_entropy() -> None:
    settings = TrainerCommon(
        algorithm=AlgorithmSection(clip_ratio_high=0.2, rollout_is="token-truncate", rollout_is_threshold=1.6),
        use_kl_loss=True,
        kl_loss_coef=0.5,
        kl_loss_type="k2",
        entropy_coeff=0.25,
    )
    reference = torch.tensor([-2.0, -2.0, -3.0])
    found = losses_of(settings, reference=reference, entropy=torch.tensor([0.4, 0.8, 1.2]))
    assert found.correction is not None
    assert found.kl is not None
    assert found.correction.tolist() == pytest.approx([1.6, 1.6, 1.6])  # old over rollout is 2, truncated
    assert found.policy.tolist() == pytest.approx([-1.2 * 1.6, -1.2 * 1.6, 1.5 * 1.6])
    assert found.kl.tolist() == pytest.approx([0.5, 0.0, 0.0])
    assert found.total.tolist() == pytest.approx([-1.92 + 0.25 - 0.1, -1.92 - 0.2, 2.4 - 0.3])
    assert found.ratio.tolist() == pytest.approx([1.5, 1.5, 1.5])
    assert found.clipped_high.tolist() == [True, True, False]


def test_a_term_that_is_not_asked_for_is_not_there() -> None:
    found = losses_of(TrainerCommon(), reference=torch.zeros(3), entropy=torch.ones(3))
    assert found.kl is None
    assert found.correction is None
    assert found.total.tolist() == found.policy.tolist() == pytest.approx([-1.2, -1.2, 1.5])


def test_a_term_without_what_it_is_made_of_is_refused() -> None:
    with pytest.raises(ValueError, match="use_kl_loss needs"):
        losses_of(TrainerCommon(use_kl_loss=True))
    with pytest.raises(ValueError, match="entropy_coeff needs"):
        losses_of(TrainerCommon(entropy_coeff=0.1))


@table("mode", ["none", "token-mask"])
def test_ratios_are_to_the_rollout_unless_it_is_corrected_for(mode: str) -> None:
    rollout, before = torch.tensor([-1.0]), torch.tensor([-2.0])
    found = old_logprobs(AlgorithmSection(rollout_is=mode), rollout=rollout, before=before)  # type: ignore[arg-type]
    assert found is (rollout if mode == "none" else before)
