"""Forks in a folder of their own, which everything opens as a run: its settings, an episode log with the original
beside the forks, and ``replay.json``."""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from astuner import RunDir
from astuner.config import Config
from astuner.contracts.errors import RunError
from astuner.rollout.transcript import transcript
from astuner.support.json_lines import write_jsonl
from astuner_record.episode_log import EpisodeLogWriter, LoggedEpisode
from astuner_record.replay.fork import Fork, Plan


def write_forks(
    run: RunDir, config: Config, original: LoggedEpisode, forks: Sequence[Fork], about: dict[str, Any], out: Path | None
) -> Path:
    """Write them.

    :param about: more for ``replay.json``.
    :param out: the new folder; below ``replays/`` of the run by default.
    :returns: the folder.
    :raises RunError: it cannot be written.
    """
    folder = RunDir(out or _free(run.path / "replays", original.episode.workflow_task.episode_id))
    notes: list[str] = []
    try:
        folder.episodes.mkdir(parents=True)
        RunDir.write_atomically(folder.resolved, config.dump_yaml())
        tokenizer = run.episodes / "tokenizer"
        if tokenizer.is_dir():
            shutil.copytree(tokenizer, folder.episodes / "tokenizer")
        episodes = [original.episode, *(fork.episode for fork in forks)]
        log = EpisodeLogWriter(folder.episodes, notes.append)
        for episode in episodes:
            log.episode(original.step, episode)
        log.close()
        write_jsonl(folder.episodes / "replay.jsonl", map(transcript, episodes))
        folder.write_json(folder.path / "replay.json", {**about, "forks": [fork_row(fork) for fork in forks]})
    except OSError as e:
        raise RunError(f"the forks cannot be written to {folder.path}: {e}; choose another folder: --out DIR") from e
    return folder.path


def fork_row(fork: Fork) -> dict[str, Any]:
    """A fork as plain data."""
    episode = fork.episode
    return {
        "episode_id": episode.workflow_task.episode_id,
        "reward": episode.reward,
        "is_success": episode.is_success,
        "stop_reason": episode.stop_reason.value,
        "error": episode.error,
        "turns": len(episode.turns),
        "tokens": sum(len(turn.generation.response_ids) for turn in episode.turns),
        "recorded_turns": list(fork.given),
        "differs_from_turn": fork.differs_from,
        "divergences": [asdict(d) for d in fork.divergences],
        "stopped": fork.stopped,
        "notes": list(fork.notes),
        "seconds": episode.seconds,
    }


def about_plan(run: RunDir, original: LoggedEpisode, plan: Plan, checkpoint: str) -> dict[str, Any]:
    """What was replayed, for ``replay.json``."""
    return {
        "format": 1,
        "run": str(run.path),
        "episode": original.episode.workflow_task.episode_id,
        "step": original.step,
        "from_turn": plan.from_turn,
        "to_turn": plan.to_turn,
        "checkpoint": checkpoint,
        "reward": original.episode.reward,
        "is_success": original.episode.is_success,
    }


def _free(parent: Path, episode_id: str) -> Path:
    safe = re.sub(r"[^\w.-]", "_", episode_id)
    stamp = f"{safe}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([stamp], (f"{stamp}-{n}" for n in itertools.count(2)))
    return next(path for name in names if not (path := parent / name).exists())
