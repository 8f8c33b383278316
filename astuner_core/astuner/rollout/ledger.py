"""The failure ledger: how every episode of a run ended, and what was dropped because of it.

An infrastructure failure never becomes a reward; it becomes an entry here.  Counts survive a resume; the entries
themselves are appended to ``failures.jsonl`` in the run folder as they happen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astuner.contracts.types import Episode, Split
from astuner.support.json_lines import append_jsonl


class FailureLedger:
    """Counts endings; writes down failures."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.counts: Counter[str] = Counter()
        """Stop reason -> episodes (``validation/…`` apart), plus ``retries``,
        ``dropped_groups``, ``dropped_paths``, ``skipped_data``."""

    def episode(self, step: int, episode: Episode) -> None:
        """Count how ``episode`` ended; write it down when it is not scored."""
        of = "validation/" if episode.workflow_task.split is Split.VALIDATION else ""
        self.counts[of + episode.stop_reason.value] += 1
        self.counts["retries"] += episode.retries
        if not episode.stop_reason.is_scored:
            self._write(
                {
                    "step": step,
                    "episode_id": episode.workflow_task.episode_id,
                    "task_id": episode.workflow_task.task.task_id,
                    "stop_reason": episode.stop_reason.value,
                    "error": episode.error,
                    "turns": len(episode.turns),
                    "seconds": round(episode.seconds, 3),
                }
            )

    def dropped_group(self, step: int, group_id: str, reason: str) -> None:
        """Count a group that cannot be trained on."""
        self.counts["dropped_groups"] += 1
        self._write({"step": step, "group_id": group_id, "dropped": reason})

    def skipped_data(self, skipped: Mapping[str, str]) -> None:
        """Count and write down the lines of the data that could not be read (place -> reason)."""
        self.counts["skipped_data"] = len(skipped)
        for place, reason in skipped.items():
            self._write({"skipped": place, "error": reason})

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._path is not None:
            append_jsonl(self._path, entry)

    def state(self) -> dict[str, int]:
        return dict(self.counts)

    def restore(self, state: Mapping[str, int]) -> None:
        self.counts = Counter(state)
