"""What an environment needs on a machine beyond its Python packages: data, unpacking, a licence to accept.

``astuner env setup NAME`` makes the interpreter and installs the packages that the `EnvironmentProvider` names, then
asks the provider's `EnvironmentSetup` for the rest, and keeps the result as `EnvironmentSettings`, which the service
reads.  ``astuner env doctor NAME`` prints its findings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """How one environment runs on this machine."""

    python: str = ""
    """The interpreter's path; empty: the one that the service runs on."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables that its processes get; they get no others but PATH, LANG and a HOME of their own."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of ``astuner env doctor``."""

    what: str
    """What was looked at, and how it is."""
    ok: bool = True
    hint: str = ""
    """What to type when it is not."""


class EnvironmentSetup(ABC):
    """Brings one environment to a machine, and says what is missing."""

    options: ClassVar[Mapping[str, str]] = {}
    """``astuner env setup NAME option=value``: option -> the sentence that its help prints."""

    def check(self, options: Mapping[str, str]) -> None:
        """Refuse values that cannot be used, before anything is installed.

        :param options: a subset of `options`.
        :raises astuner.contracts.errors.RunError: one cannot; says what to write.
        """
        return None

    @abstractmethod
    def setup(
        self, settings: EnvironmentSettings, folder: Path, options: Mapping[str, str], say: Callable[[str], None]
    ) -> EnvironmentSettings:
        """Do what is missing; doing it again is harmless.

        :param settings: with the interpreter, which has the packages.
        :param folder: where this environment may keep what belongs to it.
        :param options: a subset of `options`.
        :param say: prints a line of progress.
        :returns: the settings to keep.
        :raises astuner.contracts.errors.RunError: it cannot be done; says what to do.
        """

    @abstractmethod
    def doctor(self, settings: EnvironmentSettings) -> Sequence[Finding]:
        """What was found, good and bad, in the order a person would look."""
