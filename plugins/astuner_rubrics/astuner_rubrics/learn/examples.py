"""How rubrics are learned, and whether examples can teach anything, which is asked before a model is.

Some examples are held out.  Invariant: no question stands on both sides of the split, unless there are too few
questions to part them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from astuner.contracts.errors import AstunerError
from astuner_rubrics.agreement import Rule, chance, fewest
from astuner_rubrics.labels import Labels, Mode, Sample, digest, plain


@dataclass(frozen=True)
class Settings:
    """How rubrics are learned."""

    proposals: int = 3
    """Criteria that the helper proposes for one example at most."""
    max_epochs: int = 3
    """How often criteria that do not give an example its label are revised."""
    batch: int = 10
    """Examples that criteria are proposed for before it is asked whether they still bring anything new."""
    patience: int = 2
    """Batches that may bring nothing new before proposing ends; picks that may gain nothing before selecting does."""
    min_increment: float = 0.02
    """A batch brings something new if it adds this share to the coding rate of the best criteria so far."""
    max_rubrics: int = 10
    """Criteria in the file at most."""
    min_gain: float = 0.001
    """A criterion stays if it adds this to the mean credit over the training examples."""
    themes: int = 0
    """Merge the criteria into at most so many themes with tips; 0 leaves them as they are."""
    held_out: float = 0.3
    """Share of the examples that learning never sees."""
    votes: int = 1
    """Times that the helper is asked for one verdict."""
    scale: tuple[float, float] | None = None
    """Worst and best grade; None: the range of the labels, or 0 to 10 where answers are compared."""
    seed: int = 0
    """Of the split."""
    force: bool = False
    """Write the file although something speaks against it; what does is in the file."""


FEWEST_TO_LEARN = 5
_SHOWN = 10
_FEWEST_QUESTIONS = 4
COMPARED = (0.0, 10.0)
"""The scale of grades where labels have none."""


class NotLearned(AstunerError):
    """No rubrics came out; says why, and what would help. Nothing was written but the journal."""


@dataclass(frozen=True)
class Split:
    """Examples to learn from, and examples to measure with."""

    train: tuple[Sample, ...]
    held_out: tuple[Sample, ...]


def rule_of(labels: Labels, settings: Settings) -> Rule:
    """The scale of the grades, and when they agree with these labels.

    :raises NotLearned: all labels are the same.
    """
    check_labels_differ(labels)
    scale = settings.scale or (labels.scale if labels.mode is Mode.POINTWISE else COMPARED)
    return Rule.of(labels.mode, labels.samples, scale)


def check_labels_differ(labels: Labels) -> None:
    """:raises NotLearned: no label says that one answer is better than another."""
    samples = labels.samples
    if labels.mode is Mode.POINTWISE:
        low, high = labels.scale
        if low == high:
            raise NotLearned(
                f"{labels.name}: all {len(samples)} labels are the same ({low:g}), so any rubrics would do; add "
                "examples of answers that are worse or better"
            )
    elif all(len(set(sample.worth)) == 1 for sample in samples):
        raise NotLearned(
            f"{labels.name}: all {len(samples)} labels are ties, so any rubrics would do; add examples where one "
            "answer is better"
        )


def objections(labels: Labels, rule: Rule, settings: Settings) -> list[str]:
    """What speaks against learning from these examples at all, in words."""
    samples = labels.samples
    found = []
    at_least = fewest(chance(rule, samples))
    needed = max(math.ceil(at_least / settings.held_out), at_least + FEWEST_TO_LEARN)
    if len(samples) < needed:
        found.append(
            f"{labels.name}: {len(samples)} examples are too few, {needed - len(samples)} more are needed: {at_least} "
            f"must be held out so that even perfect agreement could be told from chance ({chance(rule, samples):.0%}), "
            f"and --held-out is {settings.held_out:g}"
        )
    opposite = contradictions(samples, rule)
    if opposite:
        pairs = ", ".join(f"{a} and {b}" for a, b in opposite[:_SHOWN])
        more = f" and {len(opposite) - _SHOWN} more" if len(opposite) > _SHOWN else ""
        found.append(
            f"{labels.name}: labels contradict each other: {pairs}{more} judge the same question and answers the "
            "opposite way; keep one of each"
        )
    return found


def contradictions(samples: Sequence[Sample], rule: Rule) -> list[tuple[str, str]]:
    """Places of examples with the same question and answers, and labels that say the opposite.

    Scores do when they are half the scale or more apart; a tie and a preference do not.
    """
    same: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        same[sample.key].append(sample)
    return [
        (a.place, b.place)
        for group in same.values()
        for a, b in itertools.combinations(group, 2)
        if _opposite(a.by_answer(), b.by_answer(), rule)
    ]


def _opposite(a: dict[str, float], b: dict[str, float], rule: Rule) -> bool:
    if rule.mode is Mode.POINTWISE:
        return any(abs(a[text] - b[text]) >= (rule.high - rule.low) / 2 for text in a)
    pairs = itertools.combinations(a, 2)
    return any((a[one] - a[other]) * (b[one] - b[other]) < 0 for one, other in pairs)


def split(samples: Sequence[Sample], share: float, seed: int) -> Split:
    """Hold out about ``share`` of the examples, whole questions at a time; the same ones for the same seed.

    :raises NotLearned: there are fewer than three examples, so one side would be empty.
    """
    if len(samples) < 3:
        raise NotLearned(f"{len(samples)} examples cannot be split into some to learn from and some to measure with")
    groups = _groups(samples, lambda s: plain(s.question).casefold())
    if len(groups) < _FEWEST_QUESTIONS:
        groups = _groups(samples, lambda s: s.key)
    wanted = max(1, round(share * len(samples)))
    order = sorted(groups, key=lambda name: digest([seed, name]))
    held: set[str] = set()
    for name in order:
        have = sum(len(groups[n]) for n in held)
        if have < wanted and have + len(groups[name]) <= max(1, min(1.5 * wanted, len(samples) - 1)):
            held.add(name)
    if not held:
        held.add(min(order, key=lambda name: len(groups[name])))
    inside = {s.place for name in held for s in groups[name]}
    train = tuple(s for s in samples if s.place not in inside)
    if not train:
        raise NotLearned("all examples have the same question and answers, so none can be held out")
    return Split(train, tuple(s for s in samples if s.place in inside))


def _groups(samples: Sequence[Sample], name: Callable[[Sample], str]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        found[name(sample)].append(sample)
    return found
