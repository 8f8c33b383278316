"""What VERL is told about the optimizer, which is ours: `astuner_ray.training.optim.PolicyOptimizer`. Light.

VERL imports ``optimizer`` from ``optimizer_impl`` and makes it with ``lr``, ``weight_decay`` and what is in
``override_optimizer_config``.  Its own schedule must stay constant and without a warm-up: the optimizer has the
schedule.  Trinity's trainer passes all of it on to VERL.
"""

from __future__ import annotations

from typing import Any

from astuner import Optim

MODULE = "astuner_ray.training.optim"
"""VERL's ``optimizer_impl``."""
CLASS = "PolicyOptimizer"
"""VERL's ``optimizer``."""

PASSED = tuple(name for name in Optim.model_fields if name not in ("lr", "weight_decay", "grad_clip"))
"""The settings below ``trainer_common.optim`` that go to the optimizer itself: VERL passes the rate and the decay from
keys of its own, and clips by itself."""


def kwargs_for(optim: Optim, *, total_steps: int | None, vocab_size: int) -> dict[str, Any]:
    """VERL's ``override_optimizer_config``; plain values, as YAML has them.

    :param total_steps: optimizer steps of the whole run: its steps x `mini_batch_num` x `ppo_epochs`.
    :param vocab_size: rows of the model's embedding, which is ``vocab_size`` in its ``config.json``: a tokenizer often
        has fewer tokens.
    """
    return {**optim.model_dump(mode="json", include=set(PASSED)), "total_steps": total_steps, "vocab_size": vocab_size}
