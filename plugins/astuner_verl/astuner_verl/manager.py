"""What verl calls its agent loop manager: it is told to begin groups, and never waited for.

verl submits prompts and samples finished groups.  Its prompts are tickets (`dataset`), so submitting n of them means:
begin n more groups.  In the synchronous mode there is nothing to begin ahead: the groups of a step run while verl
samples them (`sampler`).
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict

from astuner_verl import session


class EpisodeManager:
    """Hands tickets to the session."""

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Begin a group for each ticket, of the training tasks unless ``prompts`` says ``validate``."""
        uids = [str(_plain(uid)) for uid in prompts["uid"]]
        session.current().submitted(uids, validate="validate" in prompts and bool(_plain(prompts["validate"])))


def _plain(value: Any) -> Any:
    """What tensordict has wrapped, if it has."""
    return getattr(value, "data", value)
