"""Define how an environment is set up on a machine: data, unpacking, accepting a license.

``astuner env setup NAME`` creates the virtual environment and installs the packages of the `EnvironmentProvider`, then
calls the provider's `EnvironmentSetup` and saves the resulting `EnvironmentSettings` for the service.
``astuner env doctor NAME`` prints the findings of the setup class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """Interpreter and variables of one environment on this machine."""

    python: str = ""
    """Path of the interpreter. Empty: the interpreter of the service."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables for its processes, which otherwise get only PATH, LANG and a private HOME."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Line of ``astuner env doctor``."""

    what: str
    """Description of the check and its result."""
    ok: bool = True
    hint: str = ""
    """Command that fixes a failed check."""


class EnvironmentSetup(ABC):
    """Setup and diagnosis of one environment on a machine."""

    options: ClassVar[Mapping[str, str]] = {}
    """Options of ``astuner env setup NAME option=value``: name -> help text."""

    def check(self, options: Mapping[str, str]) -> None:
        """Reject invalid option values before anything is installed.

        :param options: A subset of `options`.
        :raises astuner.contracts.errors.RunError: A value is invalid; the message names valid values.
        """
        return None

    @abstractmethod
    def setup(
        self, settings: EnvironmentSettings, folder: Path, options: Mapping[str, str], say: Callable[[str], None]
    ) -> EnvironmentSettings:
        """Do all missing steps; repeating a setup is safe.

        :param settings: Settings with the interpreter, which has the packages installed.
        :param folder: Folder for the data of this environment.
        :param options: A subset of `options`.
        :param say: Prints a progress line.
        :returns: The settings to save.
        :raises astuner.contracts.errors.RunError: A step failed; the message describes what to do.
        """

    @abstractmethod
    def doctor(self, settings: EnvironmentSettings) -> Sequence[Finding]:
        """Return all checks, passed and failed, in the order in which to fix them."""
