"""Send log-probabilities from before the first optimizer step of an update to the run.

VERL's engine, which Trinity also uses, passes micro-batches to ASTuner's loss and keeps nothing of them.  The loss
therefore passes what it sees to a `BeforeUpdate` in its process, which sends it to the run: once for each optimizer
step for which the values are known, and before the trainer reports the update as done.  The backbone chooses the
transport: a `Mailbox` if the engine cannot return tensors from an update.

Invariant: no extra computation is needed, and the values sent belong to the weights at the start of the update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from astuner import TrainerCommon
from astuner_objectives.step import is_corrected

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

ROW = "astuner_row"
"""Field of a row that identifies its training step and index: `row_id`."""

Found = dict[int, "np.ndarray"]
"""Row index -> log-probabilities of its trained tokens, float32 [trained]."""
_BITS = 32


def row_id(step: int, row: int) -> int:
    """Return the value of `ROW`, an int64. A padding row has the same step and an arbitrary index."""
    return step << _BITS | row


_training_step = 1


def training_step() -> int:
    """Return the training step (from 1) that the rows of this process's last micro-batch belong to."""
    return _training_step


class BeforeUpdate:
    """Collect log-probabilities from the micro-batches of one trainer process."""

    def __init__(self, send: Callable[[int, Found], None] | None) -> None:
        """:param send: Sends (step, found) to the run and returns on arrival; None if the run does not need them."""
        self._send = send
        self._step = -1
        self._seen = 0
        """Rows of the update so far, including padding rows."""
        self._found: Found = {}
        """Values of the current optimizer step."""
        self._sent: set[int] = set()

    def see(
        self,
        settings: TrainerCommon,
        *,
        rows: Tensor,
        logprobs: Tensor,
        before: Tensor,
        trained: Tensor,
        rows_of_step: int,
    ) -> bool:
        """Record a micro-batch of R rows; return whether the weights are unchanged since the start of the update.

        :param rows: int64 [R], `ROW` of each row.
        :param logprobs: [R, response] under the current weights.
        :param before: [R, response] under the weights before the update; only valid with a `rollout_is` correction.
        :param trained: [R, response]; 0 everywhere in a padding row.
        :param rows_of_step: Rows that this process sees in one optimizer step.
        """
        import numpy as np

        global _training_step
        ids: list[int] = rows.tolist()
        _training_step = step = ids[0] >> _BITS
        if step != self._step:
            self._step, self._seen, self._found, self._sent = step, 0, {}, set()
        known, first = is_corrected(settings.algorithm), self._seen < rows_of_step
        numbers = [row & (1 << _BITS) - 1 for row in ids]
        if self._send and (known or first) and not self._sent.issuperset(numbers):
            mask = trained.bool()
            values = (before if known else logprobs).detach()[mask].float().cpu().numpy()
            parts = np.split(values, np.cumsum(mask.sum(dim=1).cpu().numpy())[:-1])
            self._found |= {n: part for n, part in zip(numbers, parts, strict=True) if len(part)}
        self._seen += len(ids)
        if self._send and self._found and self._seen % rows_of_step == 0:
            self._send(step, self._found)
            self._sent |= self._found.keys()
            self._found = {}
        return first


class Mailbox:
    """Actor between workers and the run."""

    def __init__(self) -> None:
        self._found: dict[int, Found] = {}

    def put(self, step: int, found: Found) -> None:
        self._found.setdefault(step, {}).update(found)

    def take(self, step: int) -> Found:
        """Remove and return the values of ``step``: row index -> log-probabilities."""
        return self._found.pop(step, {})
