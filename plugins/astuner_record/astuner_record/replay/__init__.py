"""A recorded episode once more: judged again, or run again from some turn on; what `astuner replay` does.

::

    verdicts    asks a judge about recorded episodes, as the runner would, and how two judges agree
    recording   which recorded reply answers which request, where a run of the workflow leaves the record, and the
                models of a fork, which answer from it first
    fork        runs the workflow again, with stops around each model call, and writes a folder that opens as a run

Invariant: a run is never changed, and a recorded reply answers only a request with exactly the recorded tokens.
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
"""Characters of a query, or of an error, in a line."""


class RecordedRun:
    """A run folder with an episode log, open for reading."""

    def __init__(self, path: Path) -> None:
        """
        :raises DataError: it is no run folder, or has no log.
        """
        self.dir = RunDir(path.expanduser())
        if not self.dir.resolved.is_file():
            raise DataError(
                f"{path} is not a run folder: it has no {self.dir.resolved.name}; write the folder that `astuner run` "
                "names at its end, e.g. launcher_record/math_agent"
            )
        self.log = EpisodeLog(self.dir.path)

    def __enter__(self) -> RecordedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.close()

    def episode(self, episode_id: str) -> LoggedEpisode:
        """:raises DataError: there is none; says which are called alike, and how to list them."""
        if self.log.count([f"episode={episode_id}"]):
            return self.log.read(episode_id)
        if any(one.episode_id == episode_id for one in self.log.lost):
            raise DataError(f"{episode_id} is damaged and cannot be replayed: {'; '.join(self.log.problems)}")
        known = [listed.episode_id for listed in self.log.list()]
        close = get_close_matches(episode_id, known, n=3)
        raise DataError(
            f"there is no episode {episode_id!r} among the {len(known)} of {self.dir.path}; "
            + (f"did you mean {' or '.join(close)}? " if close else "")
            + f"They are listed by: astuner replay {self.dir.path} --list"
        )

    @property
    def backbone(self) -> str:
        """The one that the run had."""
        data = read_resolved(self.dir.resolved) or {}
        return str((data.get("astuner") or {}).get("backbone", ""))

    def config(self, overrides: Sequence[str] = (), *, backbone: str, plugins: PluginManager | None = None) -> Config:
        """The run's settings with these changes, on this backbone; its run folder is where the run now is.

        :raises astuner.contracts.errors.ConfigError: an override is wrong.
        """
        place = [
            f"astuner.experiment_dir={json.dumps(str(self.dir.path.parent), ensure_ascii=False)}",
            f"astuner.experiment_name={json.dumps(self.dir.path.name, ensure_ascii=False)}",
        ]
        return load_config(self.dir.resolved, [*place, *overrides], backbone=backbone, plugins=plugins)


def short(text: str) -> str:
    """The beginning of ``text``, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= _WIDEST else line[: _WIDEST - 1] + "…"
