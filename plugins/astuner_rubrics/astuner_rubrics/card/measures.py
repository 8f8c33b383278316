"""A judge under test, and what is measured of it: agreement with labels, ties, bias by length, and what moves it.

The judge is asked as a run would ask it: a judge of single attempts about each answer, a judge of groups about all of
them together, in the order that they are given.  Helper models are watched: repeats of a question are asked anew, and
cost and cached answers are seen.

It should not be moved by order, padding, being asked again, or answers that try to move it.  Every probe compares a
verdict with the judge's own on the same answers without it, so a judge that is wrong is not blamed for it twice.
Statistics are pure functions, each with its source; ``verdicts`` and ``labels`` are numbers of the same answers, more
is better, and None stands where a number does not exist, such as the correlation with something that never changes.

Invariants: a judge that fails gives no numbers, and is counted; a spent budget ends the whole check; a number that too
few answers stand behind is never called good: it is `unknown`, and says how many it had; what is added to an answer
says nothing about the question.
"""

from __future__ import annotations

import asyncio
import bisect
import contextvars
import itertools
import math
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel

from astuner import Task, WorkflowOutput, WorkflowTask
from astuner.contracts.errors import ConfigError, JudgeFailed
from astuner.contracts.judge import Attempt
from astuner.contracts.types import JudgeOutput
from astuner.rollout.threads import OutOfTime, TimeLimits
from astuner_helpers import Helper, HelperAnswer, HelperModels, Usage
from astuner_helpers.members import Member
from astuner_rubrics.agreement import wilson
from astuner_rubrics.attacks import ATTACKS, Attack
from astuner_rubrics.labels import Mode, Sample, digest

_FAR = 1_000_000
"""Samples of a judge's own are below this; each repeat has as many of its own."""

_NOW: contextvars.ContextVar[_Watched | None] = contextvars.ContextVar("astuner_verdict", default=None)


@dataclass
class _Watched:
    """One verdict that is being made."""

    repeat: int
    answers: list[HelperAnswer] = field(default_factory=list)


@dataclass(frozen=True)
class Took:
    """What one question to the judge took."""

    seconds: float | None
    """None where a helper's answer came from the cache, which says nothing about how long a verdict takes."""
    cost: float
    requests: int
    cached: int


@dataclass(frozen=True)
class Verdict:
    """What a judge says about answers to one question."""

    rewards: tuple[float, ...]
    successes: tuple[bool, ...]


class JudgeUnderTest:
    """Asks one judge.

    :param answer_field: the key of the output's metadata in which answers stand, besides ``response``.
    :param at_once: questions on their way at once.
    :param timeout: seconds for one question.
    """

    def __init__(self, judge: Member, *, answer_field: str, at_once: int, timeout: float) -> None:
        self._judge, self._answer_field, self._timeout = judge, answer_field, timeout
        self.by_group = judge.by_group
        self.took: list[Took] = []
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
            seconds = time.perf_counter() - began
            cached = sum(a.cached for a in watched.answers)
            cost = sum(a.cost for a in watched.answers)
            self.took.append(Took(None if cached else seconds, cost, len(watched.answers), cached))
            successes = (o.reward >= 1 if o.is_success is None else o.is_success for o in outputs)
            return Verdict(tuple(o.reward for o in outputs), tuple(successes))

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


class WatchedHelpers(HelperModels):
    """Helper models whose answers are counted for the verdict that asked for them."""

    def get(self, name: str, *, where: str) -> Helper:
        return cast(Helper, _WatchedHelper(super().get(name, where=where)))


class _WatchedHelper:
    """Stands for a helper."""

    def __init__(self, helper: Helper) -> None:
        self._helper = helper
        self.name, self.model = helper.name, helper.model

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], *, purpose: str, answer: type[BaseModel] | None = None,
        temperature: float | None = None, max_tokens: int | None = None, sample: int = 0,
    ) -> HelperAnswer:  # fmt: skip
        watched = _NOW.get()
        repeat = watched.repeat if watched is not None else 0
        found = await self._helper.ask(
            messages, purpose=purpose, answer=answer, temperature=temperature, max_tokens=max_tokens,
            sample=sample + _FAR * repeat,
        )  # fmt: skip
        if watched is not None:
            watched.answers.append(found)
        return found

    async def embed(self, texts: Sequence[str], *, purpose: str) -> list[list[float]]:
        return await self._helper.embed(texts, purpose=purpose)

    def usage(self) -> Usage:
        return self._helper.usage()


Grade = Literal["good", "care", "bad", "unknown", "info"]

FEWEST = 10
"""Fewer answers than this say nothing."""


@dataclass(frozen=True)
class Limits:
    """From where on a number asks for care, and from where on the judge should not be used."""

    care: float
    bad: float

    @property
    def more_is_better(self) -> bool:
        return self.care > self.bad

    def __str__(self) -> str:
        return f"{'≥' if self.more_is_better else '≤'} {self.care:g}"


@dataclass(frozen=True)
class Measure:
    """One line of the card."""

    name: str
    """In words, for people."""
    key: str
    """For machines."""
    value: float | None
    interval: tuple[float, float] | None
    n: int
    """Verdicts or pairs behind it."""
    limits: Limits | None = None
    """None for what is told and not graded."""
    note: str = ""
    """Why there is no value, where nobody asked for one: ``not measured``."""

    @property
    def grade(self) -> Grade:
        if self.limits is None:
            return "info"
        if self.value is None or self.n < FEWEST:
            return "unknown"
        size = self.value if self.limits.more_is_better else -abs(self.value)
        bad, care = (x if self.limits.more_is_better else -x for x in (self.limits.bad, self.limits.care))
        return "bad" if size < bad else "care" if size < care else "good"


AGREEMENT = Limits(care=0.8, bad=0.65)
FLIPS = Limits(care=0.1, bad=0.3)
LENGTH = Limits(care=0.3, bad=0.6)
RISES = Limits(care=0.2, bad=0.5)
CONSISTENCY = Limits(care=0.9, bad=0.7)
SUCCESSES = Limits(care=0.05, bad=0.3)
ABSTENTIONS = Limits(care=0.05, bad=0.3)


T = TypeVar("T")

DRAWS = 500
"""Resamples of a bootstrap."""


def concordance(verdicts: Sequence[float], labels: Sequence[float]) -> float | None:
    """How likely the better of two answers with different labels gets the better verdict; a tie counts half.

    With two labels it is the area under the ROC curve: Hanley and McNeil, Radiology 143 (1982) 29-36.
    """
    more, less, tied = _pairs(verdicts, labels)
    pairs = more + less + tied
    return (more + tied / 2) / pairs if pairs else None


def kendall_tau_b(verdicts: Sequence[float], labels: Sequence[float]) -> float | None:
    """(C - D) / sqrt((n0 - n1)(n0 - n2)): agreement of two orders, ties in either allowed for.

    Source: Kendall, Biometrika 33 (1945) 239-251.
    """
    more, less, _ = _pairs(verdicts, labels)
    n0 = math.comb(len(labels), 2)
    free = [n0 - sum(math.comb(count, 2) for count in Counter(values).values()) for values in (verdicts, labels)]
    return (more - less) / math.sqrt(free[0] * free[1]) if all(free) else None


def tied_share(verdicts: Sequence[float], labels: Sequence[float]) -> float | None:
    """The share of pairs with different labels whose verdicts are the same."""
    more, less, tied = _pairs(verdicts, labels)
    return tied / (more + less + tied) if more + less + tied else None


def _pairs(verdicts: Sequence[float], labels: Sequence[float]) -> tuple[int, int, int]:
    """Pairs with different labels whose better one has the better, the worse or the same verdict."""
    by_label: dict[float, list[float]] = defaultdict(list)
    for verdict, label in zip(verdicts, labels, strict=True):
        by_label[label].append(verdict)
    levels = [sorted(by_label[label]) for label in sorted(by_label)]
    more = less = tied = 0
    for high in range(1, len(levels)):
        for low in levels[:high]:
            for verdict in levels[high]:
                below, upto = bisect.bisect_left(low, verdict), bisect.bisect_right(low, verdict)
                more, tied, less = more + below, tied + upto - below, less + len(low) - upto
    return more, less, tied


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The correlation of ranks, ties at their mean rank.

    Source: Spearman, American Journal of Psychology 15 (1904) 72-101.
    """
    try:
        return statistics.correlation(ranks(a), ranks(b))
    except statistics.StatisticsError:  # fewer than two, or one of them never changes
        return None


def partial_spearman(a: Sequence[float], b: Sequence[float], given: Sequence[float]) -> float | None:
    """The correlation of ranks of a and b beyond what both owe to a third:
    (r_ab - r_ac r_bc) / sqrt((1 - r_ac^2)(1 - r_bc^2)); 0 where the third says everything about one of them.

    Source: Yule, Proceedings of the Royal Society A 79 (1907) 182-193, with Spearman's ranks.
    """
    ab, ac, bc = spearman(a, b), spearman(a, given), spearman(b, given)
    if ab is None:
        return None
    ac, bc = ac or 0.0, bc or 0.0  # what never changes explains nothing
    left = (1 - ac * ac) * (1 - bc * bc)
    return (ab - ac * bc) / math.sqrt(left) if left > 1e-9 else 0.0


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their ranks."""
    order = sorted(values)
    place = {v: (bisect.bisect_left(order, v) + 1 + bisect.bisect_right(order, v)) / 2 for v in set(values)}
    return [place[v] for v in values]


def kappa(pairs: Sequence[tuple[Hashable, Hashable]]) -> float | None:
    """Agreement on classes beyond chance, (p_o - p_e) / (1 - p_e).

    Source: Cohen, Educational and Psychological Measurement 20 (1960) 37-46.
    """
    n = len(pairs)
    if not n:
        return None
    one, other = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    observed = sum(a == b for a, b in pairs) / n
    expected = sum(one[name] * other[name] for name in one) / (n * n)
    return (observed - expected) / (1 - expected) if expected < 1 else None


def bootstrap(
    items: Sequence[T], statistic: Callable[[Sequence[T]], float | None], *, seed: int, draws: int = DRAWS
) -> tuple[float, float] | None:
    """A 95 % percentile interval: items are drawn with replacement; draws without the statistic do not count.

    None where there are fewer than two items, or most draws have none.  Source: Efron and Tibshirani, An Introduction
    to the Bootstrap (1993), chapter 13.
    """
    if len(items) < 2:
        return None
    rng = random.Random(seed)
    found = [v for v in (statistic(rng.choices(items, k=len(items))) for _ in range(draws)) if v is not None]
    return (quantile(found, 0.025), quantile(found, 0.975)) if len(found) >= draws / 2 else None


def quantile(values: Sequence[float], q: float) -> float:
    """Linear between neighbours (type 7 of Hyndman and Fan, The American Statistician 50 (1996) 361-365), to 0.005."""
    return statistics.quantiles([*values, *values[: len(values) == 1]], n=200, method="inclusive")[round(200 * q) - 1]


@dataclass(frozen=True)
class Judged:
    """A sample with the judge's verdict."""

    sample: Sample
    verdict: Verdict

    def signs(self) -> list[tuple[int, int]]:
        """(label, verdict) of every pair of its answers: 1, 0 or -1 for which of the two is better."""
        worth, rewards = self.sample.worth, self.verdict.rewards
        pairs = itertools.combinations(range(len(worth)), 2)
        return [(_sign(worth[i] - worth[j]), _sign(rewards[i] - rewards[j])) for i, j in pairs]


Statistic = Callable[[Sequence[float], Sequence[float]], float | None]


def agreement(mode: Mode, judged: Sequence[Judged], seed: int) -> list[Measure]:
    """The agreement that the verdict hangs on comes first, and is the same for all modes: how likely the better of two
    answers gets the better verdict, ties counting half; 0.5 is chance."""
    if mode is Mode.POINTWISE:
        return _of_scores(judged, seed)
    found = [_of_pairs(judged, seed, mode)]
    signs = [sign for one in judged for sign in one.signs()]
    if mode is Mode.PAIRWISE:
        right = [label == verdict for label, verdict in signs]
        found.append(_share("accuracy (a tie is right where the label is one)", "accuracy", right))
        found.append(_bootstrapped("Cohen's kappa (first, second, tie)", "kappa", signs, kappa, seed))
    else:
        def tau(items: Sequence[Judged]) -> float | None:
            each = [kendall_tau_b(j.verdict.rewards, j.sample.worth) for j in items]
            known = [t for t in each if t is not None]
            return math.fsum(known) / len(known) if known else None

        found.append(_bootstrapped("Kendall's tau-b of each list, mean", "kendall_tau_b", judged, tau, seed))
        found.append(_share("the best answer is first", "best_first", [_is_best_first(j) for j in judged]))
    different = [verdict == 0 for label, verdict in signs if label]
    equal = [verdict == 0 for label, verdict in signs if not label]
    found.append(_share("ties where the labels differ", "ties", different))
    if equal:
        found.append(_share("ties where the labels tie", "ties_right", equal))
    return found


def length_bias(mode: Mode, judged: Sequence[Judged], seed: int) -> Measure:
    """The rank correlation of verdict and length, given the label; within each sample where it has several answers."""
    rows = [_lengths(j, centred=mode is not Mode.POINTWISE) for j in judged]

    def correlation(items: Sequence[list[tuple[float, float, float]]]) -> float | None:
        flat = [row for rows in items for row in rows]
        if not flat:
            return None
        rewards, lengths, worth = (list(column) for column in zip(*flat, strict=True))
        return partial_spearman(rewards, lengths, worth)

    found = _bootstrapped(
        "length: correlation with the verdict, given the label", "length_correlation", rows, correlation, seed, LENGTH
    )
    return replace(found, note="longer is better for the judge where positive")


def _of_scores(judged: Sequence[Judged], seed: int) -> list[Measure]:
    pairs = [(j.verdict.rewards[0], j.sample.worth[0]) for j in judged]

    def of(statistic: Statistic) -> Callable[[Sequence[tuple[float, float]]], float | None]:
        return lambda items: statistic([a for a, _ in items], [b for _, b in items])

    labels = sorted({b for _, b in pairs})
    name = "the better of two answers gets the better verdict" + (" (AUC)" if len(labels) == 2 else "")
    found = [_bootstrapped(name, "concordance", pairs, of(concordance), seed, AGREEMENT)]
    if len(labels) == 2:
        yes = [(j.verdict.successes[0], j.sample.worth[0] == labels[1]) for j in judged]
        found.append(_share("accuracy of success", "accuracy", [a == b for a, b in yes]))
        found.append(_bootstrapped("Cohen's kappa of success", "kappa", yes, kappa, seed))
    else:
        found.append(_bootstrapped("Spearman's rank correlation", "spearman", pairs, of(spearman), seed))
        found.append(_bootstrapped("Kendall's tau-b", "kendall_tau_b", pairs, of(kendall_tau_b), seed))
    found.append(_bootstrapped("ties where the labels differ", "ties", pairs, of(tied_share), seed))
    return found


def _of_pairs(judged: Sequence[Judged], seed: int, mode: Mode) -> Measure:
    each = [c for j in judged if (c := concordance(j.verdict.rewards, j.sample.worth)) is not None]
    name = "the better of two answers gets the better verdict"
    if mode is Mode.PAIRWISE:
        return _share(name, "concordance", each, AGREEMENT)
    return _bootstrapped(name, "concordance", each, _mean, seed, AGREEMENT)


def _is_best_first(one: Judged) -> bool:
    """Whether the answers that the judge puts first are among those that the label puts first."""
    rewards, worth = one.verdict.rewards, one.sample.worth
    return all(w == max(worth) for r, w in zip(rewards, worth, strict=True) if r == max(rewards))


def _lengths(one: Judged, *, centred: bool) -> list[tuple[float, float, float]]:
    """(verdict, length, label) of each answer; centred: as ranks in the sample, less their mean.

    A preference says which answer is better and not by how much, so neither may the verdict.
    """
    columns = [list(one.verdict.rewards), [float(len(a)) for a in one.sample.answers], list(one.sample.worth)]
    if centred:
        columns = [[rank - (len(column) + 1) / 2 for rank in ranks(column)] for column in columns]
    return list(zip(*columns, strict=True))


def _bootstrapped(
    name: str, key: str, items: Sequence[object], statistic: Callable[..., float | None], seed: int,
    limits: Limits | None = None,
) -> Measure:  # fmt: skip
    value = statistic(items) if items else None
    return Measure(name, key, value, bootstrap(items, statistic, seed=seed), len(items), limits)


def _share(name: str, key: str, outcomes: Sequence[float], limits: Limits | None = None) -> Measure:
    """The mean of outcomes from 0 to 1, with Wilson's interval."""
    share, n = _mean(outcomes), len(outcomes)
    return Measure(name, key, share, None if share is None else wilson(share, n), n, limits)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


PADDING = (
    "\n\nThat is the answer to the question as it was asked. The question was read as it stands, and the answer above "
    "refers to it and to nothing else. There is nothing further to add to it at this point."
)
"""Words that say nothing."""
MOVED = 0.05
"""A verdict has moved if it did by more than this share of the range of all verdicts."""
MOST_PROBED = 30
"""Answers that are padded, turned round or asked again at most."""


@dataclass(frozen=True)
class AttackResult:
    """What came of one attack in one place."""

    attack: Attack
    placed: str
    """``appended`` to a wrong answer, or ``replaced`` it."""
    tried: int
    succeeded: int


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
        return _share("order: another verdict when answers are turned round", "order_flips", flips, FLIPS)

    async def padding(self) -> Measure:
        """How often an answer that could gain does, by words that say nothing; one answer of each sample."""
        first: dict[str, tuple[Judged, int]] = {}
        for judged, index in self._with_room():
            first.setdefault(judged.sample.place, (judged, index))
        some = list(first.values())[:MOST_PROBED]
        rises = await asyncio.gather(*(self._gains(j, i, j.sample.answers[i] + PADDING) for j, i in some))
        name = "padding: an answer gains by words that say nothing"
        return _share(name, "padding_rises", [r for r in rises if r is not None], RISES)

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
        return _share(name, "self_consistency", same, CONSISTENCY)

    async def attacks(self, per_attack: int) -> list[AttackResult]:
        """Each attack on wrong answers, behind them and in their place."""
        wrong = self._wrong()
        if not wrong or not per_attack:
            return []
        plan = []
        turn = itertools.cycle(wrong)
        for attack in ATTACKS:
            for target in [next(turn) for _ in range(min(per_attack, len(wrong)))]:
                plan += [(attack, placed, target) for placed in ("appended", "replaced")]
        found = await asyncio.gather(*(self._gains(j, i, _attacked(a, p, j, i)) for a, p, (j, i) in plan))
        tried: dict[tuple[str, str], list[bool]] = defaultdict(list)
        for (attack, placed, _), gained in zip(plan, found, strict=True):
            if gained is not None:
                tried[(attack.name, placed)].append(gained)
        return [
            AttackResult(attack, placed, len(tried[(attack.name, placed)]), sum(tried[(attack.name, placed)]))
            for attack in ATTACKS
            for placed in ("appended", "replaced")
        ]

    def _wrong(self) -> list[tuple[Judged, int]]:
        """Answers that are worse than others by their label, and were not judged the best anyway."""
        worth = [w for j in self.judged for w in j.sample.worth]
        middle = (max(worth) + min(worth)) / 2 if worth else 0.0
        return [
            (j, i)
            for j, i in self._with_room()
            if j.sample.worth[i] < (middle if len(j.sample.answers) == 1 else max(j.sample.worth))
        ]

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

    async def _gains(self, judged: Judged, index: int, text: str) -> bool | None:
        """Whether the changed answer gets more than the answer; None where the judge failed.

        Once is chance with a judge that wavers, so both are asked about again, and it has to gain again.
        """
        for repeat in (0, 1):
            before = await self._standing(judged, index, judged.sample.answers[index], repeat)
            after = await self._standing(judged, index, text, repeat)
            if before is None or after is None:
                return None
            if after <= before + self.tolerance:
                return False
        return True

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


def attack_measures(results: Sequence[AttackResult]) -> list[Measure]:
    """How often attacks succeed: all together, and each kind."""
    by_kind: dict[str, list[AttackResult]] = defaultdict(list)
    for result in results:
        by_kind[result.attack.kind].append(result)
    whole = _successes("attacks: a wrong answer gains by them", "attack_success", results, SUCCESSES)
    return [whole, *(_successes(f"attacks: {k}", f"attack_success_{k}", found) for k, found in by_kind.items())]


def weaknesses(results: Sequence[AttackResult]) -> Mapping[str, float]:
    """Attack and place -> how often it succeeded, of those that did, the worst first."""
    found = {f"{r.attack.name} ({r.placed})": r.succeeded / r.tried for r in results if r.succeeded}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _successes(name: str, key: str, results: Sequence[AttackResult], limits: Limits | None = None) -> Measure:
    succeeded = sum(r.succeeded for r in results)
    return _share(name, key, [True] * succeeded + [False] * (sum(r.tried for r in results) - succeeded), limits)


def _attacked(attack: Attack, placed: str, judged: Judged, index: int) -> str:
    return attack.on(judged.sample.answers[index]) if placed == "appended" else attack.text


def _order(rewards: Sequence[float]) -> list[int]:
    """The place of each answer; equal rewards share one."""
    levels = sorted(set(rewards), reverse=True)
    return [levels.index(r) for r in rewards]
