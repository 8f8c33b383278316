"""Create the objects that an experiment names with ``Class.from_config(section, context)``.

This applies to task readers, workflows, judges, services, log sinks and backbones. An environment may be forked in an
interpreter without ASTuner, so it is created from its parameters only.
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
    """Context for creating an object."""

    config: Config
    """The complete experiment."""
    name: str = ""
    """Name of the object in messages, e.g. ``the judge 'math_answer'``."""
    dry_run: bool = False
    """Whether nothing will run. Then do not download anything or call helper models."""
    purpose: str = ""
    """Category for counting its calls of helper models, e.g. ``tasks``; empty for the run itself."""
    folder: Path | None = None
    """Folder the run writes to, if it is not ``config.run_dir``."""
    helpers: HelperModelsPart | None = field(default=None, repr=False)
    """Helper models to use instead of the experiment's."""

    @property
    def base_dir(self) -> Path:
        """Return the folder of the experiment file, the base of relative paths in a section."""
        return self.config.base_dir

    @property
    def run_dir(self) -> Path:
        """Return the run folder, which may not exist yet."""
        return self.folder or self.config.run_dir

    @property
    def seed(self) -> int:
        """Return ``astuner.seed``."""
        return self.config.astuner.seed

    @property
    def plugins(self) -> PluginManager:
        """Return the enabled plugins."""
        return self.config.plugins

    @property
    def helper_models(self) -> Any:
        """Return the models of ``astuner.helper_models`` as a `HelperModelsPart`.

        :raises astuner.contracts.errors.MissingDependency: No enabled package provides helper models.
        """
        if self.helpers is not None:
            return self.helpers
        part: type[HelperModelsPart] = self.config.part(
            "helper_models", wanted_by=f"{self.name} uses helper_models and"
        )
        return part.of(self.config, part=self.purpose)


class Built:
    """Base class of objects that an experiment names."""

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> Any:
        """Create an instance. Do not open files or connections yet.

        Override it if the constructor needs more than its section: ``return cls(section, context.base_dir)``.

        :param section: Checked section, an instance of the provider's ``config`` model; None without a model.
        :returns: An instance of this class, or of another class of its kind that the section selects.
        """
        return cls() if section is None else cls(section)  # type: ignore[call-arg]
