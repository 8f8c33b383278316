"""Helper models: models that help an experiment and are not trained, such as a judge or a writer of tasks.

One section of the config each, shared by all that name it.  Answers are kept on this machine; limits and budgets hold
over all processes of it; every request is on record, with its tokens and what it cost.

The names stand in ``__init__.pyi`` and are imported when first touched, so that listing this plugin imports nothing.
"""

from __future__ import annotations

from astuner import public_names

_HOME, __getattr__ = public_names(__name__, __file__)

__all__ = sorted(_HOME)
