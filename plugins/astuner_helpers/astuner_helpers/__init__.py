"""Helper models: models that help an experiment and are not trained, such as a judge or a writer of tasks.

One section of the config each, shared by all that name it.  Answers are kept on this machine; limits and budgets hold
over all processes of it; every request is on record, with its tokens and what it cost.

The names below are imported when first touched, so that listing this plugin imports nothing of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from astuner_helpers.helper import Helper as Helper
    from astuner_helpers.models import HelperMeter as HelperMeter
    from astuner_helpers.models import HelperModels as HelperModels
    from astuner_helpers.reply import BudgetSpent as BudgetSpent
    from astuner_helpers.reply import HelperAnswer as HelperAnswer
    from astuner_helpers.reply import HelperFailed as HelperFailed
    from astuner_helpers.reply import Usage as Usage

_HOME = {
    "BudgetSpent": "reply",
    "Helper": "helper",
    "HelperAnswer": "reply",
    "HelperFailed": "reply",
    "HelperMeter": "models",
    "HelperModels": "models",
    "Usage": "reply",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'astuner_helpers' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"astuner_helpers.{_HOME[name]}"), name)
    return value
