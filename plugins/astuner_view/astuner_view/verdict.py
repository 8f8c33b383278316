"""The verdict of a run for its page: facts of the report, gathered again only when the run's files change."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from astuner import RunDir
from astuner.contracts.errors import DataError
from astuner_record.foreign import is_plain_file
from astuner_report.run_report.facts import gather
from astuner_report.run_report.files import NONSENSE
from astuner_view.runs import about

_SHOWN = ("verdict", "held_out", "alarms", "informative_episodes", "next", "slices")
_CHANGING = ("metrics.jsonl", "alarms.jsonl", "summary.json", "tasks.json")


def verdict_facts(run: Path) -> dict[str, Any]:
    """Return the facts of a run's report that its page shows; empty if a file of the run cannot be read.

    Links and pipes are not followed.
    """
    return _gathered(run, *(about(run / name) for name in _CHANGING))


@lru_cache(maxsize=64)
def _gathered(run: Path, *_about: object) -> dict[str, Any]:
    files = (*run.glob("*.json*"), run / "resolved.yaml", *run.glob("episodes/validated_*.json"))
    if not all(map(is_plain_file, files)):
        return {}
    run_dir = RunDir(run)
    try:
        facts = gather(run_dir, {})
    except (OSError, DataError, *NONSENSE):
        return {}
    for episode in facts["informative_episodes"]:
        del episode["command"]  # contains paths of this machine, and the page has links
    return {name: facts[name] for name in _SHOWN if name in facts}
