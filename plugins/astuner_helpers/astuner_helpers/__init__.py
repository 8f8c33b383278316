"""Helper models: models that help an experiment and are not trained, such as a judge or a writer of tasks.

One section of the config each, shared by all that name it.  Answers are kept on this machine; limits and budgets hold
over all processes of it; every request is on record, with its tokens and what it cost.
"""

from __future__ import annotations

from astuner_helpers.answer import HelperAnswer, Usage
from astuner_helpers.errors import BudgetSpent, HelperFailed
from astuner_helpers.helper import Helper
from astuner_helpers.meter import HelperMeter
from astuner_helpers.models import HelperModels

__all__ = ["BudgetSpent", "Helper", "HelperAnswer", "HelperFailed", "HelperMeter", "HelperModels", "Usage"]
