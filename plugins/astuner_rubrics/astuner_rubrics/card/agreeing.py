"""Agreement with labels, ties, and what a verdict owes to an answer's length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from astuner_rubrics.agreement import wilson
from astuner_rubrics.card.asking import Verdict
from astuner_rubrics.card.measure import AGREEMENT, LENGTH, Measure
from astuner_rubrics.card.statistics import (
    bootstrap,
    concordance,
    kappa,
    kendall_tau_b,
    partial_spearman,
    ranks,
    spearman,
    tied_share,
)
from astuner_rubrics.labels import Mode, Sample


@dataclass(frozen=True)
class Judged:
    """A sample with the judge's verdict."""

    sample: Sample
    verdict: Verdict

    def signs(self) -> list[tuple[int, int]]:
        """(label, verdict) of every pair of its answers: 1, 0 or -1 for which of the two is better."""
        worth, rewards = self.sample.worth, self.verdict.rewards
        pairs = itertools.combinations(range(len(worth)), 2)
        return [(_sign(worth[i] - worth[j]), _sign(rewards[i] - rewards[j])) for i, j in pairs]


Statistic = Callable[[Sequence[float], Sequence[float]], float | None]


def agreement(mode: Mode, judged: Sequence[Judged], seed: int) -> list[Measure]:
    """The agreement that the verdict hangs on comes first, and is the same for all modes: how likely the better of two
    answers gets the better verdict, ties counting half; 0.5 is chance."""
    if mode is Mode.POINTWISE:
        return _of_scores(judged, seed)
    found = [_of_pairs(judged, seed, mode)]
    signs = [sign for one in judged for sign in one.signs()]
    if mode is Mode.PAIRWISE:
        right = [label == verdict for label, verdict in signs]
        share = sum(right) / len(right) if right else None
        found.append(_share("accuracy (a tie is right where the label is one)", "accuracy", share, len(right)))
        found.append(_bootstrapped("Cohen's kappa (first, second, tie)", "kappa", signs, kappa, seed))
    else:
        def tau(items: Sequence[Judged]) -> float | None:
            each = [kendall_tau_b(j.verdict.rewards, j.sample.worth) for j in items]
            known = [t for t in each if t is not None]
            return math.fsum(known) / len(known) if known else None

        found.append(_bootstrapped("Kendall's tau-b of each list, mean", "kendall_tau_b", judged, tau, seed))
        best = [_is_best_first(j) for j in judged]
        share = sum(best) / len(best) if best else None
        found.append(_share("the best answer is first", "best_first", share, len(best)))
    different = [verdict == 0 for label, verdict in signs if label]
    equal = [verdict == 0 for label, verdict in signs if not label]
    found.append(_share("ties where the labels differ", "ties", _mean(different), len(different)))
    if equal:
        found.append(_share("ties where the labels tie", "ties_right", _mean(equal), len(equal)))
    return found


def length_bias(mode: Mode, judged: Sequence[Judged], seed: int) -> Measure:
    """The rank correlation of verdict and length, given the label; within each sample where it has several answers."""
    rows = [_lengths(j, centred=mode is not Mode.POINTWISE) for j in judged]

    def correlation(items: Sequence[list[tuple[float, float, float]]]) -> float | None:
        flat = [row for rows in items for row in rows]
        if not flat:
            return None
        rewards, lengths, worth = (list(column) for column in zip(*flat, strict=True))
        return partial_spearman(rewards, lengths, worth)

    value = correlation(rows)
    interval = bootstrap(rows, correlation, seed=seed)
    return Measure(
        "length: correlation with the verdict, given the label", "length_correlation",
        value, interval, len(rows), LENGTH, "longer is better for the judge where positive",
    )  # fmt: skip


def _of_scores(judged: Sequence[Judged], seed: int) -> list[Measure]:
    pairs = [(j.verdict.rewards[0], j.sample.worth[0]) for j in judged]

    def of(statistic: Statistic) -> Callable[[Sequence[tuple[float, float]]], float | None]:
        return lambda items: statistic([a for a, _ in items], [b for _, b in items])

    labels = sorted({b for _, b in pairs})
    name = "the better of two answers gets the better verdict" + (" (AUC)" if len(labels) == 2 else "")
    found = [_bootstrapped(name, "concordance", pairs, of(concordance), seed, AGREEMENT)]
    if len(labels) == 2:
        yes = [(j.verdict.successes[0], j.sample.worth[0] == labels[1]) for j in judged]
        share = _mean([a == b for a, b in yes])
        found.append(_share("accuracy of success", "accuracy", share, len(yes)))
        found.append(_bootstrapped("Cohen's kappa of success", "kappa", yes, kappa, seed))
    else:
        found.append(_bootstrapped("Spearman's rank correlation", "spearman", pairs, of(spearman), seed))
        found.append(_bootstrapped("Kendall's tau-b", "kendall_tau_b", pairs, of(kendall_tau_b), seed))
    found.append(_bootstrapped("ties where the labels differ", "ties", pairs, of(tied_share), seed))
    return found


def _of_pairs(judged: Sequence[Judged], seed: int, mode: Mode) -> Measure:
    each = [c for j in judged if (c := concordance(j.verdict.rewards, j.sample.worth)) is not None]
    value = _mean(each)
    name = "the better of two answers gets the better verdict"
    if mode is Mode.PAIRWISE:
        return Measure(name, "concordance", value, _wilson(value, len(each)), len(each), AGREEMENT)
    return Measure(name, "concordance", value, bootstrap(each, _mean, seed=seed), len(each), AGREEMENT)


def _is_best_first(one: Judged) -> bool:
    """Whether the answers that the judge puts first are among those that the label puts first."""
    rewards, worth = one.verdict.rewards, one.sample.worth
    return all(w == max(worth) for r, w in zip(rewards, worth, strict=True) if r == max(rewards))


def _lengths(one: Judged, *, centred: bool) -> list[tuple[float, float, float]]:
    """(verdict, length, label) of each answer; centred: as ranks in the sample, less their mean.

    A preference says which answer is better and not by how much, so neither may the verdict.
    """
    columns = [list(one.verdict.rewards), [float(len(a)) for a in one.sample.answers], list(one.sample.worth)]
    if centred:
        columns = [[rank - (len(column) + 1) / 2 for rank in ranks(column)] for column in columns]
    return list(zip(*columns, strict=True))


def _bootstrapped(
    name: str, key: str, items: Sequence[object], statistic: Callable[..., float | None], seed: int,
    limits: object = None,
) -> Measure:  # fmt: skip
    value = statistic(items) if items else None
    interval = bootstrap(items, statistic, seed=seed)
    return Measure(name, key, value, interval, len(items), AGREEMENT if limits is AGREEMENT else None)


def _share(name: str, key: str, share: float | None, n: int) -> Measure:
    return Measure(name, key, share, _wilson(share, n), n)


def _wilson(share: float | None, n: int) -> tuple[float, float] | None:
    return None if share is None else wilson(share, n)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)
