"""What asking a helper model raises; each message names the helper, and the key that may help."""

from __future__ import annotations

from astuner.errors import AstunerError, ConfigError


class HelperFailed(AstunerError):
    """There is no (valid) answer after all tries; says the last reason. It never has the key in it."""


class BudgetSpent(ConfigError):
    """The budget is reached; ends the run or command, in which everything done so far is saved."""
