"""What asking a helper model raises; each message names the helper, and the key that may help."""

from __future__ import annotations

from astuner.contracts.errors import AstunerError, ConfigError


class HelperFailed(AstunerError):
    """There is no (valid) answer after all tries; says the last reason. It never has the key in it.

    :param about_question: the server is there and did not answer *this*: it refused, or said what cannot be read.
        Another question may fare better; where it is False, the next one is likely to fail as well.
    """

    def __init__(self, message: str, *, about_question: bool = False) -> None:
        super().__init__(message)
        self.about_question = about_question


class BudgetSpent(ConfigError):
    """The budget is reached; ends the run or command, in which everything done so far is saved."""
