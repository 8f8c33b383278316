"""The judge `relative`: rank the attempts at a task without labels and without an absolute scale.

Comparing is easier than grading, and the advantages of a group depend only on which attempt is better. (ART's RULER
made the idea popular; prompts and rewards here differ.) Identical attempts are shown once and get the same reward,
their common beginning is shown once, and every ranking shows them in another order.

A preference is how often one answer is ranked before another: 1, 0, or 1/2 for a tie, averaged over comparisons. An
attempt's reward is the mean of its preferences over the other attempts: the Borda count for full rankings, Copeland's
score (Copeland 1951) for pairs, both divided by their maximum. Rewards are in [0, 1], equal answers have equal rewards,
and the mean of a fully compared group is 1/2.

Invariant: the ranking of the helper model contains every attempt exactly once, or there is no verdict.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from astuner import JudgeOutput
from astuner.contracts.building import BuildContext
from astuner.contracts.errors import ConfigError, JudgeFailed
from astuner.contracts.judge import Attempt, GroupJudge
from astuner.contracts.types import Split
from astuner_helpers.members import Member, together
from astuner_rubrics.asking import (
    MOST_MESSAGES,
    NOTHING,
    AskingConfig,
    Message,
    answer_of,
    ask,
    conversation_of,
    labelled,
    limit_of,
    user_message,
)


@dataclass
class Preferences:
    """How often each of ``n`` different answers was ranked before each other answer."""

    n: int
    _found: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def add_ranking(self, ranking: Sequence[Sequence[int]]) -> None:
        """Add a ranking of all or some answers, best first. Answers in one entry tie."""
        place = {answer: rank for rank, tied in enumerate(ranking) for answer in tied}
        for a, b in itertools.combinations(sorted(place), 2):
            preference = 0.5 if place[a] == place[b] else float(place[a] < place[b])
            self._found.setdefault((a, b), []).append(preference)
            self._found.setdefault((b, a), []).append(1.0 - preference)

    def of(self, a: int, b: int) -> float | None:
        """Return the mean preference for ``a``, or None if the two were not compared."""
        found = self._found.get((a, b))
        return math.fsum(found) / len(found) if found else None

    @property
    def agreement(self) -> float | None:
        """Return how often repeated comparisons of a pair agree, or None if no pair was compared twice."""
        pairs = [(x, y) for f in self._compared() for x, y in itertools.combinations(f, 2)]
        return math.fsum(x == y for x, y in pairs) / len(pairs) if pairs else None

    @property
    def ties(self) -> float:
        """Return the share of comparisons that are ties."""
        everything = [x for found in self._compared() for x in found]
        return math.fsum(x == 0.5 for x in everything) / len(everything) if everything else 0.0

    def rewards(self, times: Sequence[int]) -> list[float]:
        """Return a reward for each answer.

        :param times: Number of attempts with each answer. They tie with each other.
        """
        return [self._reward(a, times) for a in range(self.n)]

    def _reward(self, a: int, times: Sequence[int]) -> float:
        won, out_of = 0.5 * (times[a] - 1), float(times[a] - 1)
        for b in range(self.n):
            if b != a and (preference := self.of(a, b)) is not None:
                won += times[b] * preference
                out_of += times[b]
        return won / out_of if out_of else 0.5

    def _compared(self) -> list[list[float]]:
        return [found for (a, b), found in self._found.items() if a < b]


def pairs_of(n: int, most: int | None) -> list[tuple[int, int]]:
    """Return the pairs of ``n`` answers to compare, with each answer in about as many pairs.

    Neighbors on a circle come first, then answers two steps apart, and so on. All neighbors are always included, so
    that the comparisons are connected.

    :param most: Maximum number of pairs. None: all.
    """
    rounds = [[(i, (i + step) % n) for i in range(n)] for step in range(1, n // 2 + 1)]
    unique = [list(dict.fromkeys((min(p), max(p)) for p in one)) for one in rounds]
    found: list[tuple[int, int]] = []
    for one in unique:
        if most is not None and found and len(found) + len(one) > most:
            break
        found += one
    return found


TASK = "You compare attempts at the same task, strictly and evenly, by the criteria below and by nothing else."
"""First sentence of the instructions, unless `system_prompt` replaces it."""
_REFERENCE = "REFERENCE is a reference answer that is right; an attempt may say the same in other words."
_CONVERSATION = "An attempt is a conversation: compare what the assistant did. ALL ATTEMPTS began alike."
_WHERE = "astuner.task_judge.relative"


class RelativeConfig(AskingConfig):
    """Options of the judge `relative`."""

    criteria: str = Field("An attempt is better the better it does what was asked.", min_length=1)
    """Description of what makes one attempt better than another, in plain words."""
    mode: Literal["listwise", "pairwise"] = "listwise"
    """Request a ranking of all attempts, or compare two at a time."""
    orders: int = Field(2, ge=1, le=24)
    """Listwise: number of rankings per group. Every second ranking shows the attempts in reverse order."""
    max_pairs: int | None = Field(None, ge=1)
    """Pairwise: approximate number of pairs per group. Each is compared in both orders. Default: all."""
    ties: bool = True
    """Allow attempts to be equally good."""
    alone: str | None = None
    """Name of the judge for single attempts and for validation, where a rank does not measure progress. Its options
    are in `astuner.task_judge.NAME`."""


@dataclass(frozen=True)
class _Shown:
    """Texts of a group to compare."""

    common: dict[str, str]
    """Common parts of all attempts, by label."""
    answers: tuple[tuple[Message, ...], ...]
    """Different answers."""
    answer_of: tuple[int, ...]
    """Index of the answer for each attempt."""


class RelativeJudge(GroupJudge):
    """Rank attempts.

    Metrics: ``asked``, ``distinct`` (different answers), ``ties`` (share of comparisons) and ``agreement`` (how often
    repeated comparisons of a pair agree).
    """

    def __init__(self, config: RelativeConfig, context: BuildContext) -> None:
        super().__init__(config)
        self._helper = context.helper_models.get(config.helper_model, where=f"{_WHERE}.helper_model")
        self._alone: Member | None = None
        if config.alone is not None:
            self._alone = Member.build(context, config.alone, None, where=f"{_WHERE}.alone")
        elif context.config.astuner.rollout.num_repeat == 1:
            raise ConfigError(
                "task_judge.judge: relative compares attempts at a task, but rollout.num_repeat is 1; set it to at "
                f"least 2, or set {_WHERE}.alone to a judge of single attempts"
            )
        self.system = config.system_message(TASK, conversation=_CONVERSATION, reference=_REFERENCE, form=self._shape())

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> RelativeJudge:
        return cls(section, context)

    @property
    def wants_evaluation(self) -> bool:  # type: ignore[override]  # depends on the other judge
        return self._alone is not None and self._alone.wants_evaluation

    async def judge_group(self, attempts: Sequence[Attempt]) -> list[JudgeOutput | JudgeFailed]:
        if self._alone is not None and (len(attempts) == 1 or attempts[0].workflow_task.split is Split.VALIDATION):
            return await self._alone.judge_group(attempts)
        failed: dict[int, JudgeFailed] = {}
        said: dict[int, tuple[Message, ...]] = {}
        for place, attempt in enumerate(attempts):
            try:
                said[place] = self._said(attempt)
            except JudgeFailed as e:
                failed[place] = e
        if len(said) < 2:
            why = JudgeFailed(
                f"{attempts[0].workflow_task.group_id}: a single attempt cannot be compared; set "
                f"{_WHERE}.alone to a judge of single attempts"
            )
            return [failed.get(place, why) for place in range(len(attempts))]
        shown = self._shown(attempts[0], list(said.values()))
        rewards, metrics = await self._rewards(shown)
        verdicts = {
            place: JudgeOutput(reward=rewards[answer], metrics=metrics)
            for place, answer in zip(said, shown.answer_of, strict=True)
        }
        return [failed[place] if place in failed else verdicts[place] for place in range(len(attempts))]

    async def _rewards(self, shown: _Shown) -> tuple[list[float], dict[str, float]]:
        """Return a reward for each different answer, and metrics."""
        n = len(shown.answers)
        preferences, orders = Preferences(n), self._orders(shown)
        said = await together([self._ask(shown, order, sample) for order, sample in orders])
        for ranking in said:
            preferences.add_ranking(ranking)
        metrics = {"asked": float(len(said)), "distinct": float(n), "ties": preferences.ties}
        if (agreement := preferences.agreement) is not None:
            metrics["agreement"] = agreement
        return preferences.rewards([shown.answer_of.count(answer) for answer in range(n)]), metrics

    def _orders(self, shown: _Shown) -> list[tuple[list[int], int]]:
        """Return the orders to show, each with its number of earlier uses. Deterministic for the same answers."""
        n = len(shown.answers)
        if n == 1:
            return []
        by_content = sorted(range(n), key=lambda i: _digest(shown, i))
        if self.config.mode == "pairwise":
            pairs = [(by_content[a], by_content[b]) for a, b in pairs_of(n, self.config.max_pairs)]
            return [(order, 0) for a, b in pairs for order in ([a, b], [b, a])]
        orders: list[tuple[list[int], int]] = []
        for number in range(self.config.orders):
            order = list(by_content)
            random.Random(number // 2).shuffle(order)
            order = order[::-1] if number % 2 else order
            orders.append((order, sum(known == order for known, _ in orders)))
        return orders

    async def _ask(self, shown: _Shown, order: Sequence[int], sample: int) -> list[list[int]]:
        """Return the ranking of the answers shown in this order."""
        names = letters(len(order))
        form = ranking_form(len(order), ties=self.config.ties, explain=self.config.explain)
        how = {"purpose": "relative", "temperature": self.config.temperature, "sample": sample}
        said = await ask(self._helper, self._messages(shown, order), form, **how)
        return [[order[names.index(name)] for name in tied] for tied in said.ranking]

    def _messages(self, shown: _Shown, order: Sequence[int]) -> list[dict[str, str]]:
        texts: dict[str, str] = {}
        for name, place in zip(letters(len(order)), order, strict=True):
            messages, label = shown.answers[place], f"attempt {name}"
            if self.config.show == "answer" or not messages:
                texts[label] = messages[0].text if messages else NOTHING
            else:
                texts |= labelled(messages, f"{label} message", most=max(8, 2 * MOST_MESSAGES // len(order)))
        question = f"Rank the attempts {', '.join(letters(len(order)))}, the best first."
        limit = limit_of(texts, self.config.max_chars)
        return [self.system, user_message({**shown.common, **texts}, question, limit=limit)]

    def _said(self, attempt: Attempt) -> tuple[Message, ...]:
        if self.config.show == "conversation":
            return conversation_of(attempt.turns)
        return (Message("", answer_of(attempt.output, self.config.answer_field)),)

    def _shown(self, first: Attempt, said: Sequence[tuple[Message, ...]]) -> _Shown:
        common = self.config.asked(first.workflow_task)
        shared = 0
        if self.config.show == "conversation":
            same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*said, strict=False))
            shared = len(list(same))
            common |= labelled(said[0][:shared], "all attempts message")
        answers = list(dict.fromkeys(messages[shared:] for messages in said))
        return _Shown(common, tuple(answers), tuple(answers.index(messages[shared:]) for messages in said))

    def _shape(self) -> str:
        reason = '"reason": "why, in at most 100 words", ' if self.config.explain else ""
        example, rule = '["B", "A"]', "Name every attempt exactly once, the best first."
        if self.config.ties:
            example, rule = '[["B"], ["A", "C"]]', f"{rule} Attempts that are equally good share one list."
        return f'Answer with one JSON object and nothing else: {{{reason}"ranking": {example}}}. {rule}'


@lru_cache(maxsize=256)
def ranking_form(n: int, *, ties: bool, explain: bool) -> type[BaseModel]:
    """Return the form of a complete ranking of ``n`` attempts: the reason first, then lists of ties."""

    def is_whole(ranking: Any) -> list[list[str]]:
        names = [name for entry in ranking for name in (entry if ties else [entry])]
        if sorted(names) != sorted(letters(n)):
            raise ValueError(f"each of {', '.join(letters(n))} must occur exactly once, not {', '.join(names)[:200]}")
        return [entry if ties else [entry] for entry in ranking if entry]

    of = list[list[str]] if ties else list[str]
    fields: dict[str, Any] = {"reason": (Annotated[str, Field(description="why, in at most 100 words")], ...)}
    fields = fields if explain else {}
    best = "every attempt once, the best first" + ("; equally good ones in one list" if ties else "")
    fields["ranking"] = (Annotated[of, Field(description=best), AfterValidator(is_whole)], ...)
    return create_model("Ranking", __config__=ConfigDict(extra="forbid"), **fields)


def letters(n: int) -> list[str]:
    """Return A, B, … Z, AA, AB, …: neutral names of attempts."""
    by_length = (itertools.product(string.ascii_uppercase, repeat=length) for length in itertools.count(1))
    return ["".join(name) for name in itertools.islice(itertools.chain.from_iterable(by_length), n)]


def _digest(shown: _Shown, answer: int) -> str:
    text = "\0".join([*shown.common.values(), *(f"{m.who}\0{m.text}" for m in shown.answers[answer])])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
