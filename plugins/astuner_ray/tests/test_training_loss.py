"""The loss of a micro-batch: shares add up to the whole, and rows that fill a batch up are not there."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from astuner.config.schema import TrainerCommon
from astuner_objectives.step import token_losses
from astuner_ray.training.loss import micro_batch_loss
from tests.table import table

ROWS, LENGTH = 8, 5
FIELDS = ("logprobs", "rollout", "before", "advantages", "reference", "entropy")
SETTINGS = {
    "plain": TrainerCommon(),
    "corrected, with all terms": TrainerCommon.model_validate(
        {
            "use_kl_loss": True,
            "kl_loss_coef": 0.3,
            "entropy_coeff": 0.2,
            "algorithm": {"loss": "gspo", "rollout_is": "sequence-mask", "rollout_is_threshold": 1.1},
        }
    ),
}


def batch(rows: int = ROWS) -> dict[str, Any]:
    """Rows as a trainer pads them: any numbers where nothing is trained."""
    generator = torch.Generator().manual_seed(0)
    fields: dict[str, Any] = {name: torch.randn(rows, LENGTH, generator=generator) for name in FIELDS}
    fields["trained"] = torch.rand(rows, LENGTH, generator=generator) < 0.6
    fields["trained"][:, 0] = True
    fields["token_weight"] = torch.rand(rows, generator=generator)
    return fields


def part(fields: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {name: values[rows] for name, values in fields.items()}


def share(
    settings: TrainerCommon, fields: dict[str, Any], *, processes: int = 1, tokens: float | None = None
) -> tuple[float, torch.Tensor, dict[str, Any]]:
    """The loss, its gradient by row and token, and the metrics."""
    logprobs = fields["logprobs"].clone().requires_grad_()
    total = float(fields["trained"].sum()) if tokens is None else tokens
    loss, measured = micro_batch_loss(settings, **{**fields, "logprobs": logprobs}, processes=processes, tokens=total)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad, {name: (of.how, float(of.value)) for name, of in measured.items()}


@table("name", SETTINGS)
def test_it_is_the_weighted_sum_of_the_token_losses(name: str) -> None:
    settings, fields = SETTINGS[name], batch()
    trained = fields["trained"]
    owner = trained.nonzero()[:, 0]
    losses = token_losses(
        settings,
        logprobs=fields["logprobs"][trained],
        rollout=fields["rollout"][trained],
        old=fields["rollout" if name == "plain" else "before"][trained],
        advantage=fields["advantages"][trained],
        owner=owner,
        reference=fields["reference"][trained],
        entropy=fields["entropy"][trained],
    )
    loss, _, measured = share(settings, fields)
    weight = fields["token_weight"][owner]
    assert loss == pytest.approx(float((weight * losses.total).sum()), rel=1e-5)
    assert measured["pg_loss"] == ("sum", pytest.approx(float((weight * losses.policy).sum()), rel=1e-5))
    assert measured["ratio/mean"] == ("sum", pytest.approx(float(losses.ratio.mean()), rel=1e-5))
    assert measured["ratio/max"] == ("max", pytest.approx(float(losses.ratio.max())))
    assert ("kl/ref" in measured, "rollout_is/weight" in measured) == (losses.kl is not None,) * 2
    assert measured["logit_grad/policy"][0] == "sum"
    assert measured["logit_grad/policy"][1] > 0
    assert ("logit_grad/kl" in measured, "logit_grad/entropy" in measured) == (
        losses.kl is not None, settings.entropy_coeff != 0
    )  # fmt: skip


@table("name", SETTINGS)
def test_micro_batches_add_up_and_processes_are_averaged(name: str) -> None:
    settings, fields = SETTINGS[name], batch()
    whole, gradient, measured = share(settings, fields)
    tokens = float(fields["trained"].sum())
    cuts = [slice(0, 1), slice(1, 4), slice(4, 6), slice(6, 8)]  # two micro-batches of each of two processes
    shares = [share(settings, part(fields, rows), processes=2, tokens=tokens) for rows in cuts]
    assert sum(loss for loss, _, _ in shares) / 2 == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(torch.cat([g for _, g, _ in shares]) / 2, gradient)
    for metric, (how, value) in measured.items():
        values = [of[metric][1] for _, _, of in shares]
        assert (sum(values) / 2 if how == "sum" else max(values)) == pytest.approx(value, rel=1e-4), metric


def test_the_mismatch_is_measured_before_the_update_and_not_after() -> None:
    fields = batch()
    gap = (fields["logprobs"] - fields["rollout"]).abs()[fields["trained"]]
    _, _, before = share(SETTINGS["plain"], fields)
    assert before["kl/mismatch_mean"] == ("sum", pytest.approx(float(gap.mean()), rel=1e-5))
    assert before["kl/mismatch_max"] == ("max", pytest.approx(float(gap.max())))
    _, _, after = share(SETTINGS["plain"], {**fields, "moved": True})
    assert before.keys() - after.keys() == {"kl/mismatch_mean", "kl/mismatch_max"}
    assert after["ratio/max"] == before["ratio/max"]


def test_what_passes_in_bfloat16_give_is_summed_in_float32() -> None:
    rows = {field: of.bfloat16() if field == "logprobs" else of for field, of in batch(400).items()}
    _, _, measured = share(SETTINGS["corrected, with all terms"], {**rows, "before": rows["logprobs"].float()})
    assert measured["ratio/mean"][1] == pytest.approx(1, abs=1e-6)  # in bfloat16 1,000 ones are 256


@table(("name", "at"), list(itertools.product(SETTINGS, (0, 3, ROWS))))
def test_a_row_without_trained_tokens_changes_nothing(name: str, at: int) -> None:
    settings, fields = SETTINGS[name], batch()
    filled = {field: torch.cat([of[:at], torch.full_like(of[:1], 7), of[at:]]) for field, of in fields.items()}
    filled["trained"][at] = False
    loss, gradient, measured = share(settings, filled)
    expected, gradient_without, measured_without = share(settings, fields)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert measured == {n: (how, pytest.approx(v, rel=1e-6)) for n, (how, v) in measured_without.items()}
    torch.testing.assert_close(torch.cat([gradient[:at], gradient[at + 1 :]]), gradient_without)
    assert not gradient[at].any()


@table("name", SETTINGS)
def test_rows_that_only_fill_up_give_a_zero_that_can_be_differentiated(name: str) -> None:
    """As a process has them when there are fewer samples than processes, and it must take part in the step."""
    fields = batch(2)
    fields["trained"][:] = False
    loss, gradient, measured = share(SETTINGS[name], fields, processes=2, tokens=9.0)
    assert loss == 0
    assert not gradient.any()
    assert {value for _, value in measured.values()} == {0.0}
