"""What a trainer of padded rows saw before its first optimizer step: sent once, of the old weights, row by row."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from astuner.config.schema import TrainerCommon  # noqa: E402
from astuner_ray.training.before_update import BeforeUpdate, Found, row_id  # noqa: E402

PLAIN = TrainerCommon()
CORRECTED = TrainerCommon.model_validate({"algorithm": {"rollout_is": "token-truncate"}})


class Watched:
    """A trainer process, and what it has sent: (step, row -> numbers)."""

    def __init__(self, settings: TrainerCommon = PLAIN) -> None:
        self.sent: list[tuple[int, dict[int, list[float]]]] = []
        self._settings = settings
        self._watcher = BeforeUpdate(self._send)

    def _send(self, step: int, found: Found) -> None:
        self.sent.append((step, {row: values.tolist() for row, values in found.items()}))

    def sees(self, step: int, rows: list[int], now: float, *, of: int, empty: tuple[int, ...] = ()) -> None:
        """A micro-batch in which row r's tokens 1 … r+1 are trained, with values that tell row and time."""
        trained = torch.tensor([[int(0 < t <= r + 1 and r not in empty) for t in range(5)] for r in rows])
        self._watcher.see(
            self._settings,
            rows=torch.tensor([row_id(step, r) for r in rows]),
            logprobs=torch.tensor([[now - r] * 5 for r in rows], requires_grad=True),
            before=torch.tensor([[-100.0 - r] * 5 for r in rows]),
            trained=trained,
            rows_of_step=of,
        )


def test_micro_batches_of_the_first_optimizer_step_are_sent_together_and_later_ones_not_at_all() -> None:
    one = Watched()
    one.sees(1, [2], -1.0, of=3)
    assert one.sent == [], "the step is not over"
    one.sees(1, [0, 1], -1.0, of=3)
    expected: dict[int, Any] = {2: [-3.0] * 3, 0: [-1.0], 1: [-2.0] * 2}
    assert one.sent == [(1, expected)]
    for rows in ([3, 1, 0], [2, 0, 1], [3, 1, 0]):  # the second optimizer step, and another pass over the batch
        one.sees(1, rows, -5.0, of=3)
    assert one.sent == [(1, expected)]
    one.sees(2, [1], -7.0, of=1)
    assert one.sent[1:] == [(2, {1: [-8.0] * 2})]


def test_rows_that_fill_a_batch_up_are_counted_and_not_sent() -> None:
    one = Watched()
    one.sees(3, [0, 1], -1.0, of=4, empty=(0,))
    one.sees(3, [0, 0], -1.0, of=4, empty=(0,))
    assert one.sent == [(3, {1: [-2.0] * 2})]
    one.sees(4, [0], -1.0, of=1, empty=(0,))
    assert len(one.sent) == 1, "nothing to say of it"


def test_with_a_correction_they_are_known_of_every_row() -> None:
    one = Watched(CORRECTED)
    for _ in range(2):  # two passes of two optimizer steps
        one.sees(1, [0, 1], -1.0, of=2)
        one.sees(1, [2, 3], -2.0, of=2)
    assert one.sent == [
        (1, {0: [-100.0], 1: [-101.0] * 2}),
        (1, {2: [-102.0] * 3, 3: [-103.0] * 4}),
    ]
