"""An experiment's settings for a command that makes data: it trains nothing, so the experiment needs no model yet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from astuner.config import Config

_MODEL = ("astuner", "model", "path")


def settings_of(path: Path, overrides: Sequence[str], disabled_plugins: Sequence[str]) -> Config:
    """As `astuner.load_config`, but ``astuner.model.path`` may be left out.

    :raises astuner.contracts.errors.ConfigError: everything else that is wrong.
    """
    from astuner import load_config
    from astuner.config.places import Report
    from astuner.config.reading import read_file

    written = read_file(path, Report(str(path))).has(_MODEL)
    stand_in = [] if written else [f"{'.'.join(_MODEL)}=none"]
    return load_config(path, [*stand_in, *overrides], disabled_plugins=disabled_plugins)
