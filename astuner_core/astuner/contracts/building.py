"""How what an experiment names is made: ``Class.from_config(section, context)``.

Readers, workflows, judges, services, log sinks and backbones are made that way.  An environment is not: it may be
forked in an interpreter that has nothing of ASTuner's, so it is made of its parameters alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from astuner.config import Config
    from astuner.contracts.parts import HelperModelsPart
    from astuner.plugins.loader import PluginManager


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """What surrounds a thing that is made."""

    config: Config
    """The whole experiment."""
    name: str = ""
    """How messages call what is made: ``the judge 'math_answer'``."""
    dry_run: bool = False
    """Nothing is run, so nobody is asked and nothing is fetched for it."""
    purpose: str = ""
    """What its questions to helper models are counted as, where that is not the run itself: ``tasks``."""
    folder: Path | None = None
    """Where the run writes, if that is not ``config.run_dir``."""
    helpers: HelperModelsPart | None = field(default=None, repr=False)
    """The helper models of whoever has it made; None: the experiment's."""

    @property
    def base_dir(self) -> Path:
        """The experiment file's folder; relative paths in a section begin here."""
        return self.config.base_dir

    @property
    def run_dir(self) -> Path:
        """The run's folder, which may not be there yet."""
        return self.folder or self.config.run_dir

    @property
    def seed(self) -> int:
        """``astuner.seed``."""
        return self.config.astuner.seed

    @property
    def plugins(self) -> PluginManager:
        """Those that are on."""
        return self.config.plugins

    @property
    def helper_models(self) -> Any:
        """The models of ``astuner.helper_models``: a `HelperModelsPart`, of the class that the package brings.

        :raises astuner.contracts.errors.MissingDependency: no package that is on brings them.
        """
        if self.helpers is not None:
            return self.helpers
        part: type[HelperModelsPart] = self.config.part(
            "helper_models", wanted_by=f"{self.name} takes helper_models and"
        )
        return part.of(self.config, part=self.purpose)


class Built:
    """Something that an experiment names, and that is made for it."""

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> Any:
        """Make one; keep what is needed of both, and open or connect to nothing yet.

        Overridden by a class whose constructor wants more than its section: ``return cls(section, context.base_dir)``.

        :param section: the checked section, an instance of the provider's ``config`` model; None when it has none.
        :returns: an instance of this class, or of another one of its kind that the section asks for.
        """
        return cls() if section is None else cls(section)  # type: ignore[call-arg]
