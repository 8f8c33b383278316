"""What a trainer of padded rows computed before its first optimizer step of an update, on its way to the run.

VERL's engine, which Trinity trains with too, hands our loss one micro-batch after another and keeps nothing of them; so
the loss tells a `BeforeUpdate` of its own process what it sees, and that sends it to the run: once for each optimizer
step of which it is known, and before the trainer says that the update is done.  How it is sent is the backbone's: by
`Mailbox`, where the engine has no way for tensors out of an update.

Invariant: nothing is computed for this, and what is sent is of the weights that the update began with.
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
"""The field of a row that says which one of which step it is: `row_id`."""

Found = dict[int, "np.ndarray"]
"""Row -> log-probabilities of its trained tokens, float32 [trained]."""
_BITS = 32


def row_id(step: int, row: int) -> int:
    """What `ROW` holds, an int64. A row that fills a batch up has its step too, and any number."""
    return step << _BITS | row


_training_step = 1


def training_step() -> int:
    """Return the training step (from 1) that the rows of this process's last micro-batch belong to."""
    return _training_step


class BeforeUpdate:
    """Watches the micro-batches of one trainer process."""

    def __init__(self, send: Callable[[int, Found], None] | None) -> None:
        """:param send: sends (step, found) to the run, and returns when it has arrived; None: nobody wants it."""
        self._send = send
        self._step = -1
        self._seen = 0
        """Rows of the update so far, those that fill it up among them."""
        self._found: Found = {}
        """What the optimizer step under way has found."""
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
        """A micro-batch of R rows; whether the weights are still those that the update began with.

        :param rows: int64 [R], `ROW` of each.
        :param logprobs: [R, response] under the weights as they are now.
        :param before: [R, response] under those before the update, which are known with a `rollout_is` correction only.
        :param trained: [R, response]; 0 everywhere in a row that fills the batch up.
        :param rows_of_step: how many this process sees for one optimizer step.
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
    """An actor between workers and the run."""

    def __init__(self) -> None:
        self._found: dict[int, Found] = {}

    def put(self, step: int, found: Found) -> None:
        self._found.setdefault(step, {}).update(found)

    def take(self, step: int) -> Found:
        """What workers have found in ``step``: row -> log-probabilities."""
        return self._found.pop(step, {})
