"""The card of a judge: what is measured of it, and whether it is fit to give rewards.

The judge is found, configured and made as a run would, and asked as a run would ask it: a judge of single attempts
about each answer, a judge of groups about all of them together, in the order that they are given.  Helper models are
watched: repeats of a question are asked anew, and cost and cached answers are seen.  Without an experiment file there
is one of the least that a run needs, so that a judge's section is checked by the same code, with the same messages.

Measured are agreement with labels, ties, bias by length, and what moves the judge: it should not be moved by order,
padding, style, being asked again, or answers that try to move it.  Every probe compares a verdict with the judge's own
on the same answers without it, so a judge that is wrong is not blamed for it twice.  A kind of harmless change that
moves verdicts in one direction is a weakness (`astuner_rubrics.changes`).  The other changes that mean nothing are the
baseline: a judge that they move is noisy, and padding and attacks count by what they gain beyond that.

The card is read as text (which is Markdown), as one HTML page without scripts, or as JSON, all made of the same rows;
what others wrote (a failure's message) is shown as text only.

Invariants: a judge that fails gives no numbers, and is counted; a spent budget ends the whole check; what is added to
an answer says nothing about the question; the verdict is decided by the lines of the card and their limits alone, and
names those that decided it.
"""

from __future__ import annotations

import asyncio
import contextvars
import datetime
import itertools
import json
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jinja2 import Environment

from astuner import Config, OutOfTime, Task, TimeLimits, WorkflowOutput, WorkflowTask, read_config
from astuner.contracts.building import BuildContext
from astuner.contracts.errors import ConfigError, DataError, JudgeFailed
from astuner.contracts.judge import Attempt
from astuner.contracts.statistics import wilson_interval
from astuner.contracts.types import JudgeOutput
from astuner_helpers import Helper, HelperAnswer, HelperModels
from astuner_helpers.members import Member
from astuner_helpers.settings import HelperModel, HelperModelKeys
from astuner_rubrics.attacks import ATTACKS, Attack
from astuner_rubrics.changes import (
    CHANGES,
    ERROR_RATE,
    FIRST_ANSWERS,
    NEUTRAL,
    PADDING,
    Answer,
    Change,
    Effect,
    effects,
    raising_kinds,
)
from astuner_rubrics.labels import Labels, Mode, Overlap, Sample, digest, places_of_same, without_known
from astuner_rubrics.measures import (
    ABSTENTIONS,
    CONSISTENCY,
    FEWEST,
    FLIPS,
    NOISE,
    RISES,
    SUCCESSES,
    Judged,
    Limits,
    Measure,
    Verdict,
    agreement,
    excess,
    length_bias,
    mean_of,
    share_of,
)
from astuner_rubrics.models import ONE, WHICH_MODEL, section_of
from astuner_rubrics.rubric_file import load_rubrics
from astuner_rubrics.rubrics_judge import RubricsConfig

_FAR = 1_000_000
"""Samples of a judge's own are below this; each repeat has as many of its own."""

_NOW: contextvars.ContextVar[_Watched | None] = contextvars.ContextVar("astuner_verdict", default=None)


@dataclass
class _Watched:
    """One verdict that is being made."""

    repeat: int
    answers: list[HelperAnswer] = field(default_factory=list)


class JudgeUnderTest:
    """Asks one judge.

    :param answer_field: the key of the output's metadata in which answers stand, besides ``response``.
    :param at_once: questions on their way at once.
    :param timeout: seconds for one question.
    """

    def __init__(self, judge: Member, *, answer_field: str, at_once: int, timeout: float) -> None:
        self._judge, self._answer_field, self._timeout = judge, answer_field, timeout
        self.by_group = judge.by_group
        self.took: list[tuple[float, Sequence[HelperAnswer]]] = []
        """Seconds of each question, and what helpers answered meanwhile."""
        self.failures: list[str] = []
        self.asked = 0
        self._known: dict[tuple[str, tuple[str, ...], int], asyncio.Task[Verdict | None]] = {}
        self._room, self._limits = asyncio.Semaphore(at_once), TimeLimits()

    async def verdict(self, sample: Sample, answers: Sequence[str], repeat: int = 0) -> Verdict | None:
        """The verdict on answers to a sample's question; None where the judge failed.  The same is asked once.

        :param repeat: 0, 1, 2, …: asked again on purpose.
        :raises ConfigError: the judge's settings are wrong, or a helper's budget is spent.
        """
        if self.by_group:
            return await self._once(sample, tuple(answers), repeat)
        each = await asyncio.gather(*(self._once(sample, (answer,), repeat) for answer in answers))
        if any(one is None for one in each):
            return None
        whole = [one for one in each if one is not None]
        return Verdict(tuple(o.rewards[0] for o in whole), tuple(o.successes[0] for o in whole))

    async def close(self) -> None:
        """End whatever is still being asked."""
        for task in self._known.values():
            task.cancel()
        await asyncio.gather(*self._known.values(), return_exceptions=True)

    async def _once(self, sample: Sample, answers: tuple[str, ...], repeat: int) -> Verdict | None:
        key = (sample.place, answers, repeat)
        if key not in self._known:
            self._known[key] = asyncio.ensure_future(self._ask(sample, answers, repeat))
        return await self._known[key]

    async def _ask(self, sample: Sample, answers: tuple[str, ...], repeat: int) -> Verdict | None:
        async with self._room:
            watched = _Watched(repeat)
            _NOW.set(watched)  # this task's own
            began = time.perf_counter()
            self.asked += 1
            try:
                outputs = await self._limits.run(self._outputs(sample, answers), self._timeout)
            except ConfigError:
                raise
            except OutOfTime:
                self.failures.append(f"no verdict within {self._timeout:g} s")
                return None
            except Exception as e:  # whatever a judge raises is a verdict that is missing, as in a run
                self.failures.append(str(e) if isinstance(e, JudgeFailed) else f"{type(e).__name__}: {e}")
                return None
            self.took.append((time.perf_counter() - began, watched.answers))
            return Verdict(tuple(o.reward for o in outputs), tuple(o.succeeded for o in outputs))

    async def _outputs(self, sample: Sample, answers: tuple[str, ...]) -> list[JudgeOutput]:
        attempts = [self._attempt(sample, answer, number) for number, answer in enumerate(answers)]
        if not self.by_group:
            (one,) = attempts
            return [await self._judge.judge(one)]
        found = await self._judge.judge_group(attempts)
        for verdict in found:
            if isinstance(verdict, JudgeFailed):
                raise verdict
        return [verdict for verdict in found if isinstance(verdict, JudgeOutput)]

    def _attempt(self, sample: Sample, answer: str, number: int) -> Attempt:
        metadata: dict[str, Any] = dict(sample.metadata)
        if sample.reference is not None:
            metadata["answer"] = sample.reference
        task = Task(task_id=sample.place, main_query=sample.question, metadata=metadata)
        workflow_task = WorkflowTask(
            task=task, episode_id=f"{sample.place}#{number}", group_id=sample.place, attempt=number
        )
        output = WorkflowOutput(response=answer, metadata={self._answer_field: answer})
        return Attempt(workflow_task=workflow_task, output=output)


class _WatchedHelper(Helper):
    """Counts its answers for the verdict that asked for them."""

    async def ask(self, messages: Sequence[Mapping[str, Any]], *, sample: int = 0, **options: Any) -> HelperAnswer:
        watched = _NOW.get()
        repeat = watched.repeat if watched is not None else 0
        found = await super().ask(messages, sample=sample + _FAR * repeat, **options)
        if watched is not None:
            watched.answers.append(found)
        return found


class _WatchedHelpers(HelperModels):
    kind = _WatchedHelper


MOVED = 0.05
"""A verdict has moved if it did by more than this share of the range of all verdicts."""
MOST_PROBED = 30
"""Answers that are padded, turned round or asked again at most."""
NEUTRAL_EACH = 2
"""Changes that mean nothing, of each answer that they are tried on."""


Attacked = Mapping[tuple[Attack, str], Sequence[bool]]
"""Attack and place (``appended`` to a wrong answer, or ``replaced`` it) -> whether the answer gained, of each tried."""


@dataclass(frozen=True)
class Probe:
    """Everything that a probe needs to know of what went before."""

    judge: JudgeUnderTest
    judged: Sequence[Judged]
    seed: int

    @property
    def tolerance(self) -> float:
        rewards = [r for j in self.judged for r in j.verdict.rewards]
        return MOVED * (max(rewards) - min(rewards)) if rewards else 0.0

    def some(self, most: int = MOST_PROBED) -> list[Judged]:
        """Samples to probe, the same for the same seed."""
        return sorted(self.judged, key=lambda j: digest([self.seed, j.sample.place]))[:most]

    async def order(self) -> Measure:
        """How often another answer is preferred when the answers are shown the other way round; of group judges."""
        several = [j for j in self.some() if len(j.sample.answers) > 1]
        turned = await asyncio.gather(*(self.judge.verdict(j.sample, j.sample.answers[::-1]) for j in several))
        flips = [
            _order(j.verdict.rewards) != _order(v.rewards[::-1])
            for j, v in zip(several, turned, strict=True)
            if v is not None
        ]
        return share_of("order: another verdict when answers are turned round", "order_flips", flips, FLIPS)

    async def effects(self, changes: Sequence[Change]) -> tuple[Effect, ...]:
        """Which kinds of harmless change move the verdict in one direction."""

        async def moved(answer: Answer, text: str, changed: str) -> int | None:
            return await self._moved(*answer, changed, text)

        return await effects(moved, self.some(len(self.judged)), changes)

    async def repeatability(self) -> Measure:
        """How often an unchanged answer's verdict moves when it is asked about again, twice the same way."""
        some = [(j, 0) for j in self.some(FIRST_ANSWERS)]
        ways = await asyncio.gather(*(self._moved(j, i, j.sample.answers[i], later=2) for j, i in some))
        moved = [way != 0 for way in ways if way is not None]
        return share_of("asked again: the verdict of an unchanged answer moves", "repeat_moves", moved)

    async def padding(self, neutral: Sequence[Change]) -> list[Measure]:
        """How often an answer that could gain does, by words that say nothing; one answer of each sample.

        First as it is, and then beyond what the same answers gain by changes that mean nothing.
        """
        some = _one_each(self._with_room())
        ways = await asyncio.gather(*(self._moved(j, i, j.sample.answers[i] + PADDING) for j, i in some))
        rises = [way > 0 for way in ways if way is not None]
        baseline = [way > 0 for way in await self._neutral(some, neutral)]
        return [
            share_of("padding: an answer gains by words that say nothing", "padding_rises", rises),
            share_of("the same answers gain by changes that mean nothing", "padding_baseline", baseline),
            excess("padding, beyond changes that mean nothing", "padding_excess", rises, baseline, RISES),
        ]

    async def attack_baseline(self, neutral: Sequence[Change]) -> list[bool]:
        """Whether wrong answers gain by changes that mean nothing."""
        return [way > 0 for way in await self._neutral(self._wrong(), neutral)]

    async def _neutral(self, some: Sequence[tuple[Judged, int]], neutral: Sequence[Change]) -> list[int]:
        """What changes that mean nothing do to each of these answers, as `_moved` returns it; every change is tried.

        Without any such change, what being asked again does.
        """
        if not neutral:
            asked = [self._moved(j, i, j.sample.answers[i], later=2) for j, i in some]
        else:
            asked = [
                self._moved(j, i, neutral[(number * NEUTRAL_EACH + turn) % len(neutral)].apply(j.sample.answers[i]))
                for number, (j, i) in enumerate(some)
                for turn in range(min(NEUTRAL_EACH, len(neutral)))
            ]
        return [way for way in await asyncio.gather(*asked) if way is not None]

    async def consistency(self, repeats: int) -> Measure:
        """How often a judge says the same when it is asked again."""
        some = self.some()
        each = await asyncio.gather(
            *(self.judge.verdict(j.sample, j.sample.answers, repeat=n) for j in some for n in range(1, repeats))
        )
        again = [each[i : i + repeats - 1] for i in range(0, len(each), repeats - 1)] if repeats > 1 else []
        same = [
            all(self._same(j.verdict, v) for v in verdicts if v is not None)
            for j, verdicts in zip(some, again, strict=False)
            if any(v is not None for v in verdicts)
        ]
        name = f"self-consistency: the same verdict when asked {repeats} times"
        return share_of(name, "self_consistency", same, CONSISTENCY)

    async def attacks(self, per_attack: int) -> Attacked:
        """Each attack on wrong answers, behind them and in their place; the same answers as the baseline's."""
        wrong = self._wrong()
        if not wrong or not per_attack:
            return {}
        plan = []
        turn = itertools.cycle(wrong)
        for attack in ATTACKS:
            for judged, index in itertools.islice(turn, min(per_attack, len(wrong))):
                appended = attack.on(judged.sample.answers[index])
                plan += [((attack, "appended"), (judged, index, appended))]
                plan += [((attack, "replaced"), (judged, index, attack.text))]
        found = await asyncio.gather(*(self._moved(*asked) for _, asked in plan))
        gained: dict[tuple[Attack, str], list[bool]] = {placed: [] for placed, _ in plan}
        for (placed, _), one in zip(plan, found, strict=True):
            if one is not None:
                gained[placed].append(one > 0)
        return gained

    def _wrong(self) -> list[tuple[Judged, int]]:
        """Answers that are worse by their label than others, and were not judged the best; one of each sample."""
        worth = [w for j in self.judged for w in j.sample.worth]
        middle = (max(worth) + min(worth)) / 2 if worth else 0.0
        return _one_each(
            (j, i)
            for j, i in self._with_room()
            if j.sample.worth[i] < (middle if len(j.sample.answers) == 1 else max(j.sample.worth))
        )

    def _with_room(self) -> list[tuple[Judged, int]]:
        """Answers that could still gain: not judged the best of all, or with a judge of groups of their sample's.

        What is at the top cannot rise, so it would make a judge that always falls for something look like one that
        seldom does.
        """
        best, tolerance = max((r for j in self.judged for r in j.verdict.rewards), default=0.0), self.tolerance
        return [
            (j, i)
            for j in self.some(len(self.judged))
            for i, reward in enumerate(j.verdict.rewards)
            if reward < (max(j.verdict.rewards) if self.judge.by_group else best) - tolerance
        ]

    async def _moved(
        self, judged: Judged, index: int, changed: str, text: str | None = None, later: int = 0
    ) -> int | None:
        """1 where the changed answer gets more than the answer, -1 where it gets less, else 0; None where it failed.

        Once is chance with a judge that wavers, so both are asked about again, and it has to move the same way.

        :param text: What it is compared with; by default the answer.
        :param later: How many repeats lie between the two, so that an answer can be compared with itself.
        """
        ways = set()
        for repeat in (0, 1):
            before = await self._standing(judged, index, judged.sample.answers[index] if text is None else text, repeat)
            after = await self._standing(judged, index, changed, repeat + later)
            if before is None or after is None:
                return None
            ways.add((after > before + self.tolerance) - (after < before - self.tolerance))
            if ways != {1} and ways != {-1}:
                return 0
        return ways.pop()

    async def _standing(self, judged: Judged, index: int, text: str, repeat: int) -> float | None:
        """An answer's reward; with a judge of groups, how far it is ahead of the best of the sample's others."""
        if not self.judge.by_group:
            verdict = await self.judge.verdict(judged.sample, [text], repeat)
            return None if verdict is None else verdict.rewards[0]
        answers = list(judged.sample.answers)
        answers[index] = text
        verdict = await self.judge.verdict(judged.sample, answers, repeat)
        if verdict is None:
            return None
        return verdict.rewards[index] - max(r for i, r in enumerate(verdict.rewards) if i != index)

    def _same(self, one: Verdict, other: Verdict) -> bool:
        if self.judge.by_group:
            return _order(one.rewards) == _order(other.rewards)
        return all(abs(a - b) <= self.tolerance for a, b in zip(one.rewards, other.rewards, strict=True))


def _one_each(answers: Iterable[tuple[Judged, int]]) -> list[tuple[Judged, int]]:
    """The first of each sample, as many as are probed."""
    first: dict[str, tuple[Judged, int]] = {}
    for judged, index in answers:
        first.setdefault(judged.sample.place, (judged, index))
    return list(first.values())[:MOST_PROBED]


def noise(moves: Sequence[Effect]) -> Measure:
    """How often changes that mean nothing move a verdict, without the kinds that move it in one direction."""
    ways = [way for m in moves if m.change.is_neutral and not m.is_one_sided for way in m.ways]
    moved = [way != 0 for way in ways]
    limits = NOISE if moved else None
    return share_of("noise: a change that means nothing moves the verdict", "neutral_moves", moved, limits)


def attack_measures(results: Attacked, baseline: Sequence[bool]) -> list[Measure]:
    """How often attacks succeed: all together, beyond changes that mean nothing, and each kind."""
    by_kind: dict[str, list[bool]] = defaultdict(list)
    for (attack, _), gained in results.items():
        by_kind[attack.kind] += gained
    every = [one for gained in by_kind.values() for one in gained]
    return [
        share_of("attacks: a wrong answer gains by them", "attack_success", every),
        share_of("wrong answers gain by changes that mean nothing", "attack_baseline", baseline),
        excess("attacks, beyond changes that mean nothing", "attack_excess", every, baseline, SUCCESSES),
        *(share_of(f"attacks: {k}", f"attack_success_{k}", gained) for k, gained in by_kind.items()),
    ]


def weaknesses(results: Attacked) -> Mapping[str, float]:
    """Attack and place -> how often it succeeded, of those that did, the worst first."""
    found = {f"{attack.name} ({placed})": mean_of(gained) or 0.0 for (attack, placed), gained in results.items()}
    return {name: share for name, share in sorted(found.items(), key=lambda item: -item[1]) if share}


def _order(rewards: Sequence[float]) -> list[int]:
    """The place of each answer; equal rewards share one."""
    levels = sorted(set(rewards), reverse=True)
    return [levels.index(r) for r in rewards]


Fitness = Literal["fit", "use with care", "do not use"]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is asked of the judge besides the labels."""

    limit: int = 200
    """Labelled examples at most."""
    repeats: int = 3
    """Times that the judge is asked the same; 1 leaves self-consistency out."""
    attacks: int = 1
    """Wrong answers for each attack, behind each and in its place; 0 leaves attacks out."""
    seed: int = 0


@dataclass(frozen=True)
class Card:
    """How good a judge is."""

    judge: str
    labels: str
    labels_sha256: str
    mode: Mode
    examples: int
    date: str
    seed: int
    measures: tuple[Measure, ...]
    weaknesses: Mapping[str, float]
    """Attack -> how often it succeeded, of those that did."""
    failures: Mapping[str, int]
    """Why there was no verdict -> how often."""
    fitness: Fitness
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    changes: tuple[Effect, ...] = ()
    """What each kind of harmless change does to the verdict."""
    overlap: Overlap | None = None
    """Labels that are not among the examples, since the rubrics were learned from them; None where nobody knows."""

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "judge": self.judge,
            "verdict": self.fitness,
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "labels": {
                "file": self.labels,
                "sha256": self.labels_sha256,
                "mode": self.mode.value,
                "n": self.examples,
                "left_out_learned_from": self.overlap.same if self.overlap else None,
                "left_out_near": self.overlap.near if self.overlap else None,
            },
            "date": self.date,
            "seed": self.seed,
            "measures": {
                m.key: {
                    "value": m.value,
                    "low": m.interval[0] if m.interval else None,
                    "high": m.interval[1] if m.interval else None,
                    "n": m.n,
                    "grade": m.grade,
                    **({"note": m.note} if m.note else {}),
                    **({"care": m.limits.care, "bad": m.limits.bad} if m.limits else {}),
                }
                for m in self.measures
            },
            "attacks_that_succeeded": dict(self.weaknesses),
            "changes": {move.change.name: move.as_dict() for move in self.changes},
            "changes_error_rate": ERROR_RATE,
            "failures": dict(self.failures),
        }


async def check(
    judge: JudgeUnderTest, labels: Labels, plan: Plan, *, name: str, notes: Sequence[str], say: Say
) -> Card:
    """Ask the judge, and measure.

    :raises DataError: the labels are of a kind that the judge cannot be compared with, or lack the right answer that
        it wants.
    :raises JudgeFailed: it gave no verdict at all.
    :raises BudgetSpent: a helper's budget is spent; what was answered is in the helper's cache.
    """
    if judge.by_group and labels.mode is Mode.POINTWISE:
        raise DataError(
            f"{labels.name}: {name} compares answers to one question, and these labels are scores of single answers; "
            'label pairs {"question", "answers", "preferred"} or lists {"question", "answers", "ranks"}'
        )
    samples = sorted(labels.samples, key=lambda s: digest([plan.seed, s.place]))[: plan.limit]
    try:
        say(f"asking {name} about {len(samples)} labelled examples")
        verdicts = await asyncio.gather(*(judge.verdict(s, s.answers) for s in samples))
        judged = [Judged(s, v) for s, v in zip(samples, verdicts, strict=True) if v is not None]
        asked, failed = judge.asked, len(judge.failures)
        if not judged:
            if "reference" in judge.failures[-1] and all(sample.reference is None for sample in samples):
                raise DataError(  # in the words of the labels' file: the judge misses what none of its lines has
                    f'{labels.name}: the lines lack "reference", the right answer, which {name} compares with: add '
                    f'"reference": "…" to each line ({judge.failures[-1]})'
                )
            raise JudgeFailed(f"{name} gave no verdict on any of {len(samples)} examples: {judge.failures[-1]}")
        measures = [*agreement(labels.mode, judged, plan.seed), length_bias(labels.mode, judged, plan.seed)]
        probe = Probe(judge, judged, plan.seed)
        if judge.by_group:
            say("turning answers round")
            measures.append(await probe.order())
        say("changing and padding answers")
        moves = await probe.effects(CHANGES if plan.attacks else NEUTRAL)
        measures += [noise(moves), await probe.repeatability(), raising_kinds(moves, judged)]
        measures += [move.measure() for move in moves]
        baseline = [m.change for m in moves if m.change.is_neutral and not (m.is_one_sided and m.raised > m.lowered)]
        measures += await probe.padding(baseline)
        if plan.repeats > 1:
            say("asking again")
            measures.append(await probe.consistency(plan.repeats))
        else:
            measures.append(_left_out("self-consistency", "self_consistency", CONSISTENCY, "--repeats 3"))
        if plan.attacks:
            say("attacking")
        results = await probe.attacks(plan.attacks)
        if plan.attacks:
            measures += attack_measures(results, await probe.attack_baseline(baseline))
        else:
            measures.append(_left_out("attacks", "attack_excess", SUCCESSES, "--attacks 1"))
    finally:
        await judge.close()
    abstained = failed / asked
    measures.append(Measure("no verdict", "abstentions", abstained, wilson_interval(failed, asked), asked, ABSTENTIONS))
    measures += _costs(judge)
    fitness, reasons = decide(measures)
    left = len(labels.samples) - len(samples)
    more = [f"{left} of {len(labels.samples)} examples were left out (--limit takes more)"] if left else []
    return Card(
        judge=name, labels=labels.name, labels_sha256=labels.sha256, mode=labels.mode, examples=len(samples),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(), seed=plan.seed,
        measures=tuple(measures), weaknesses=weaknesses(results), changes=moves,
        failures=dict(Counter(f.splitlines()[0][:200] if f else "" for f in judge.failures).most_common(5)),
        fitness=fitness, reasons=reasons, notes=(*notes, *more),
    )  # fmt: skip


def decide(measures: Sequence[Measure]) -> tuple[Fitness, tuple[str, ...]]:
    """The worst grade of any line, and the lines that have it; agreement that may be chance is bad,
    and a line that too few answers stand behind, or that was not measured, asks for care and no more."""
    bad, care = [], []
    if lowering := [
        m.name for m in measures if m.key.startswith("change_") and m.limits == NOISE and m.grade == "care"
    ]:
        kinds = ", ".join(name.removeprefix("style: ").removesuffix(" lowers the verdict") for name in lowering)
        care.append(f"style: the verdict is lowered by {kinds}")
    for m in measures:
        if m.name in lowering:
            continue
        if m.grade == "unknown":
            few = f"{m.n} are too few to say ({FEWEST})" if m.n < FEWEST else "it cannot be computed"
            care.append(f"{m.name}: {m.note or few}")
        elif m.key == "concordance" and m.interval is not None and m.interval[0] <= 0.5 and m.value is not None:
            bad.append(f"{m.name}: {m.value:.2f} of {m.n} cannot be told from chance (0.50)")
        elif m.key == "neutral_moves" and m.grade == "care":
            care.append(f"noisy: {m.value:.0%} of the changes that mean nothing move its verdict")
        elif m.grade in ("bad", "care") and m.limits is not None:
            which, limit = (bad, m.limits.bad) if m.grade == "bad" else (care, m.limits.care)
            side = "below" if m.limits.more_is_better else "above"
            range_ = f" ({m.interval[0]:.2f} to {m.interval[1]:.2f})" if m.is_difference and m.interval else ""
            which.append(f"{m.name}: {m.value:.2f}{range_} is {side} {limit:g}")
    if bad:
        return "do not use", tuple(bad)
    return ("use with care", tuple(care)) if care else ("fit", ())


def _left_out(name: str, key: str, limits: Limits, option: str) -> Measure:
    return Measure(name, key, None, None, 0, limits, note=f"not measured ({option} does)")


def plan_of(labels: Labels, plan: Plan, *, by_group: bool) -> int:
    """About how many questions a check asks the judge."""
    samples = min(len(labels.samples), plan.limit)
    answers = list(itertools.islice((len(s.answers) for s in labels.samples), samples))
    some = min(samples, MOST_PROBED)
    each = 1 if by_group else max(1, round(sum(answers) / len(answers)))
    asked = samples if by_group else sum(answers)
    asked += some * (2 if by_group else 1) + some * (plan.repeats - 1) * each
    asked += some * NEUTRAL_EACH * (2 if plan.attacks else 1)  # at most: the same answers are asked about once
    asked += min(samples, FIRST_ANSWERS) * (len(CHANGES if plan.attacks else NEUTRAL) + 1)  # of a judge that none moves
    return asked + len(ATTACKS) * 2 * plan.attacks


def _costs(judge: JudgeUnderTest) -> list[Measure]:
    """Seconds, requests and cost of a verdict; the cache's answers say nothing of how long one takes, or costs."""
    fresh = [(took, answers) for took, answers in judge.took if not any(a.cached for a in answers)]
    seconds = [took for took, _ in fresh]
    requests = [len(answers) for _, answers in judge.took]
    found = []
    if seconds:
        for what, key, q in (("median", "seconds_median", 0.5), ("95th percentile", "seconds_p95", 0.95)):
            found.append(
                Measure(f"seconds for a verdict, {what}", key, float(np.quantile(seconds, q)), None, len(seconds))
            )
    if any(requests):
        mean = sum(requests) / len(requests)
        found.append(Measure("helper requests for a verdict, mean", "requests", mean, None, len(requests)))
        if fresh:
            cost = sum(a.cost for _, answers in fresh for a in answers) / len(fresh)
            found.append(Measure("cost of 1,000 verdicts", "cost_per_1000", 1000 * cost, None, len(fresh)))
        whole = sum(a.cost for _, answers in judge.took for a in answers)
        found.append(Measure("cost of this check", "cost", whole, None, len(judge.took)))
    return found


_HEADS = ("", "value", "95 % interval", "of", "wanted", "")
_SAID = {"good": "good", "care": "care", "bad": "bad", "unknown": "too few", "info": ""}


def as_markdown(card: Card) -> str:
    """The whole card."""
    lines = [f"# {card.judge}: {card.fitness}", "", _about(card), ""]
    lines += [f"- {reason}" for reason in card.reasons]
    lines += ["", *_table([_HEADS, *(_row(m) for m in card.measures)]), ""]
    for title, entries in _lists(card):
        lines += [f"**{title}**", "", *(f"- {_inline(entry)}" for entry in entries), ""]
    return "\n".join(lines)


def as_html(card: Card) -> str:
    """One page, which loads nothing."""
    page = Environment(autoescape=True).from_string(
        Path(__file__).with_name("card.html.j2").read_text(encoding="utf-8")
    )
    return page.render(
        card=card,
        about=_about(card),
        heads=_HEADS,
        rows=[(m.grade, _row(m)) for m in card.measures],
        lists=[("Why", card.reasons), *_lists(card)],
    )


def write(card: Card, path: Path) -> None:
    """Write the card as the file's name says."""
    if path.suffix == ".json":
        text = json.dumps(card.as_dict(), ensure_ascii=False, indent=2) + "\n"
    else:
        text = as_html(card) if path.suffix in (".html", ".htm") else as_markdown(card)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _about(card: Card) -> str:
    return (
        f"{card.examples} {card.mode.value} examples of {card.labels} (sha256 {card.labels_sha256[:12]}), "
        f"{card.date}, seed {card.seed}."
    )


def _lists(card: Card) -> list[tuple[str, list[str]]]:
    found = [
        ("Attacks that succeeded", [f"{name}: {share:.0%}" for name, share in list(card.weaknesses.items())[:20]]),
        ("Why there was no verdict", [f"{count} times: {why}" for why, count in card.failures.items()]),
        ("Notes", list(card.notes)),
    ]
    return [(title, entries) for title, entries in found if entries]


def _row(m: Measure) -> tuple[str, ...]:
    value = (m.note or "none") if m.value is None else _number(m.value)
    interval = f"{_number(m.interval[0])} to {_number(m.interval[1])}" if m.interval else ""
    wanted = str(m.limits) if m.limits else ""
    return (m.name, value, interval, str(m.n), wanted, "" if m.note else _SAID[m.grade])


def _number(x: float) -> str:
    return f"{x:.2f}" if x == 0 or 0.005 <= abs(x) < 100 else f"{x:.2g}" if abs(x) < 100 else f"{x:,.0f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[_inline(cell).replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]


def _inline(text: str) -> str:
    """One line, with nothing that Markdown takes for a tag, and no control characters for the terminal."""
    line = " ".join(text.split())
    return "".join(c for c in line if c.isprintable()).replace("<", "&lt;")


SCOPE = "judge-check"
"""What budgets are counted for, below the current folder: not the experiment's run, which has a budget of its own."""

_WANTS_HELPER = re.compile(r"astuner\.task_judge\.(\w+)\.helper_model is required")
_REQUIRED = re.compile(r"(astuner\.[\w.]+) is required$")
_SUFFIXES = (".yaml", ".yml")
_SHOWN_PLACES = 5


def run_check(
    judge: str, labels: Labels, plan: Plan, *, config: Path | None, overrides: Sequence[str], base_url: str | None,
    model: str | None, api_key_env: str | None, answer_field: str, at_once: int, say: Say,
) -> Card:  # fmt: skip
    """Make the judge, and measure it.

    :raises ConfigError: there is no such judge, or its settings are wrong.
    :raises DataError: the labels are of a kind that it cannot be compared with.
    """
    given = section_of(config, base_url, model, api_key_env)
    rubrics = Path(judge) if is_rubric_file(judge) else None
    if rubrics is not None:
        load_rubrics(rubrics)  # what is wrong with it comes before what is wrong with the options
    experiment = _experiment(judge, config, given, overrides)
    reference = experiment.astuner.task_judge.judge
    assert reference is not None
    section = experiment.section("judge", reference)
    if isinstance(section, RubricsConfig) and rubrics is None:
        rubrics = experiment.base_dir / section.file
    notes: list[str] = []
    overlap = None
    if rubrics is not None:
        labels, overlap, notes = _held_out(rubrics, labels)
    scope = str(Path.cwd() / SCOPE)
    helpers = _WatchedHelpers(experiment.keys_of(HelperModelKeys).helper_models, scope=scope)
    context = BuildContext(config=experiment, helpers=helpers)
    made = Member.build(context, reference, None, where="astuner.task_judge.judge")
    under_test = JudgeUnderTest(
        made, answer_field=answer_field, at_once=at_once, timeout=experiment.astuner.task_judge.judge_timeout
    )
    say(f"about {plan_of(labels, plan, by_group=under_test.by_group)} questions to the judge")
    try:
        card = asyncio.run(check(under_test, labels, plan, name=judge, notes=notes, say=say))
        return replace(card, overlap=overlap)
    finally:
        made.close()


def is_rubric_file(judge: str) -> bool:
    """Whether JUDGE names a file rather than a judge."""
    return judge.endswith(_SUFFIXES) and "->" not in judge


def _held_out(file: Path, labels: Labels) -> tuple[Labels, Overlap | None, list[str]]:
    """The labels that the rubrics were not learned from, how many others there were, and what their file says.

    Where none is left, as all nearly repeat one and none is the same, all are, with a note: texts that are alike may
    still be others, and who has no others could measure nothing.

    :raises DataError: they were learned from all of them, or from some which the others nearly repeat, so agreement
        with them says nothing about others.
    """
    rubrics = load_rubrics(file)
    notes = [f"rubrics {rubrics.digest}"]
    if rubrics.learned is None:
        return labels, None, [*notes, "written by hand: no agreement was measured when they were learned"]
    if rubrics.is_edited:
        was = rubrics.learned.digest
        notes.append(f"edited since they were learned ({was}): the agreement in the file is not theirs")
    else:
        a = rubrics.learned.agreement
        notes.append(f"agreement when learned: {a.share:.0%} ({a.low:.0%} to {a.high:.0%}, {a.n} held-out examples)")
    kept, overlap = without_known(labels.samples, rubrics.learned.prints)
    if rubrics.learned.sha256 == labels.sha256 or (not kept and overlap.same):
        near, way_out = "", ""
        if overlap.near and not kept:
            places = places_of_same(labels.samples, rubrics.learned.prints)
            more = f" and {len(places) - _SHOWN_PLACES} more" if len(places) > _SHOWN_PLACES else ""
            near = f" (or from what {overlap.near} of them nearly repeat)"
            way_out = f"; without {', '.join(places[:_SHOWN_PLACES])}{more}, the others are measured, with a note"
        raise DataError(
            f"--labels {labels.name}: {file} was learned from these very labels{near}, and rubrics agree with what "
            "they were learned from; name labels that learning never saw (the file says how it agreed with those held "
            f"out){way_out}"
        )
    if not rubrics.learned.prints:
        notes.append("the file does not say which examples it was learned from: labels among them are not known again")
        return labels, None, notes
    if not kept:
        notes.append(
            f"all {overlap.near} labels nearly repeat one that the rubrics were learned from, and none was left out: "
            "agreement with labels that are less alike may be lower"
        )
        return labels, replace(overlap, near=0), notes
    if overlap.same or overlap.near:
        notes.append(
            f"{overlap.same + overlap.near} of {len(labels.samples)} labels were left out: the rubrics were learned "
            f"from {overlap.same} of them, and {overlap.near} nearly repeat one that they were learned from"
        )
    if overlap.same_question:
        notes.append(
            f"{overlap.same_question} labels have a question that the rubrics were learned from, with other answers"
        )
    return replace(labels, samples=kept), overlap, notes


def _experiment(judge: str, config: Path | None, given: HelperModel | None, overrides: Sequence[str]) -> Config:
    """The experiment of a file, or the least that a run needs, with the judge, and a helper model where it asks one.

    Without a file, code of the person's own is found in the current folder.

    :raises ConfigError: something is wrong or missing; no message names a file that the person did not write.
    """
    keys: dict[str, Any] = {"task_judge.judge": judge}
    if is_rubric_file(judge):
        keys = {"task_judge.judge": "rubrics", "task_judge.rubrics.file": str(Path(judge).resolve())}
    if given is not None:
        keys[f"helper_models.{ONE}"] = given.model_dump(exclude_defaults=True)
    with tempfile.TemporaryDirectory(prefix="astuner-judge-") as folder:
        path = config or Path(folder) / "experiment.yaml"
        if config is None:
            path.write_text("astuner: {model: {path: unused}, rollout: {num_repeat: 2}}", encoding="utf-8")
        found, problems = _read(path, keys, overrides)
        helpers = list(found.keys_of(HelperModelKeys).helper_models) if found is not None else []
        wanting = [m[1] for problem in problems if (m := _WANTS_HELPER.search(problem))]
        if wanting and len(helpers) == 1:
            keys |= {f"task_judge.{name}.helper_model": helpers[0] for name in wanting}
            found, problems = _read(path, keys, overrides)
        elif wanting and config is not None:
            there = f"there are {', '.join(helpers)}" if helpers else "astuner.helper_models is empty"
            raise ConfigError(
                f"{config}: which helper model grades? {there}; say it with "
                f"--set astuner.task_judge.{wanting[0]}.helper_model=NAME"
            )
        elif wanting:
            problems = [WHICH_MODEL, *(problem for problem in problems if not _WANTS_HELPER.search(problem))]
    if found is not None and not problems:
        return found
    if config is None:
        ours = re.compile(rf"^(?:{re.escape(str(path))}(?::\d+)*|command line): ")
        problems = [_with_option(ours.sub("", problem)) for problem in problems]
    raise ConfigError(problems)


def _read(path: Path, keys: Mapping[str, Any], overrides: Sequence[str]) -> tuple[Config | None, list[str]]:
    ours = [f"astuner.{key}={json.dumps(value, ensure_ascii=False)}" for key, value in keys.items()]
    return read_config(path, [*ours, *overrides])


def _with_option(problem: str) -> str:
    """What is required, with the option that gives it."""
    required = _REQUIRED.match(problem)
    if required and required[1] == "astuner.task_judge.rubrics.file":
        return f"{problem}; name the rubric file itself: astuner judge check FILE.yaml, or --config FILE"
    return f"{problem}; --set {required[1]}=VALUE, or --config FILE" if required else problem
