"""Numbers of one update, added up on the device and read once.

Invariant: a mean over tokens is over all tokens that were trained in the update, a token counting once per pass.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Meters:
    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor | float, int]] = {}
        self._maxima: dict[str, Tensor] = {}
        self._counts: dict[str, float | Tensor] = {}

    def mean(self, name: str, values: Tensor) -> None:
        """Add values of any shape to a mean over all of them."""
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (values.detach().sum(dtype=torch.float64) + total, count + values.numel())

    def maximum(self, name: str, values: Tensor) -> None:
        largest = values.detach().max()
        self._maxima[name] = torch.maximum(largest, self._maxima[name]) if name in self._maxima else largest

    def average(self, name: str, value: float) -> None:
        """Add one number to an average of such numbers."""
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + value, count + 1)

    def count(self, name: str, number: float | Tensor) -> None:
        """Add to a sum."""
        self._counts[name] = self._counts.get(name, 0.0) + (number.detach() if isinstance(number, Tensor) else number)

    def read(self) -> dict[str, float]:
        means = {name: float(total) / count for name, (total, count) in self._sums.items() if count}
        others: dict[str, float | Tensor] = {**self._maxima, **self._counts}
        return means | {name: float(value) for name, value in others.items()}
