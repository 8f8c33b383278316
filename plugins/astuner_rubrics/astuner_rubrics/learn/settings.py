"""How rubrics are learned: every number that decides something, in one place."""

from __future__ import annotations

from dataclasses import dataclass


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
