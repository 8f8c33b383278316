"""A run's episodes of one validation (or of training) as numbers per task, and the tasks that all runs have.

Invariant: a task is what an agent is asked, so it is known by its id and by a hash of its first messages and query; a
data set whose ids repeat, or whose lines were reordered, never pairs two different questions.  No task is left out
silently, and where the task sets differ, none at all unless the person agreed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from astuner.contracts.errors import DataError
from astuner.contracts.types import Split, StopReason
from astuner.rollout.metrics import mean
from astuner_record.episode_log import EpisodeLog
from astuner_record.episode_log.reader import Listed

MEASURES = {
    "success": "share of episodes that succeeded",
    "reward": "mean reward",
    "turns": "model calls of an episode",
    "response tokens": "tokens that the model generated in an episode",
    "prompt tokens": "tokens of an episode's prompts, each counted once",
    "cut off": "share of episodes that a length or turn limit ended",
}
"""What is compared, and what it is; of scored episodes only."""


BY = ("task", "text")
"""What makes tasks of two runs the same: id and text, or the text alone (the file was renamed, or its lines moved)."""


@dataclass(frozen=True, kw_only=True)
class TaskNumbers:
    """What the episodes of one task came to."""

    task_id: str
    text: str
    """A hash of what is asked."""
    query: str
    """Its first 300 characters."""
    episodes: tuple[str, ...]
    """The ids of those that were scored."""
    means: Mapping[str, float]
    """Measure -> its mean over them; empty where there are none."""
    ended: str
    """How the first of all its episodes ended."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run, measured."""

    run: Path
    split: Split
    step: int | None
    """None: of all steps."""
    tasks: Mapping[str, TaskNumbers]
    """By what makes them the same."""
    stop_reasons: Mapping[str, int]
    """Of all episodes."""

    @property
    def episodes(self) -> int:
        return sum(self.stop_reasons.values())


def measure(run: Path, *, split: Split = Split.VALIDATION, step: int | None = None, by: str = "task") -> Measured:
    """Measure a run's episodes of one step.

    :param step: the newest by default in validation, all of them in training.
    :param by: one of `BY`.
    :raises DataError: the run has no log, or there is no such episode.
    """
    if not run.is_dir():
        raise DataError(f"{run} is not a run folder; write the folder that `astuner run` names at its end")
    with EpisodeLog(run) as log:
        found = log.list([f"split={split.value}"])
        if not found:
            raise DataError(f"{run} has no episodes of {split.value}{_instead(log, split)}")
        if step is None and split is Split.VALIDATION:
            step = max(e.step for e in found)
        chosen = [e for e in found if step in (None, e.step)]
        if not chosen:
            steps = ", ".join(map(str, sorted({e.step for e in found})))
            raise DataError(f"{run} has no {split.value} of step {step}; there are the steps {steps}")
        texts = _texts(log, chosen)
    by_task: dict[str, list[Listed]] = {}
    for listed in chosen:
        text = texts[listed.group_id]
        by_task.setdefault(f"{listed.task_id} {text}" if by == "task" else text, []).append(listed)
    return Measured(
        run=run,
        split=split,
        step=step,
        tasks={key: _numbers(episodes, texts[episodes[0].group_id]) for key, episodes in by_task.items()},
        stop_reasons=Counter(e.stop_reason for e in chosen),
    )


def _instead(log: EpisodeLog, split: Split) -> str:
    other = Split.TRAIN if split is Split.VALIDATION else Split.VALIDATION
    if log.count([f"split={other.value}"]):
        return f", but of {other.value}: add --split {other.value}"
    return ""


def _texts(log: EpisodeLog, chosen: Sequence[Listed]) -> dict[str, str]:
    """Group -> the hash of what its task asks; the attempts of a group share it."""
    texts: dict[str, str] = {}
    for listed in chosen:
        if listed.group_id not in texts:
            row = log.read(listed).row
            texts[listed.group_id] = text_hash(row["query"], json.loads(row["task"])["init_messages"])
    return texts


def text_hash(query: str, messages: object) -> str:
    """A hash of what a task asks; 64 bits, of which no two tasks of a data set share one by chance."""
    said = json.dumps([query, messages], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(said.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _numbers(episodes: Sequence[Listed], text: str) -> TaskNumbers:
    scored = [e for e in episodes if e.reward is not None]
    rows = [_of_episode(e) for e in scored]
    return TaskNumbers(
        task_id=episodes[0].task_id,
        text=text,
        query=episodes[0].query,
        episodes=tuple(e.episode_id for e in scored),
        means={name: mean([row[name] for row in rows]) for name in MEASURES} if rows else {},
        ended=episodes[0].stop_reason,
    )


def _of_episode(listed: Listed) -> dict[str, float]:
    assert listed.reward is not None  # only scored ones come here
    return {
        "success": float(bool(listed.success)),
        "reward": listed.reward,
        "turns": float(listed.turns),
        "response tokens": float(listed.tokens),
        "prompt tokens": float(listed.prompt_tokens),
        "cut off": float(StopReason(listed.stop_reason).is_limit),
    }


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """Which tasks are compared, by their keys in `Measured.tasks`."""

    tasks: tuple[str, ...]
    """Scored in every run, in the order of the first one."""
    only_a: tuple[TaskNumbers, ...]
    """Not in all runs of b."""
    only_b: tuple[TaskNumbers, ...]
    changed: tuple[str, ...]
    """Ids of tasks that are on both sides, and ask something else there."""
    unscored: Mapping[str, str]
    """Id of a task in all runs, without a scored episode in some -> how it ended in which."""


def pair(a: Sequence[Measured], b: Sequence[Measured], *, common: bool = False) -> Pairing:
    """Find the tasks of all runs.

    :param common: whether it is fine that the runs have other tasks too.
    :raises DataError: they have, and it is not; or there is nothing to compare.
    """
    runs = [*a, *b]
    shared = [key for key in a[0].tasks if all(key in run.tasks for run in runs)]
    only_a, only_b = _left_out(a, shared), _left_out(b, shared)
    unscored = {key: why for key in shared if (why := _unscored(key, runs))}
    pairing = Pairing(
        tasks=tuple(key for key in shared if key not in unscored),
        only_a=only_a,
        only_b=only_b,
        changed=tuple(sorted({t.task_id for t in only_a} & {t.task_id for t in only_b})),
        unscored={a[0].tasks[key].task_id: why for key, why in unscored.items()},
    )
    _check(pairing, a, b, common)
    return pairing


def _left_out(side: Sequence[Measured], shared: Sequence[str]) -> tuple[TaskNumbers, ...]:
    known = set(shared)
    return tuple({key: task for run in side for key, task in run.tasks.items() if key not in known}.values())


def _unscored(key: str, runs: Sequence[Measured]) -> str:
    return ", ".join(f"{run.tasks[key].ended} in {run.run.name}" for run in runs if not run.tasks[key].episodes)


def _check(pairing: Pairing, a: Sequence[Measured], b: Sequence[Measured], common: bool) -> None:
    of = f"{_sizes(a)} tasks on the side of {a[0].run.name}, {_sizes(b)} on that of {b[0].run.name}"
    if not pairing.tasks:
        raise DataError(f"there is nothing to compare: {of}, and no task is scored in all runs{_hint(pairing)}")
    if common or not (pairing.only_a or pairing.only_b):
        return
    together = len(pairing.tasks) + len(pairing.unscored)
    raise DataError(
        f"the runs have different tasks: {of}; {together} are in all of them{_hint(pairing)}; to compare those alone, "
        "add --common"
    )


def _sizes(side: Sequence[Measured]) -> str:
    sizes = sorted({len(run.tasks) for run in side})
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def _hint(pairing: Pairing) -> str:
    if {t.text for t in pairing.only_a} & {t.text for t in pairing.only_b}:
        return "; some ask the same under another id: --by text"
    if pairing.changed:
        some = ", ".join(pairing.changed[:3])
        return f"; {len(pairing.changed)} have the same id and ask something else, e.g. {some}"
    return ""
