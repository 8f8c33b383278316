"""Trinity's rollout engine without its explorer and trainer: a model that answers, for `eval`, `chat` and `debug`."""

from __future__ import annotations

import asyncio
from typing import Any

from trinity.common.models.allocator import Allocator

from astuner_trinity.engine import TrinityEngine, connect


def start_engine(told: Any, *, max_model_len: int) -> TrinityEngine:
    """One rollout engine with the weights that the configuration names; it ends with the connection to Ray.

    :raises RunError: its server does not answer.
    """
    told.explorer.rollout_model.engine_num, told.explorer.auxiliary_models = 1, []

    (model,), _ = asyncio.run(Allocator(told.explorer).create_all_models())
    return connect(model.api_address, model.api_key, model.model, max_model_len)
