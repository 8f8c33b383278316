"""Command lines that start and resume a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from astuner.contracts.shell import shell_text

_FOLDER, _NAME = "astuner.experiment_dir=", "astuner.experiment_name="


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """An ``astuner run`` command with all its arguments."""

    file: str
    overrides: tuple[str, ...] = ()
    backbone: str | None = None
    services: tuple[str, ...] = ()
    disabled_plugins: tuple[str, ...] = ()

    def __str__(self) -> str:
        return shell_text(self.words())

    def words(self, *flags: str) -> list[str]:
        """Return the command as a list of words.

        :param flags: further options, such as ``--resume``.
        """
        return [
            "astuner",
            *(word for name in self.disabled_plugins for word in ("-p", f"no:{name}")),
            "run",
            self.file,
            *_with_run_dir(self.overrides),
            *(["--backbone", self.backbone] if self.backbone else []),
            *(word for name in self.services for word in ("--with", name)),
            *flags,
        ]

    def resuming(self) -> str:
        """Return the command that continues the run, for a shell."""
        return shell_text(self.words("--resume"))

    def probing(self) -> str:
        """Return the command that measures the time of a run, for a shell."""
        return shell_text(self.words("--probe"))

    def starting_over(self) -> str:
        """Return the command that starts the run over, for a shell."""
        return shell_text(self.words("--no-resume"))

    def at(self, run_dir: Path) -> RunCommand:
        """Return the command for another run folder."""
        kept = [text for text in self.overrides if not text.startswith((_FOLDER, _NAME))]
        folder = [f"{key}{yaml_text(value)}" for key, value in ((_FOLDER, run_dir.parent), (_NAME, run_dir.name))]
        return replace(self, overrides=(*kept, *folder))

    def overriding(self, *overrides: str) -> RunCommand:
        """Return the command with further overrides, of which later ones win."""
        backbone = self.backbone
        for text in overrides:
            key, _, value = text.partition("=")
            backbone = str(value) if key == "astuner.backbone" and backbone else backbone
        return replace(self, overrides=(*self.overrides, *overrides), backbone=backbone)


def yaml_text(value: object) -> str:
    """Return a value in the YAML notation of an override, on one line."""
    plain = str(value) if isinstance(value, Path) else value
    return yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10**6).removesuffix("...\n").strip()


def _with_run_dir(overrides: Sequence[str]) -> list[str]:
    """Return the overrides, with ``--run-dir`` instead of the two keys that it sets."""
    folders = [text for text in overrides if text.startswith((_FOLDER, _NAME))]
    if [text.partition("=")[0] + "=" for text in folders] != [_FOLDER, _NAME]:
        return list(overrides)
    parent, name = (yaml.safe_load(text.partition("=")[2]) for text in folders)
    if not (isinstance(parent, str) and isinstance(name, str) and Path(parent).is_absolute()):
        return list(overrides)
    return [*(text for text in overrides if text not in folders), "--run-dir", str(Path(parent) / name)]
