"""`check_loss` and `check_advantages`: do a loss and an advantage estimator keep to their contracts?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from astuner.contracts.objective import AdvantageEstimator, Compared, Loss, LossInput, is_step_wide
from astuner.rollout.objective import advantages, token_loss

REWARDS = ((1.0, 0.0, 0.5, 0.0), (1.0, 1.0, 1.0), (0.3,), (-1e3, 1e3))
"""Groups: with different rewards, with equal ones, of one attempt, and far apart."""


def check_loss(loss: Loss, *, clip_low: float = 0.2, clip_high: float = 0.28) -> None:
    """Check one loss, on samples of several lengths; needs torch.

    - it returns a finite number for each token, with a finite gradient, also where ratios are enormous;
    - on the weights that the tokens were drawn with, a good token becomes more probable and a bad one less;
    - a token's loss depends on its own sample alone, so that it does not matter how a batch is cut into micro-batches;
    - it changes none of the tensors that it is given.

    :param clip_low: `algorithm.clip_ratio_low`; ``clip_high`` likewise.
    """
    import torch

    name = getattr(loss, "__name__", type(loss).__name__)
    owner = torch.tensor([0, 0, 0, 1, 2, 2])
    old = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0, -0.7])
    good = torch.tensor([1.0, 1.0, 1.0, -1.0, 0.5, 0.5])

    def of(places: Sequence[int], moved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.tensor(places)
        logprobs = (old + moved)[at].clone().requires_grad_()
        given = LossInput(
            logprobs=logprobs,
            old_logprobs=old[at],
            rollout_logprobs=old[at],
            advantages=good[at],
            owner=owner[at] - owner[at].min(),
            clip_low=clip_low,
            clip_high=clip_high,
        )
        before = [t.detach().clone() for t in (logprobs, given.old_logprobs, given.advantages, given.owner)]
        found = token_loss(name, loss, given).loss
        after = (logprobs.detach(), given.old_logprobs, given.advantages, given.owner)
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert same, f"{name} changed a tensor that it was given; make a copy of what you change in place"
        assert found.requires_grad, f"the loss of {name} has no gradient; it must depend on given.logprobs"
        (gradient,) = torch.autograd.grad(found.sum(), logprobs)
        return found.detach(), gradient

    everything = range(len(owner))
    _, gradient = of(everything, torch.zeros(6))
    wrong = [i for i in everything if float(gradient[i] * good[i]) >= 0]
    assert not wrong, (
        f"{name}: with ratios of 1 and advantages {good.tolist()} the gradient to the log-probabilities is "
        f"{gradient.tolist()}; where the advantage is above 0 it must be below 0, for a loss is minimised"
    )
    for moved in (torch.zeros(6), torch.linspace(-1, 1, 6), torch.tensor([500.0, -500.0, 0.0, 500.0, -500.0, 0.1])):
        value, gradient = of(everything, moved)
        assert torch.isfinite(value).all(), (
            f"{name} gives {value.tolist()} where log ratios are {moved.tolist()}; take given.ratio, which stays finite"
        )
        assert torch.isfinite(gradient).all(), (
            f"{name} has the gradient {gradient.tolist()} where log ratios are {moved.tolist()}; take given.ratio, "
            "which stays finite"
        )
    moved = torch.linspace(-0.3, 0.3, 6)
    whole, parts = of(everything, moved)[0], [of(at, moved)[0] for at in ((0, 1, 2), (3,), (4, 5))]
    assert torch.allclose(whole, torch.cat(parts), atol=1e-6), (
        f"{name} gives {whole.tolist()} for three samples together and {torch.cat(parts).tolist()} for each alone; "
        "a token's loss may depend on its own sample only (given.sample_mean), for batches are cut as memory allows"
    )


def check_advantages(estimator: AdvantageEstimator) -> None:
    """Check one advantage estimator: a finite number for each reward, in their order, and the same when asked twice.

    The better of two attempts gets the greater advantage, whoever is named first.
    """
    name = getattr(estimator, "__name__", type(estimator).__name__)
    for norm in (True, False):
        for rewards in REWARDS:
            of = Compared(rewards=rewards, groups=("g",) * len(rewards), norm_by_std=norm)
            found = advantages(name, estimator, of)
            again = advantages(name, estimator, of)
            assert found == again, f"{name} answers differently when asked twice; keep no state"
            turned = Compared(rewards=rewards[::-1], groups=of.groups, norm_by_std=norm)
            again = advantages(name, estimator, turned)[::-1]
            same = all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(found, again, strict=True))
            assert same, f"{name} makes {found} of {rewards}, and {again} when they come in the other order"
            best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
            assert found[best] >= found[worst], f"{name} makes {found} of {rewards}: the best attempt gets less"
    if is_step_wide(estimator):
        two = Compared(rewards=(1.0, 0.0, 0.0, 0.0), groups=("g", "g", "h", "h"))
        advantages(name, estimator, two)
