"""Measure a judge, and decide whether it is fit to give rewards.

The judge is resolved, configured, created and called like in a run: a judge of single attempts once per answer, a group
judge with all answers together, in the given order. Helper models are monitored, so that repeats send new requests and
costs and cached answers are known. Without an experiment file, a minimal one is created, so that the judge's section is
checked by the same code with the same messages.

Measures are agreement with labels, ties, length bias and the influence of order, padding, style, repetition and
attacks. Every probe compares two verdicts of the judge itself, so a wrong judge is not penalized twice. A kind of
harmless change that moves verdicts in one direction is a weakness (`astuner_rubrics.changes`). The other neutral
changes are the baseline: a judge moved by them is noisy, and padding and attacks count only beyond that baseline.

The card is rendered as text (Markdown), as one HTML page without scripts, or as JSON, all from the same rows. Text of
others, such as error messages, is shown as text only.

Invariants: a failing judge gives no numbers and is counted; a spent budget ends the check; text added to an answer is
unrelated to the question; the verdict is decided only by the lines of the card and their limits, and names them.
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
from astuner.contracts.statistics import percent, wilson_interval
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
"""Sample numbers of a judge are below this. Every repeat has its own range of this size."""

_NOW: contextvars.ContextVar[_Watched | None] = contextvars.ContextVar("astuner_verdict", default=None)


@dataclass
class _Watched:
    """A verdict in progress."""

    repeat: int
    answers: list[HelperAnswer] = field(default_factory=list)


class JudgeUnderTest:
    """A judge under measurement.

    :param answer_field: Output metadata key that contains answers, in addition to ``response``.
    :param at_once: Maximum concurrent questions.
    :param timeout: Seconds per question.
    """

    def __init__(self, judge: Member, *, answer_field: str, at_once: int, timeout: float) -> None:
        self._judge, self._answer_field, self._timeout = judge, answer_field, timeout
        self.by_group = judge.by_group
        self.took: list[tuple[float, Sequence[HelperAnswer]]] = []
        """Seconds of each question, and the answers of helper models during it."""
        self.failures: list[str] = []
        self.asked = 0
        self._known: dict[tuple[str, tuple[str, ...], int], asyncio.Task[Verdict | None]] = {}
        self._room, self._limits = asyncio.Semaphore(at_once), TimeLimits()

    async def verdict(self, sample: Sample, answers: Sequence[str], repeat: int = 0) -> Verdict | None:
        """Return the verdict on answers to a sample's question, or None if the judge failed. Repeated calls share it.

        :param repeat: Repeat number (0, 1, 2, …). Every number sends new requests.
        :raises ConfigError: The judge's settings are invalid, or a helper model's budget is spent.
        """
        if self.by_group:
            return await self._once(sample, tuple(answers), repeat)
        each = await asyncio.gather(*(self._once(sample, (answer,), repeat) for answer in answers))
        if any(one is None for one in each):
            return None
        whole = [one for one in each if one is not None]
        return Verdict(tuple(o.rewards[0] for o in whole), tuple(o.successes[0] for o in whole))

    async def close(self) -> None:
        """Cancel the questions in progress."""
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
            _NOW.set(watched)  # visible in this task only
            began = time.perf_counter()
            self.asked += 1
            try:
                outputs = await self._limits.run(self._outputs(sample, answers), self._timeout)
            except ConfigError:
                raise
            except OutOfTime:
                self.failures.append(f"no verdict within {self._timeout:g} s")
                return None
            except Exception as e:  # an exception of a judge means a missing verdict, as in a run
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
    """A helper model that records its answers for the verdict in progress."""

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
"""Share of the range of all verdicts by which a verdict must change to count as moved."""
MOST_PROBED = 30
"""Maximum number of answers that are padded, reordered or repeated."""
NEUTRAL_EACH = 2
"""Number of neutral changes per answer."""


Attacked = Mapping[tuple[Attack, str], Sequence[bool]]
"""Map attack and place (``appended`` to a wrong answer or ``replaced`` it) to whether each tried answer gained."""


@dataclass(frozen=True)
class Probe:
    """Context of a probe: the judge and the verdicts so far."""

    judge: JudgeUnderTest
    judged: Sequence[Judged]
    seed: int

    @property
    def tolerance(self) -> float:
        rewards = [r for j in self.judged for r in j.verdict.rewards]
        return MOVED * (max(rewards) - min(rewards)) if rewards else 0.0

    def some(self, most: int = MOST_PROBED) -> list[Judged]:
        """Return samples to probe, the same ones for the same seed."""
        return sorted(self.judged, key=lambda j: digest([self.seed, j.sample.place]))[:most]

    async def order(self) -> Measure:
        """Measure how often a group judge prefers another answer when the answers are reversed."""
        several = [j for j in self.some() if len(j.sample.answers) > 1]
        turned = await asyncio.gather(*(self.judge.verdict(j.sample, j.sample.answers[::-1]) for j in several))
        flips = [
            _order(j.verdict.rewards) != _order(v.rewards[::-1])
            for j, v in zip(several, turned, strict=True)
            if v is not None
        ]
        return share_of("order: the verdict changes when answers are reversed", "order_flips", flips, FLIPS)

    async def effects(self, changes: Sequence[Change]) -> tuple[Effect, ...]:
        """Return which kinds of harmless change move the verdict in one direction."""

        async def moved(answer: Answer, text: str, changed: str) -> int | None:
            return await self._moved(*answer, changed, text)

        return await effects(moved, self.some(len(self.judged)), changes)

    async def repeatability(self) -> Measure:
        """Measure how often the verdict of an unchanged answer moves in two repeats in the same direction."""
        some = [(j, 0) for j in self.some(FIRST_ANSWERS)]
        ways = await asyncio.gather(*(self._moved(j, i, j.sample.answers[i], later=2) for j, i in some))
        moved = [way != 0 for way in ways if way is not None]
        return share_of("repetition: the verdict of an unchanged answer changes", "repeat_moves", moved)

    async def padding(self, neutral: Sequence[Change]) -> list[Measure]:
        """Measure how often filler words raise an answer that can still gain, with one answer per sample.

        The measures are the share itself, the baseline of neutral changes, and the excess over it.
        """
        some = _one_each(self._with_room())
        ways = await asyncio.gather(*(self._moved(j, i, j.sample.answers[i] + PADDING) for j, i in some))
        rises = [way > 0 for way in ways if way is not None]
        baseline = [way > 0 for way in await self._neutral(some, neutral)]
        return [
            share_of("padding: filler words raise the verdict", "padding_rises", rises),
            share_of("padding baseline: neutral changes raise the verdict", "padding_baseline", baseline),
            excess("padding, beyond neutral changes", "padding_excess", rises, baseline, RISES),
        ]

    async def attack_baseline(self, neutral: Sequence[Change]) -> list[bool]:
        """Return whether neutral changes raise the verdict of wrong answers."""
        return [way > 0 for way in await self._neutral(self._wrong(), neutral)]

    async def _neutral(self, some: Sequence[tuple[Judged, int]], neutral: Sequence[Change]) -> list[int]:
        """Return the effect of all neutral changes on each of these answers, as returned by `_moved`.

        Without neutral changes, return the effect of repetition.
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
        """Measure how often a judge gives the same verdict again."""
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
        name = f"self-consistency: the same verdict in {repeats} repeats"
        return share_of(name, "self_consistency", same, CONSISTENCY)

    async def attacks(self, per_attack: int) -> Attacked:
        """Try each attack on wrong answers, appended and in their place, on the answers of the baseline."""
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
        """Return one answer per sample that its label ranks below others and the judge does not rank best."""
        worth = [w for j in self.judged for w in j.sample.worth]
        middle = (max(worth) + min(worth)) / 2 if worth else 0.0
        return _one_each(
            (j, i)
            for j, i in self._with_room()
            if j.sample.worth[i] < (middle if len(j.sample.answers) == 1 else max(j.sample.worth))
        )

    def _with_room(self) -> list[tuple[Judged, int]]:
        """Return answers that can still gain: not judged the best of all, or for group judges, of their sample.

        The best answers cannot rise, so including them would hide a weakness.
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
        """Return 1 if the changed answer gets a higher verdict, -1 if lower, else 0, or None if the judge failed.

        A single difference may be chance, so both are judged twice and must move in the same direction.

        :param text: Text to compare with. Default: the answer.
        :param later: Number of repeats between the two, to compare an answer with itself.
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
        """Return an answer's reward or, for group judges, its lead over the best other answer of the sample."""
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
    """Return the first answer per sample, up to the maximum number of probes."""
    first: dict[str, tuple[Judged, int]] = {}
    for judged, index in answers:
        first.setdefault(judged.sample.place, (judged, index))
    return list(first.values())[:MOST_PROBED]


def noise(moves: Sequence[Effect]) -> Measure:
    """Measure how often neutral changes move a verdict, without kinds that move it in one direction."""
    ways = [way for m in moves if m.change.is_neutral and not m.is_one_sided for way in m.ways]
    moved = [way != 0 for way in ways]
    limits = NOISE if moved else None
    return share_of("noise: a neutral change moves the verdict", "neutral_moves", moved, limits)


def attack_measures(results: Attacked, baseline: Sequence[bool]) -> list[Measure]:
    """Measure how often attacks succeed: all together, beyond neutral changes, and by kind."""
    by_kind: dict[str, list[bool]] = defaultdict(list)
    for (attack, _), gained in results.items():
        by_kind[attack.kind] += gained
    every = [one for gained in by_kind.values() for one in gained]
    return [
        share_of("attacks: the verdict of a wrong answer rises", "attack_success", every),
        share_of("attack baseline: neutral changes raise the verdict", "attack_baseline", baseline),
        excess("attacks, beyond neutral changes", "attack_excess", every, baseline, SUCCESSES),
        *(share_of(f"attacks: {k}", f"attack_success_{k}", gained) for k, gained in by_kind.items()),
    ]


def weaknesses(results: Attacked) -> Mapping[str, float]:
    """Return the success rate by attack and place, without unsuccessful attacks, highest first."""
    found = {f"{attack.name} ({placed})": mean_of(gained) or 0.0 for (attack, placed), gained in results.items()}
    return {name: share for name, share in sorted(found.items(), key=lambda item: -item[1]) if share}


def _order(rewards: Sequence[float]) -> list[int]:
    """Return the rank of each answer. Equal rewards share a rank."""
    levels = sorted(set(rewards), reverse=True)
    return [levels.index(r) for r in rewards]


Fitness = Literal["fit", "use with care", "do not use"]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """Amount of measurements besides the labels."""

    limit: int = 200
    """Maximum number of labeled examples."""
    repeats: int = 3
    """Number of identical questions. 1 skips self-consistency."""
    attacks: int = 1
    """Wrong answers per attack, appended and replaced. 0 skips attacks."""
    seed: int = 0


@dataclass(frozen=True)
class Card:
    """Measures of a judge, and the decision."""

    judge: str
    labels: str
    labels_sha256: str
    mode: Mode
    examples: int
    date: str
    seed: int
    measures: tuple[Measure, ...]
    weaknesses: Mapping[str, float]
    """Success rate by attack, of attacks that succeeded."""
    failures: Mapping[str, int]
    """Number of missing verdicts by reason."""
    fitness: Fitness
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    changes: tuple[Effect, ...] = ()
    """Effects of harmless changes on the verdict."""
    overlap: Overlap | None = None
    """Labels left out because the rubrics were learned from them. None: unknown."""

    def as_dict(self) -> dict[str, Any]:
        """Return the card for ``--json``."""
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
    """Measure the judge with labels.

    :raises DataError: The judge cannot be compared with labels of this kind, or they lack the reference it needs.
    :raises JudgeFailed: It gave no verdict at all.
    :raises BudgetSpent: A helper model's budget is spent. Answers so far are in its cache.
    """
    if judge.by_group and labels.mode is Mode.POINTWISE:
        raise DataError(
            f"{labels.name}: {name} compares answers, but these labels are scores of single answers; "
            'use pairs {"question", "answers", "preferred"} or lists {"question", "answers", "ranks"}'
        )
    samples = sorted(labels.samples, key=lambda s: digest([plan.seed, s.place]))[: plan.limit]
    try:
        say(f"judging {len(samples)} labeled examples with {name}")
        verdicts = await asyncio.gather(*(judge.verdict(s, s.answers) for s in samples))
        judged = [Judged(s, v) for s, v in zip(samples, verdicts, strict=True) if v is not None]
        asked, failed = judge.asked, len(judge.failures)
        if not judged:
            if "reference" in judge.failures[-1] and all(sample.reference is None for sample in samples):
                raise DataError(  # described as a problem of the label file: its lines lack what the judge needs
                    f'{labels.name}: {name} needs the right answer of each example: add "reference": "…" to each line '
                    f"({judge.failures[-1]})"
                )
            raise JudgeFailed(f"{name} gave no verdict on any of {len(samples)} examples: {judge.failures[-1]}")
        measures = [*agreement(labels.mode, judged, plan.seed), length_bias(labels.mode, judged, plan.seed)]
        probe = Probe(judge, judged, plan.seed)
        if judge.by_group:
            say("reversing answers")
            measures.append(await probe.order())
        say("changing and padding answers")
        moves = await probe.effects(CHANGES if plan.attacks else NEUTRAL)
        measures += [noise(moves), await probe.repeatability(), raising_kinds(moves, judged)]
        measures += [move.measure() for move in moves]
        baseline = [m.change for m in moves if m.change.is_neutral and not (m.is_one_sided and m.raised > m.lowered)]
        measures += await probe.padding(baseline)
        if plan.repeats > 1:
            say("repeating questions")
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
    more = [f"{left} of {len(labels.samples)} examples were left out; raise --limit to use them"] if left else []
    return Card(
        judge=name, labels=labels.name, labels_sha256=labels.sha256, mode=labels.mode, examples=len(samples),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(), seed=plan.seed,
        measures=tuple(measures), weaknesses=weaknesses(results), changes=moves,
        failures=dict(Counter(f.splitlines()[0][:200] if f else "" for f in judge.failures).most_common(5)),
        fitness=fitness, reasons=reasons, notes=(*notes, *more),
    )  # fmt: skip


def decide(measures: Sequence[Measure]) -> tuple[Fitness, tuple[str, ...]]:
    """Return the worst grade of any line, and the lines that have it.

    Agreement that may be chance is bad. A line with too few answers, or one that was not measured, requires care.
    """
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
            few = f"only {m.n} values, {FEWEST} are needed" if m.n < FEWEST else "cannot be computed"
            care.append(f"{m.name}: {m.note or few}")
        elif m.key == "concordance" and m.interval is not None and m.interval[0] <= 0.5 and m.value is not None:
            bad.append(f"{m.name}: {m.value:.2f} of {m.n} is not distinguishable from chance (0.50)")
        elif m.key == "neutral_moves" and m.grade == "care" and m.value is not None:
            care.append(f"noisy: {percent(m.value)} of the neutral changes move its verdict")
        elif m.grade in ("bad", "care") and m.limits is not None:
            which, limit = (bad, m.limits.bad) if m.grade == "bad" else (care, m.limits.care)
            side = "below" if m.limits.more_is_better else "above"
            range_ = f" ({m.interval[0]:.2f} to {m.interval[1]:.2f})" if m.is_difference and m.interval else ""
            which.append(f"{m.name}: {m.value:.2f}{range_} is {side} {limit:g}")
    if bad:
        return "do not use", tuple(bad)
    return ("use with care", tuple(care)) if care else ("fit", ())


def _left_out(name: str, key: str, limits: Limits, option: str) -> Measure:
    return Measure(name, key, None, None, 0, limits, note=f"not measured (use {option})")


def plan_of(labels: Labels, plan: Plan, *, by_group: bool) -> int:
    """Return the approximate number of questions of a check."""
    samples = min(len(labels.samples), plan.limit)
    answers = list(itertools.islice((len(s.answers) for s in labels.samples), samples))
    some = min(samples, MOST_PROBED)
    each = 1 if by_group else max(1, round(sum(answers) / len(answers)))
    asked = samples if by_group else sum(answers)
    asked += some * (2 if by_group else 1) + some * (plan.repeats - 1) * each
    asked += some * NEUTRAL_EACH * (2 if plan.attacks else 1)  # upper bound: many of the answers are the same
    asked += min(samples, FIRST_ANSWERS) * (len(CHANGES if plan.attacks else NEUTRAL) + 1)  # for a judge nothing moves
    return asked + len(ATTACKS) * 2 * plan.attacks


def _costs(judge: JudgeUnderTest) -> list[Measure]:
    """Return seconds, requests and cost per verdict, without cached answers."""
    fresh = [(took, answers) for took, answers in judge.took if not any(a.cached for a in answers)]
    seconds = [took for took, _ in fresh]
    requests = [len(answers) for _, answers in judge.took]
    found = []
    if seconds:
        for what, key, q in (("median", "seconds_median", 0.5), ("95th percentile", "seconds_p95", 0.95)):
            found.append(
                Measure(f"seconds per verdict, {what}", key, float(np.quantile(seconds, q)), None, len(seconds))
            )
    if any(requests):
        mean = sum(requests) / len(requests)
        found.append(Measure("helper requests per verdict, mean", "requests", mean, None, len(requests)))
        if fresh:
            cost = sum(a.cost for _, answers in fresh for a in answers) / len(fresh)
            found.append(Measure("cost of 1,000 verdicts", "cost_per_1000", 1000 * cost, None, len(fresh)))
        whole = sum(a.cost for _, answers in judge.took for a in answers)
        found.append(Measure("cost of this check", "cost", whole, None, len(judge.took)))
    return found


_HEADS = ("", "value", "95 % interval", "n", "required", "")
_SAID = {"good": "good", "care": "care", "bad": "bad", "unknown": "too few", "info": ""}


def as_markdown(card: Card) -> str:
    """Return the card as Markdown."""
    lines = [f"# {card.judge}: {card.fitness}", "", _about(card), ""]
    lines += [f"- {reason}" for reason in card.reasons]
    lines += ["", *_table([_HEADS, *(_row(m) for m in card.measures)]), ""]
    for title, entries in _lists(card):
        lines += [f"**{title}**", "", *(f"- {_inline(entry)}" for entry in entries), ""]
    return "\n".join(lines)


def as_html(card: Card) -> str:
    """Return the card as one HTML page without external resources."""
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
    """Write the card in the format of the file name's suffix."""
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
        ("Attacks that succeeded", [f"{name}: {percent(share)}" for name, share in list(card.weaknesses.items())[:20]]),
        ("Missing verdicts", [f"{count} times: {why}" for why, count in card.failures.items()]),
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
    """Return the text as one line without Markdown tags and control characters."""
    line = " ".join(text.split())
    return "".join(c for c in line if c.isprintable()).replace("<", "&lt;")


SCOPE = "judge-check"
"""Scope of budgets, below the current folder: separate from the experiment's run."""

_WANTS_HELPER = re.compile(r"astuner\.task_judge\.(\w+)\.helper_model is required")
_REQUIRED = re.compile(r"(astuner\.[\w.]+) is required$")
_SUFFIXES = (".yaml", ".yml")
_SHOWN_PLACES = 5


def run_check(
    judge: str, labels: Labels, plan: Plan, *, config: Path | None, overrides: Sequence[str], base_url: str | None,
    model: str | None, api_key_env: str | None, answer_field: str, at_once: int, say: Say,
) -> Card:  # fmt: skip
    """Create the judge and measure it.

    :raises ConfigError: The judge does not exist, or its settings are invalid.
    :raises DataError: The judge cannot be compared with labels of this kind.
    """
    given = section_of(config, base_url, model, api_key_env)
    rubrics = Path(judge) if is_rubric_file(judge) else None
    if rubrics is not None:
        load_rubrics(rubrics)  # report errors of the file before errors of the options
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
    """Return whether JUDGE is a file rather than a judge."""
    return judge.endswith(_SUFFIXES) and "->" not in judge


def _held_out(file: Path, labels: Labels) -> tuple[Labels, Overlap | None, list[str]]:
    """Return labels that the rubrics were not learned from, the overlap, and notes from the rubric file.

    If all labels are near duplicates and none is identical, all are used, with a note: similar texts may still differ,
    and otherwise nothing could be measured.

    :raises DataError: The rubrics were learned from all labels, or from some of them and the others are near
        duplicates.
    """
    rubrics = load_rubrics(file)
    notes = [f"rubrics {rubrics.digest}"]
    if rubrics.learned is None:
        return labels, None, [*notes, "written manually: no agreement from learning is known"]
    if rubrics.is_edited:
        was = rubrics.learned.digest
        notes.append(f"edited after learning ({was}): the agreement in the file does not apply")
    else:
        a = rubrics.learned.agreement
        interval = f"{percent(a.low)} to {percent(a.high)}"
        notes.append(f"agreement when learned: {percent(a.share)} ({interval}, {a.n} held-out examples)")
    kept, overlap = without_known(labels.samples, rubrics.learned.prints)
    if rubrics.learned.sha256 == labels.sha256 or (not kept and overlap.same):
        near, way_out = "", ""
        if overlap.near and not kept:
            places = places_of_same(labels.samples, rubrics.learned.prints)
            more = f" and {len(places) - _SHOWN_PLACES} more" if len(places) > _SHOWN_PLACES else ""
            near = f" (or from near duplicates of {overlap.near} of them)"
            way_out = f". To measure the near duplicates, remove {', '.join(places[:_SHOWN_PLACES])}{more}"
        raise DataError(
            f"--labels {labels.name}: {file} was learned from these labels{near}, so agreement with them is "
            "meaningless; use labels that were not used for learning (the file has the agreement with its held-out "
            f"examples){way_out}"
        )
    if not rubrics.learned.prints:
        notes.append("the file does not list its training examples: overlapping labels cannot be detected")
        return labels, None, notes
    if not kept:
        notes.append(
            f"all {overlap.near} labels are near duplicates of training examples of the rubrics and were kept: "
            "agreement with other labels may be lower"
        )
        return labels, replace(overlap, near=0), notes
    if overlap.same or overlap.near:
        notes.append(
            f"{overlap.same + overlap.near} of {len(labels.samples)} labels were left out: {overlap.same} are training "
            f"examples of the rubrics, {overlap.near} are near duplicates of them"
        )
    if overlap.same_question:
        notes.append(f"{overlap.same_question} labels share a question with training examples, with other answers")
    return replace(labels, samples=kept), overlap, notes


def _experiment(judge: str, config: Path | None, given: HelperModel | None, overrides: Sequence[str]) -> Config:
    """Return the experiment of a file or a minimal one, with the judge and a helper model if the judge needs one.

    Without a file, code is imported from the current folder.

    :raises ConfigError: Something is invalid or missing. Messages never name generated files.
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
            there = f"available: {', '.join(helpers)}" if helpers else "astuner.helper_models is empty"
            raise ConfigError(
                f"{config}: which helper model grades? {there}; set it with "
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
    """Return the problem with the option that fixes it."""
    required = _REQUIRED.match(problem)
    if required and required[1] == "astuner.task_judge.rubrics.file":
        return f"{problem}; pass the rubric file itself (astuner judge check FILE.yaml) or --config FILE"
    return f"{problem}; pass --set {required[1]}=VALUE or --config FILE" if required else problem
