"""Check validation tasks and prompts for leakage before the first step.

The check determines whether validation tasks are held out, and whether prompts reveal their answers.

A validation task also occurs in training if a training task has the same text (``exact``) or nearly the same text
(``near``): the same numbers and formulas in the same order, and a Jaccard index of words and word pairs, weighted by
idf, of at least `NEAR`. A template that many tasks share has little weight, and words that distinguish tasks have much.
Candidates share one of the rarest words or pairs of the validation task, which every near-duplicate contains (prefix
filtering: Chaudhuri, Ganti and Kaushik 2006). Time is linear in the number of tasks; memory is proportional to the
validation tasks.

A prompt reveals its answer if prompts announce their own reference more often than the references of other tasks, or if
one split's prompts contain their references far more often than the other split's.
"""

from __future__ import annotations

import json
import math
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from astuner.contracts.errors import ConfigError
from astuner.contracts.parts import TaskCheckPart
from astuner.contracts.rows import ID_FIELDS
from astuner.contracts.section import Section
from astuner.contracts.types import Task
from astuner_record.exam import REFERENCES
from astuner_record.foreign import shown
from astuner_report.sentinel.statistics import percent, two_proportions

KEY = "astuner.data.leakage"
NEAR = 0.8
"""Similarity from which on two tasks are near-duplicates."""
SAMPLE = 5000
"""Number of training tasks that the frequency of words is estimated from."""
COMPARED = 2000
"""Maximum number of evenly spaced validation tasks compared for near-duplicates; all are compared for exact ones."""
ANSWERED = 20_000
"""Maximum number of tasks per split whose prompts are searched for their references, evenly spaced."""
_CANDIDATES = 20
"""Maximum number of validation tasks compared with one training task."""
_LONGEST = 1000
"""Words at the beginning, and at the end, of a longer text that are compared for near-duplicates."""
_EXAMPLES = 20
_HAN = r"\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"\d+(?:[.,]\d+)*|[{_HAN}]|[^\W\d_{_HAN}]+|[^\w\s.,;:!?'\"]|_")
"""A number, a character of a script without spaces, a word, or an operator or bracket."""
_AROUND = ".,;:!?'\"()-–—“”‘’*"
_SPOKEN = re.compile(r"[^\W\d_]{2,}(?:['’-][^\W\d_]+)*|[ai]|")
"""A word of a sentence; anything else between spaces, such as a number or a formula, is part of the question."""
_ANNOUNCE = {
    "answer", "answers", "solution", "result", "reference", "target", "expected", "truth", "key", "hint", "boxed",
}  # fmt: skip
_FILLERS = {*"=#([{*$\\>-", "is", "are", "was", "be", "the", "correct", "final"}
"""Words that may occur between an announcement and the answer; `####` is an announcement, too."""
_OTHERS = 4
"""Number of other tasks whose references show how often one is announced by chance."""


class LeakageKeys(Section):
    """Keys that the leakage check adds to ``astuner.data``."""

    leakage: Literal["warn", "refuse", "allow"] = "warn"
    """What to do about validation tasks that are also training tasks, and prompts that reveal their answers: warn,
    refuse to start, or allow."""


class TaskCheck(TaskCheckPart):
    """The part ``task_check``."""

    def look(self, config: Any, train: Sequence[Task], validation: Sequence[Task]) -> Mapping[str, Any]:
        found = find_leakage(train, validation)
        from astuner_report.slices import slices_of  # not while the keys of this module are read

        found["slices"] = slices_of(config, train, validation)
        if found["slices"]:
            fields = (f"{field} ({len(values)} values)" for field, values in found["slices"].items())
            found["plan"]["success by"] = ", ".join(fields)
        found["leakage"] = config.keys_of(LeakageKeys).leakage
        if found["leakage"] == "refuse" and found["alarms"]:
            raise ConfigError([f"{KEY}: {a['message']}. {a['advice']}, or set {KEY}=allow" for a in found["alarms"]])
        return found


def find_leakage(train: Sequence[Task], validation: Sequence[Task]) -> dict[str, Any]:
    """Return the findings as JSON-serializable data, with lines for the plan (``plan``) and alarms (``alarms``)."""
    began = time.perf_counter()
    overlap = _overlap(train, validation) if train and validation else None
    answers = {"train": _answers(train), "validation": _answers(validation)}
    alarms, plan = [], {}
    if overlap is not None:
        if overlap["tasks"]:
            alarms.append({"rule": "train_validation_overlap", "message": _overlapping(overlap), "advice": _PART})
        plan["held out"] = f"NO. {_overlapping(overlap)}. {_PART}" if overlap["tasks"] else _clean(overlap, len(train))
    if telling := _telling(answers):
        text = "; ".join(telling)
        message = text[0].upper() + text[1:]
        alarms.append({"rule": "answer_in_prompt", "message": message, "advice": _REMOVE})
        plan["answers"] = f"REVEALED. {message}. {_REMOVE}"
    seconds = round(time.perf_counter() - began, 3)
    return {"format": 1, "overlap": overlap, "answers": answers, "alarms": alarms, "plan": plan, "seconds": seconds}


_PART = "Validate on tasks that are not in the training set"
_REMOVE = "Remove the answer from the prompts"


def overlapping(overlap: Mapping[str, Any]) -> str:
    """Return how many validation tasks are also training tasks: ``5 of 25 tasks are also training tasks``."""
    n, near = overlap["tasks"], overlap["near"]
    nearly = f" ({'' if near == n else f'{near:,} of them '}in nearly the same words)" if near else ""
    verb = "is also a training task" if n == 1 else "are also training tasks"
    return f"{n:,} of {overlap['validation']:,} tasks {verb}{nearly}"


def _overlapping(overlap: Mapping[str, Any]) -> str:
    first = overlap["examples"][0]
    nearly = "" if overlap["exact"] else "nearly "
    pair = f"for example, {_id(first['validation'])} is {nearly}identical to {_id(first['train'])}"
    return f"Validation is not held out: {overlapping(overlap)}, so it does not measure other tasks ({pair})"


def _id(task_id: str) -> str:
    """Return a task's ID, which may come from an untrusted file, for one line of the terminal."""
    return " ".join(shown(task_id).split())[:80]


def _clean(overlap: Mapping[str, Any], train: int) -> str:
    n, compared = overlap["validation"], overlap["compared"]
    if not compared:
        return f"yes, none of {n:,} validation tasks is in the {train:,} training tasks (compared by {overlap['by']})"
    some = f" ({compared:,} compared for near-duplicates)" if compared < n else ""
    return f"yes, none of {n:,} validation tasks equals or nearly equals one of {train:,} training tasks{some}"


# -------------------------------------------------------------------------------------------------------------- overlap


def asked(task: Task) -> str:
    """Return the text of a task: its messages and its query."""
    said = [m.get("content") for m in task.init_messages]
    texts = [t if isinstance(t, str) else json.dumps(t, ensure_ascii=False, default=str) for t in said if t]
    return "\n".join([*texts, task.main_query])


def words(text: str) -> list[str]:
    """Return the words of a text without case and punctuation; numbers, operators and brackets are kept."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _spaced(tasks: Sequence[Task], most: int) -> Sequence[Task]:
    return tasks[:: max(1, math.ceil(len(tasks) / most))]


def _same_text(task: Task) -> int:
    return hash(" ".join(unicodedata.normalize("NFKC", asked(task)).casefold().split()))


def _same_task(task: Task) -> int:
    """Return a hash of a task: of its ID for a task of an environment, otherwise of everything except ID and split."""
    if task.has_environment:
        return hash((task.env_type, task.task_id, _same_text(task)))
    row = {name: value for name, value in task.metadata.items() if name not in (*ID_FIELDS, "split")}
    return hash((_same_text(task), json.dumps(row, sort_keys=True, default=str)))


def _overlap(train: Sequence[Task], validation: Sequence[Task]) -> dict[str, Any]:
    """Return which validation tasks are also training tasks.

    Tasks are compared by their text, unless most share it with others: then the task comes from an environment or the
    question is in the metadata, and complete rows are compared, without near-duplicates.
    """
    some = [*_spaced(train, SAMPLE), *_spaced(validation, SAMPLE)]
    by_text = 2 * len({_same_text(t) for t in some}) >= len({_same_task(t) for t in some})
    same = _same_text if by_text else _same_task
    where: dict[int, list[int]] = {}
    for i, task in enumerate(validation):
        where.setdefault(same(task), []).append(i)
    step = max(1, math.ceil(len(validation) / COMPARED))
    index = _Near(train, {i: validation[i] for i in range(0, len(validation), step)}) if by_text else None
    exact: dict[int, str] = {}
    near: dict[int, tuple[str, float]] = {}
    for task in train:
        if found := where.get(same(task)):
            for i in found:
                exact.setdefault(i, task.task_id)
        if index is not None:
            for i, likeness in index.like(task):
                if likeness > near.get(i, ("", 0.0))[1]:
                    near[i] = task.task_id, likeness
    pairs = {i: (name, 1.0) for i, name in exact.items()} | {i: at for i, at in near.items() if i not in exact}
    return {
        "by": "text" if by_text else "ID" if validation[0].has_environment else "complete row",
        "train": len(train),
        "validation": len(validation),
        "compared": len(index.texts) if index is not None else 0,
        "tasks": len(pairs),
        "exact": len(exact),
        "near": len(pairs) - len(exact),
        "examples": [
            {"validation": validation[i].task_id, "train": name, "likeness": round(likeness, 3)}
            for i, (name, likeness) in sorted(pairs.items(), key=lambda pair: (-pair[1][1], pair[0]))[:_EXAMPLES]
        ],
    }


class _Near:
    """An index of validation tasks by their rare words, to find near-duplicates of training tasks."""

    def __init__(self, train: Sequence[Task], validation: Mapping[int, Task]) -> None:
        common = {_same_text(t): t for t in _spaced(train, SAMPLE)}
        self._n = len(common)
        self._seen = Counter(s for t in common.values() for s in _features(t)[0])
        self.texts = {i: _features(task) for i, task in validation.items()}
        self._numbers = {numbers for _, numbers in self.texts.values()}
        self._index: dict[int, list[int]] = {}
        for i, (features, numbers) in self.texts.items():
            left = (1 - NEAR) * self._weight(features)
            for feature in sorted(features, key=lambda s: (-self._idf(s), s)):
                if left < 0 or not self._idf(feature):
                    break
                self._index.setdefault(feature ^ numbers, []).append(i)
                left -= self._idf(feature)

    def like(self, task: Task) -> Iterator[tuple[int, float]]:
        """Yield the validation tasks that ``task`` nearly repeats, and their similarity."""
        features, numbers = _features(task)
        if numbers not in self._numbers:
            return
        found = {i for s in features for i in self._index.get(s ^ numbers, ())}
        for i in sorted(found)[:_CANDIDATES]:
            other, theirs = self.texts[i]
            if numbers == theirs and (both := self._weight(features | other)):
                likeness = self._weight(features & other) / both
                if likeness >= NEAR:
                    yield i, likeness

    def _idf(self, feature: int) -> float:
        return math.log(self._n / max(1, self._seen[feature]))

    def _weight(self, features: set[int]) -> float:
        return sum(map(self._idf, features))


def _features(task: Task) -> tuple[set[int], int]:
    """Return hashes of the words and word pairs of a task's text, and of its numbers and formulas in order."""
    text = asked(task)
    found = words(text)
    numbers = hash(tuple(w for t in text.casefold().split() if not _SPOKEN.fullmatch(w := t.strip(_AROUND))))
    if len(found) > 2 * _LONGEST:
        found = found[:_LONGEST] + found[-_LONGEST:]
    return {*map(hash, found), *map(hash, pairwise(found))}, numbers


# -------------------------------------------------------------------------------------------------------------- answers


def _reference(task: Task) -> list[str]:
    """Return the words of the reference answer (GSM8K: after ``####``); empty if it cannot be searched for."""
    value = next((task.metadata[name] for name in REFERENCES if task.metadata.get(name) not in (None, "")), "")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return []
    found = words(str(value).rpartition("####")[2])
    return found if len(found) <= 50 else []


def _announced(said: Sequence[str]) -> set[int]:
    """Return the positions in a prompt that are announced as the answer."""
    places = set()
    for at, word in enumerate(said):
        if word in _ANNOUNCE or (word == "#" and said[at : at + 4] == ["#"] * 4):
            end = at + 1
            while end < len(said) and end < at + 8 and said[end] in _FILLERS:
                end += 1
                places.add(end)
            places.add(at + 1)
    return places


def _answers(tasks: Sequence[Task]) -> dict[str, Any]:
    """Count the prompts that announce or contain their reference, and the references of `_OTHERS` other tasks."""
    known = [(task, ref) for task in _spaced(tasks, ANSWERED) if (ref := _reference(task))]
    n, apart = len(known), max(1, len(known) // (_OTHERS + 1))
    announced, held = [0, 0], [0, 0]
    example = ""
    for i, (task, own) in enumerate(known):
        said = words(asked(task))
        places, text = _announced(said), f" {' '.join(said)} "
        for which in range(_OTHERS + 1):
            ref = known[(i + which * apart) % n][1] if which else own
            kind = bool(which)
            held[kind] += f" {' '.join(ref)} " in text
            if any(said[at : at + len(ref)] == ref for at in places):
                announced[kind] += 1
                example = example or ("" if kind else task.task_id)
    return {
        "tasks": n,
        "announced": announced[0],
        "announced_by_chance": announced[1] / _OTHERS,
        "held": held[0],
        "held_by_chance": held[1] / _OTHERS,
        "example": example,
    }


def _telling(answers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one message for each problem with prompts."""
    found = []
    for split, of in answers.items():
        n, told, chance = of["tasks"], of["announced"], of["announced_by_chance"]
        if told >= 3 and two_proportions((_OTHERS * chance, _OTHERS * n), (told, n)) >= 3:
            found.append(
                f"{told:,} of {n:,} {split} prompts announce their own reference answer (e.g. {_id(of['example'])}), "
                f"compared with {chance:,.1f} prompts that announce the answer of another task"
            )
    if found:
        return found
    for split, other in (("train", "validation"), ("validation", "train")):
        (a, n), (b, m) = [(answers[s]["held"], answers[s]["tasks"]) for s in (split, other)]
        if min(n, m) < 20:
            continue
        beyond = [
            max(0.0, answers[s]["held"] - answers[s]["held_by_chance"]) / answers[s]["tasks"] for s in (split, other)
        ]
        if beyond[0] - beyond[1] >= 0.25 and two_proportions((b, m), (a, n)) >= 4:
            found.append(
                f"{percent(a / n)} of the {split} prompts contain their own reference answer, compared with "
                f"{percent(b / m)} of the {other} prompts"
            )
    return found
