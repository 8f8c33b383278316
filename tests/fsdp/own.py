"""A loss and estimators as a researcher writes them beside an experiment; every trainer makes the same of them."""

import statistics

from astuner.contracts.objective import Compared, LossInput, TokenLoss, step_wide


def soft_clip(given: LossInput) -> TokenLoss:
    """SAPO's idea (Gao et al. 2025): a soft gate instead of a clip, narrower for what was bad, and of the sequence's
    ratio, so that it needs whole samples."""
    ratio = given.sample_mean(given.log_ratio).exp()
    heat = 20.0 * (given.advantages < 0) + 10.0 * (given.advantages >= 0)
    gate = 4 / heat * (heat * (ratio - 1)).sigmoid()
    return TokenLoss(loss=-gate * given.advantages, ratio=ratio.detach(), metrics={"gate": gate})


def above_the_median(compared: Compared) -> list[float]:
    middle = statistics.median(compared.rewards)
    return [reward - middle for reward in compared.rewards]


@step_wide
def ranks(compared: Compared) -> list[float]:
    """From -1, the worst of the step, to 1."""
    order = sorted(compared.rewards)
    return [2 * order.index(reward) / max(len(order) - 1, 1) - 1 for reward in compared.rewards]
