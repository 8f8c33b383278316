"""Lines of the console about slices, tasks won and lost, and episodes to read: label -> text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from astuner import RunDir
from astuner.contracts.statistics import percent
from astuner_record.foreign import shown

_MAX_SLICES = 10


def summary_lines(facts: Mapping[str, Any], run_dir: RunDir) -> dict[str, str]:
    """Return the lines of a run, without empty ones.

    :param facts: facts of the report.
    """
    lines = {
        "Success by field": "\n".join(map(_slice, _lowest_changes(facts["slices"]))),
        "Won and lost": "\n".join(
            f"{pair['won']} won, {pair['lost']} lost from step {pair['from']} to {pair['to']}\n  {pair['command']}"
            for pair in facts["won_and_lost"]
            if pair["won"] or pair["lost"]
        ),
        "Best validation": _best_without_checkpoint(facts["held_out"], run_dir),
        "Read first": "\n".join(
            f"{episode['episode']}: {shown(episode['reason'])}\n  {episode['command']}"
            for episode in facts["informative_episodes"]
        ),
    }
    return {label: text for label, text in lines.items() if text}


def _lowest_changes(slices: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return all slices, or those with the lowest changes if there are too many."""
    if len(slices) <= _MAX_SLICES:
        return slices
    return sorted(slices, key=lambda row: row.get("change") or 0.0)[:_MAX_SLICES]


def _slice(row: Mapping[str, Any]) -> str:
    """Return the success of a slice in the first and last validation: ``layout=b  100.0 % to 73.9 %  (23 tasks)``."""
    shares = [percent(row[name]["success"], 1) for name in ("first", "last") if row.get(name)]
    mark = "  FELL" if row.get("fell") else ""
    name = shown(f"{row['field']}={row['value']}")
    return f"{name}  {' to '.join(shares) or 'not scored'}  ({row['tasks']} tasks){mark}"


def _best_without_checkpoint(held_out: Mapping[str, Any] | None, run_dir: RunDir) -> str:
    """Return the best validation if it is not the last one and has no checkpoint, else an empty string."""
    best = held_out["best"] if held_out else None
    if not held_out or best is None or best["step"] in (0, held_out["after"]["step"]):
        return ""
    if run_dir.checkpoint(best["step"]).exists():
        return ""
    fix = "to keep it in the next run, set astuner.trainer_common.save_freq to test_freq"
    return f"step {best['step']}, success {percent(best['success'], 1)}; it has no checkpoint, {fix}"
