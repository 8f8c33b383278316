"""Replay a recorded episode: judge it again, or rerun its workflow from a turn (`astuner replay`).

::

    verdicts    judges recorded episodes as the runner would, and measures how two judges agree
    recording   matches requests to recorded replies, detects divergence, and provides a fork's models, which answer
                from the recording first
    fork        reruns the workflow, optionally stopping at each model call, and writes a folder that opens as a run

Invariant: a replay never changes the run, and a recorded reply answers only a request with exactly the recorded tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from astuner import Config, PluginManager, RunDir, load_config
from astuner.contracts.errors import DataError
from astuner_record.episode_log import EpisodeLog, LoggedEpisode
from astuner_record.foreign import read_resolved

_WIDEST = 60
"""Maximum characters of a query or an error in one line."""


class RecordedRun:
    """A run folder with an episode log, open for reading."""

    def __init__(self, path: Path) -> None:
        """Open the log.

        :raises DataError: The path is not a run folder, or the run has no log.
        """
        self.dir = RunDir(path.expanduser())
        if not self.dir.resolved.is_file():
            raise DataError(
                f"{path} is not a run folder: it has no {self.dir.resolved.name}. Pass the folder that `astuner run` "
                "prints at the end, e.g. launcher_record/math_agent."
            )
        self.log = EpisodeLog(self.dir.path)

    def __enter__(self) -> RecordedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.close()

    def episode(self, episode_id: str) -> LoggedEpisode:
        """Return an episode.

        :raises DataError: The episode does not exist; the message suggests similar IDs and how to list all.
        """
        if self.log.count([f"episode={episode_id}"]):
            return self.log.read(episode_id)
        if any(one.episode_id == episode_id for one in self.log.lost):
            raise DataError(f"Episode {episode_id} is damaged and cannot be replayed: {'; '.join(self.log.problems)}")
        known = [listed.episode_id for listed in self.log.list()]
        close = get_close_matches(episode_id, known, n=3)
        raise DataError(
            f"{self.dir.path} has no episode {episode_id!r} ({len(known):,} episodes). "
            + (f"Did you mean {' or '.join(close)}? " if close else "")
            + f"To list them, run: astuner replay {self.dir.path} --list"
        )

    @property
    def backbone(self) -> str:
        """Backbone of the run."""
        data = read_resolved(self.dir.resolved) or {}
        return str((data.get("astuner") or {}).get("backbone", ""))

    def config(self, overrides: Sequence[str] = (), *, backbone: str, plugins: PluginManager | None = None) -> Config:
        """Return the run's settings with overrides, on another backbone, with the run folder at its current location.

        :raises astuner.contracts.errors.ConfigError: An override is invalid.
        """
        place = [
            f"astuner.experiment_dir={json.dumps(str(self.dir.path.parent), ensure_ascii=False)}",
            f"astuner.experiment_name={json.dumps(self.dir.path.name, ensure_ascii=False)}",
        ]
        return load_config(self.dir.resolved, [*place, *overrides], backbone=backbone, plugins=plugins)


def short(text: str) -> str:
    """Return the beginning of ``text`` in one line."""
    line = " ".join(text.split())
    return line if len(line) <= _WIDEST else line[: _WIDEST - 1] + "…"
