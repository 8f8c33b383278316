"""Helper models: models that support an experiment and are not trained, such as a judge or a task generator.

Each helper model has one config section and is shared by everything that names it. Answers are cached on this machine.
Limits and budgets apply across all processes of this machine, and every request is recorded with its tokens and cost.

The public names are declared in ``__init__.pyi`` and imported on first access, so listing this plugin imports nothing.
"""

from __future__ import annotations

from astuner import public_names

_HOME, __getattr__ = public_names(__name__, __file__)

__all__ = sorted(_HOME)
