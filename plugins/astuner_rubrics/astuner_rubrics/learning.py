"""Learn a rubric file from labeled examples.

    examples ─split▶ train ─propose, grade, validate, revise▶ candidates ─grade all▶ select ─(themes)▶ rubrics
                └──▶ held out ──────────────────────────────────────────────────────────measure──▶ agreement

Unsuitable examples are rejected before any request. Learning is deterministic given the helper model's answers, so
these are its complete state: after a stop it asks the same questions in the same order, and answers in the journal are
not requested again. Another helper model, or other request options, start from scratch.

The proposing request contains the label, the grading request does not. Criteria that only repeat the label (the second
answer is better) fail, because grading shows the answers in another order. Optionally, criteria are merged into a few
themes with tips: the helper model assigns each criterion to exactly one theme, and weights and origins add up, so
nothing that was learned is lost. The algorithm follows "Auto-Rubric: Learning to Extract Generalizable Criteria for
Reward Modeling" (arXiv 2510.17314).

Invariants: a question is on one side of the split only, unless there are too few questions; held-out examples are first
used when the rubrics are final; answers are written to the journal before they are used; a rubric file is written
completely at the end or not at all, and the journal is kept, so nothing is paid twice; user files (examples,
experiment, edited rubrics) are overwritten only on request; nothing keeps running when a function ends.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from astuner import append_jsonl, read_jsonl
from astuner.contracts.errors import AstunerError, ConfigError, DataError
from astuner.contracts.statistics import percent
from astuner_helpers import BudgetSpent, Helper, HelperFailed, HelperModels
from astuner_helpers.members import all_answered
from astuner_rubrics import grading
from astuner_rubrics.agreement import Agreement, Rule, agreement, chance, fewest
from astuner_rubrics.fence import fences, prompt
from astuner_rubrics.grading import AT_ONCE, Ask, Grader, Matrix, Messages, median_of, overall, shown_order
from astuner_rubrics.labels import Labels, Mode, Sample, digest, plain, print_of
from astuner_rubrics.models import choose
from astuner_rubrics.rubric_file import Learned, Rubric, RubricFile, load_rubrics, save_rubrics
from astuner_rubrics.selection import (
    PATIENCE,
    Gram,
    coding_rate,
    gram,
    gram_of_words,
    most_diverse,
    right,
    select,
    verdicts,
)

PROPOSE_PROMPT = "propose-1"
MAX_LENGTH = 500
"""Maximum characters of a criterion."""


class ProposedCriterion(BaseModel):
    """One criterion, and how much it counts."""

    criterion: str
    weight: float = Field(ge=1, le=5)

    @field_validator("criterion")
    @classmethod
    def _is_a_sentence(cls, text: str) -> str:
        if not plain(text) or len(text) > MAX_LENGTH:
            raise ValueError(f"a criterion must be one sentence of at most {MAX_LENGTH} characters, not {text[:40]!r}")
        return plain(text)


class Proposed(BaseModel):
    """What the helper proposes."""

    criteria: list[ProposedCriterion] = Field(min_length=1)


Found = tuple[Sample, tuple[str, ...]]
"""An example and the weighted criteria that give it its label, or none."""


async def find_criteria(grader: Grader, rule: Rule, sample: Sample, settings: Settings) -> Found:
    """Propose, grade, validate and revise until the criteria give the example its label.

    :raises HelperFailed: The helper model gave no usable answer.
    :raises BudgetSpent: The budget does not allow another request.
    """
    order, proposals = shown_order(sample.question, sample.answers, 0), settings.proposals
    messages = _messages(sample, order, rule, proposals)
    for epoch in range(settings.max_epochs + 1):
        said = await grader.ask(messages, purpose="learn.propose", answer=Proposed, sample=epoch)
        weights = {one.criterion: one.weight for one in said.criteria[:proposals]}
        criteria = tuple(weights)
        grades = await grader.grade(sample.question, sample.answers, criteria, purpose="learn.validate", vote=1)
        verdict = overall(grades, list(weights.values()))
        if rule.is_right(sample.worth, verdict):
            return sample, criteria
        messages = _messages(sample, order, rule, proposals, criteria, verdict)
    return sample, ()


def _messages(
    sample: Sample, order: Sequence[int], rule: Rule, proposals: int, criteria: Sequence[str] = (),
    verdict: Sequence[float] = (),
) -> Messages:  # fmt: skip
    """Return the question; in a revision with the criteria so far, their verdict and the expected one."""
    if rule.mode is Mode.POINTWISE:
        scale = f"on a scale from {rule.low:g} (worst) to {rule.high:g} (best)"
        label, got = f"ANSWER 1 gets {sample.worth[0]:g} {scale}.", "".join(f"ANSWER 1 {v:.3g}." for v in verdict)
    else:
        label = f"{_in_order([sample.worth[i] for i in order], 0.0)}."
        got = f"{_in_order([verdict[i] for i in order], rule.near)}." if criteria else ""
    texts = {"question": sample.question}
    texts |= {f"answer {n}": sample.answers[i] for n, i in enumerate(order, start=1)}
    wanted = "one criterion" if proposals == 1 else f"at most {proposals} criteria"
    asked = f"Name {wanted} that explain it."
    if criteria:
        texts["criteria so far"] = "\n".join(f"{n}. {text}" for n, text in enumerate(criteria, start=1))
        asked = (
            f"Judged by the criteria so far alone, the answers got: {got}\n"
            f"That is not their verdict. Name {wanted} that explain it, better than those so far."
        )
    content = f"{fences(texts)}\n\nTheir verdict: {label}\n{asked}"
    return [{"role": "system", "content": prompt("propose")}, {"role": "user", "content": content}]


def _in_order(numbers: Sequence[float], tie: float) -> str:
    """Return the order as text, best first, such as ``ANSWER 2 is better than ANSWER 1``."""
    places = sorted(range(len(numbers)), key=lambda i: -numbers[i])
    text = f"ANSWER {places[0] + 1}"
    for before, place in itertools.pairwise(places):
        same = numbers[before] - numbers[place] <= tie
        text += f" {'is as good as' if same else 'is better than'} ANSWER {place + 1}"
        text += ", which" if place != places[-1] else ""
    return text


THEMES_PROMPT = "themes-1"


# No docstrings: they would be in the schemas that models read.
class Theme(BaseModel):  # noqa: D101
    theme: str
    tips: list[str]
    criteria: list[int]


class Themes(BaseModel):  # noqa: D101
    themes: list[Theme]


async def merge_into_themes(ask: Ask, rubrics: tuple[Rubric, ...], most: int) -> tuple[Rubric, ...]:
    """Return the rubrics as at most ``most`` themes. Few enough rubrics are returned unchanged.

    :raises HelperFailed: The helper model gave no usable answer.
    :raises BudgetSpent: The budget does not allow another request.
    """
    if len(rubrics) <= most:
        return rubrics
    numbered = "\n".join(f"{n}. {r.text}" for n, r in enumerate(rubrics, start=1))
    content = f"{fences({'criteria': numbered})}\n\nSort them into at most {most} themes."
    messages = [{"role": "system", "content": prompt("themes")}, {"role": "user", "content": content}]
    said = await ask(messages, purpose="learn.themes", answer=_themes_form(len(rubrics), most), sample=0)
    merged = []
    for theme in said.themes:
        parts = [rubrics[n - 1] for n in theme.criteria]
        merged.append(
            Rubric(
                criterion=theme.theme,
                tips=tuple(theme.tips),
                weight=sum(r.weight for r in parts),
                samples=tuple(dict.fromkeys(place for r in parts for place in r.samples)),
            )
        )
    return tuple(merged)


@functools.lru_cache(maxsize=64)
def _themes_form(criteria: int, most: int) -> type[Themes]:
    class Complete(Themes):
        @model_validator(mode="after")
        def _has_all(self) -> Complete:
            numbers = sorted(n for theme in self.themes for n in theme.criteria)
            if numbers != list(range(1, criteria + 1)):
                raise ValueError(f"each of the criteria 1 to {criteria} must be in one theme, not {numbers[:20]}")
            if len(self.themes) > most:
                raise ValueError(f"at most {most} themes, not {len(self.themes)}")
            if not all(theme.theme.strip() and theme.criteria for theme in self.themes):
                raise ValueError("a theme needs a sentence and at least one criterion")
            return self

    Complete.__name__ = "Themes"
    return Complete


T = TypeVar("T")
R = TypeVar("R")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """Settings of learning."""

    proposals: int = 3
    """Maximum number of criteria proposed per example."""
    max_epochs: int = 3
    """Maximum number of revisions of criteria that do not give an example its label."""
    max_rubrics: int = 10
    """Maximum number of criteria in the file."""
    themes: int = 0
    """Merge the criteria into at most this many themes with tips. 0: do not merge."""
    held_out: float = 0.3
    """Share of the examples that are not used for learning."""
    votes: int = 1
    """Number of requests per verdict."""
    scale: tuple[float, float] | None = None
    """Worst and best grade. None: range of the labels, or 0 to 10 for compared answers."""
    seed: int = 0
    """Seed of the split."""
    force: bool = False
    """Write the file despite objections, which are recorded in the file."""


FEWEST_TO_LEARN = 5
_SHOWN = 10
_TOKENS = ("prompt_tokens", "completion_tokens")
_FEWEST_QUESTIONS = 4
COMPARED = (0.0, 10.0)
"""Default scale of grades for labels without scores."""


class NotLearned(AstunerError):
    """No rubrics were learned. The message has reasons and solutions; only the journal was written."""


def rule_of(labels: Labels, settings: Settings) -> Rule:
    """Return the scale of the grades and when they agree with these labels.

    :raises NotLearned: All labels are the same, so no answer is better than another.
    """
    if labels.mode is Mode.POINTWISE:
        worth = [w for sample in labels.samples for w in sample.worth]
        low, high = min(worth), max(worth)
        if low == high:
            raise NotLearned(
                f"{labels.name}: all {len(labels.samples)} labels are the same ({low:g}), so every rubric fits; add "
                "examples of better or worse answers"
            )
        return Rule.of(labels.mode, labels.samples, settings.scale or (low, high))
    if all(len(set(sample.worth)) == 1 for sample in labels.samples):
        raise NotLearned(
            f"{labels.name}: all {len(labels.samples)} labels are ties, so every rubric fits; add examples with one "
            "better answer"
        )
    return Rule.of(labels.mode, labels.samples, settings.scale or COMPARED)


def objections(labels: Labels, rule: Rule, settings: Settings) -> list[str]:
    """Return objections to learning from these examples."""
    samples = labels.samples
    found = []
    at_least = fewest(chance(rule, samples))
    needed = max(math.ceil(at_least / settings.held_out), at_least + FEWEST_TO_LEARN)
    if len(samples) < needed:
        found.append(
            f"{labels.name}: {len(samples)} examples are not enough, add {needed - len(samples)} more: {at_least} must "
            f"be held out to distinguish even perfect agreement from chance ({percent(chance(rule, samples))}), with "
            f"--held-out {settings.held_out:g}"
        )
    opposite = contradictions(samples, rule)
    if opposite:
        pairs = ", ".join(f"{a} and {b}" for a, b in opposite[:_SHOWN])
        more = f" and {len(opposite) - _SHOWN} more" if len(opposite) > _SHOWN else ""
        found.append(
            f"{labels.name}: labels contradict each other: {pairs}{more} judge the same question and answers in "
            "opposite ways; keep one of each"
        )
    return found


def contradictions(samples: Sequence[Sample], rule: Rule) -> list[tuple[str, str]]:
    """Return places of examples with the same question and answers and opposite labels.

    Scores are opposite if they differ by at least half the scale. A tie and a preference are not opposite.
    """
    return [
        (a.place, b.place)
        for group in _groups(samples, lambda s: s.key).values()
        for a, b in itertools.combinations(group, 2)
        if _opposite(a.by_answer(), b.by_answer(), rule)
    ]


def _opposite(a: dict[str, float], b: dict[str, float], rule: Rule) -> bool:
    if rule.mode is Mode.POINTWISE:
        return any(abs(a[text] - b[text]) >= (rule.high - rule.low) / 2 for text in a)
    pairs = itertools.combinations(a, 2)
    return any((a[one] - a[other]) * (b[one] - b[other]) < 0 for one, other in pairs)


def split(samples: Sequence[Sample], share: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Hold out about ``share`` of the examples, by complete questions. Deterministic for a seed.

    :returns: Training examples and held-out examples.
    :raises NotLearned: There are fewer than three examples.
    """
    if len(samples) < 3:
        raise NotLearned(f"{len(samples)} examples cannot be split into training and held-out examples; add more")
    groups = _groups(samples, lambda s: plain(s.question).casefold())
    if len(groups) < _FEWEST_QUESTIONS:
        groups = _groups(samples, lambda s: s.key)
    wanted = max(1, round(share * len(samples)))
    order = sorted(groups, key=lambda name: digest([seed, name]))
    held: set[str] = set()
    for name in order:
        have = sum(len(groups[n]) for n in held)
        if have < wanted and have + len(groups[name]) <= max(1, min(1.5 * wanted, len(samples) - 1)):
            held.add(name)
    if not held:
        held.add(min(order, key=lambda name: len(groups[name])))
    inside = {s.place for name in held for s in groups[name]}
    train = [s for s in samples if s.place not in inside]
    if not train:
        raise NotLearned("all examples have the same question and answers, so none can be held out; add others")
    return train, [s for s in samples if s.place in inside]


def _groups(samples: Sequence[Sample], name: Callable[[Sample], str]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        found[name(sample)].append(sample)
    return found


class Journal:
    """A helper model with a journal of its answers, one file per rubric file.

    :raises DataError: The existing file is not a journal.
    """

    def __init__(self, path: Path, helper: Helper) -> None:
        self.path = path
        self.spent: dict[str, float] = dict.fromkeys(("asked", "remembered", "cost", *_TOKENS), 0)
        """Answers of the helper model (including its own cache) and of the journal, in this run of the command."""
        self._helper = helper
        self._identity = helper.identity
        self._answers = _read_journal(path)

    @property
    def model(self) -> str:
        return self._helper.model

    async def ask(self, messages: Messages, *, purpose: str, answer: type[BaseModel], sample: int) -> Any:
        """Return the answer from the journal or the helper model. Raises the same errors as `Helper.ask`."""
        key = digest([self._identity, messages, answer.__name__, sample])
        if key in self._answers:
            try:
                found = answer.model_validate(self._answers[key])
            except ValidationError:
                pass  # written in an older form; request it again
            else:
                self.spent["remembered"] += 1
                return found
        said = await self._helper.ask(messages, purpose=purpose, answer=answer, sample=sample)
        data = said.data.model_dump(mode="json")
        append_jsonl(self.path, {"key": key, "purpose": purpose, "answer": data, "cost": said.cost})
        self._answers[key] = data
        self.spent["asked"] += 1
        for what in ("cost", *_TOKENS):
            self.spent[what] += getattr(said, what)
        return said.data

    async def embed(self, texts: list[str]) -> list[list[float]]:
        """Return vectors of texts, from the journal if available. Raises the same errors as `Helper.embed`."""
        keys = [digest([self._identity, "embedding", text]) for text in texts]
        missing = [i for i, key in enumerate(keys) if key not in self._answers]
        if missing:
            vectors = await self._helper.embed([texts[i] for i in missing], purpose="learn.embed")
            for i, vector in zip(missing, vectors, strict=True):
                append_jsonl(self.path, {"key": keys[i], "purpose": "learn.embed", "answer": vector})
                self._answers[keys[i]] = vector
        return [list(map(float, self._answers[key])) for key in keys]


def _read_journal(path: Path) -> dict[str, Any]:
    """Return answers by key. A last line that a crash truncated is removed from the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        if not {"key", "answer"} <= row.keys():
            raise DataError(f"{path}:{number}: this is not a learning journal; delete the file to start from scratch")
        found[row["key"]] = row["answer"]
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    return found


_REPORTS = 4


async def for_each(
    items: Sequence[T], work: Callable[[T], Coroutine[Any, Any, R]], *, what: str, say: Callable[[str], None]
) -> list[R | None]:
    """Return the result for each item, or None if the helper model failed for it.

    :param what: Name of the work in progress lines, such as ``proposing criteria``.
    :raises HelperFailed: It failed for more than a tenth of the items (at least two), or for three in a row.
    """
    every, count = max(1, len(items) // _REPORTS), len(items)

    def stopped(last: HelperFailed, answered: int, failed: int) -> str:
        done = f"stopped after {answered} of {count} answers and {failed} failures"
        return f"{what}: the helper model cannot be used ({last}); {done}"

    def settled(answered: int, failed: int) -> None:
        if (asked := answered + failed) % every == 0 or asked == count:
            say(f"{what}: {asked} of {count}" + (f", {failed} failed" if failed else ""))

    found = await all_answered([work(item) for item in items], stopped, fewest=min(2, count), settled=settled)
    return [None if isinstance(one, HelperFailed) else one for one in found]


_PROMPT_TOKENS = 700
"""Approximate tokens of the instructions."""
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class Estimate:
    """Requests and tokens of learning."""

    mode: str
    train: int
    held_out: int
    fewest_requests: int
    """If every first proposal is right and all examples agree on ten criteria."""
    most_requests: int
    prompt_tokens_per_request: int
    objections: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.train} {self.mode} training examples, {self.held_out} held out",
            f"{self.fewest_requests:,} to {self.most_requests:,} requests of about "
            f"{self.prompt_tokens_per_request:,} prompt tokens: "
            f"{self.fewest_requests * self.prompt_tokens_per_request:,} to "
            f"{self.most_requests * self.prompt_tokens_per_request:,} prompt tokens",
        ]
        return "\n".join([*lines, *(f"learning would be refused: {text}" for text in self.objections)])


def check_and_estimate(labels: Labels, settings: Settings) -> Estimate:
    """Return an estimate of the work.

    :raises NotLearned: Nothing can be learned from the examples.
    """
    rule = rule_of(labels, settings)
    train, held_out = map(len, split(labels.samples, settings.held_out, settings.seed))
    proposed = min(train * settings.proposals, CANDIDATES_PER_RUBRIC * settings.max_rubrics)
    measuring = held_out * math.ceil(settings.max_rubrics / AT_ONCE) * settings.votes
    themes = (1 + train * settings.votes) if settings.themes else 0
    fewest = train * 2 + train * settings.votes + held_out * settings.votes + themes
    most = train * 2 * (settings.max_epochs + 1) + train * math.ceil(proposed / AT_ONCE) * settings.votes
    characters = sum(len(s.question) + sum(map(len, s.answers)) for s in labels.samples) / len(labels.samples)
    return Estimate(
        mode=labels.mode.value,
        train=train,
        held_out=held_out,
        fewest_requests=fewest,
        most_requests=most + measuring + themes,
        prompt_tokens_per_request=_PROMPT_TOKENS + round(characters / _CHARACTERS_PER_TOKEN),
        objections=tuple(objections(labels, rule, settings)),
    )


CANDIDATES_PER_RUBRIC = 4
"""If there are more candidates than this per rubric, only the most diverse ones are kept."""


Origins = Mapping[str, tuple[Sample, ...]]
"""Validated criteria with the examples that they come from."""


@dataclass(frozen=True)
class Conflict:
    """Two examples whose criteria judge each other wrongly."""

    places: tuple[str, str]
    criteria: tuple[str, str]

    def __str__(self) -> str:
        (a, b), (one, other) = self.places, self.criteria
        return f"{a} ({one!r}) and {b} ({other!r})"


@dataclass(frozen=True)
class Result:
    """Result of learning."""

    rubrics: RubricFile
    objections: tuple[str, ...]
    """Reasons not to use the rubrics. Empty if there are none."""
    conflicts: tuple[Conflict, ...]
    train: Agreement
    held_out: Agreement
    explained: int
    """Number of training examples with criteria that give them their label."""
    candidates: int


async def learn(labels: Labels, settings: Settings, helper: Journal, embedder: Journal | None, say: Say) -> Result:
    """Learn rubrics.

    :param embedder: Helper model for embeddings. None: use words.
    :raises NotLearned: The examples are unsuitable, or no criterion explains any of them.
    :raises HelperFailed: The helper model fails repeatedly.
    :raises BudgetSpent: The budget does not allow another request.
    """
    rule = rule_of(labels, settings)
    against = objections(labels, rule, settings)
    if against and not settings.force:
        raise NotLearned("\n".join(against))
    learned_from, held_out = split(labels.samples, settings.held_out, settings.seed)
    say(f"{len(learned_from)} {labels.mode.value} training examples, {len(held_out)} held out")
    grader = Grader(helper.ask, rule.low, rule.high)

    found = await _propose(learned_from, rule, grader, settings, say)
    origins, cosines, dimensions = await _candidates(found, embedder, settings)
    texts = list(origins)
    explained = sum(bool(criteria) for _, criteria in found)
    say(f"{explained} of {len(found)} examples explained; {len(texts)} candidate criteria")
    train, grades = await _graded(learned_from, texts, grader, settings.votes, "grading by criteria", say)
    chosen = select(rule, train, grades, cosines, dimensions, settings.max_rubrics)
    if not chosen:
        against.append("no criterion gives the training examples their labels")
        best = max(range(len(grades[0])), key=lambda c: sum(right(rule, train, grades, c)))
        chosen = {best: 1}
    rubrics = tuple(
        Rubric(criterion=texts[c], weight=float(weight), samples=tuple(s.place for s in origins[texts[c]]))
        for c, weight in sorted(chosen.items(), key=lambda item: -item[1])
    )
    said = verdicts(grades, chosen)
    conflicts = _conflicts(rule, train, grades, origins, said)
    if settings.themes:
        rubrics = await merge_into_themes(helper.ask, rubrics, settings.themes)
        train, said = await _judged(learned_from, rubrics, grader, settings.votes, "grading by themes", say)
    in_training = agreement(rule, train, said)

    held, held_said = await _judged(held_out, rubrics, grader, settings.votes, "measuring", say)
    measured = agreement(rule, held, held_said)
    against += _against(in_training, measured, conflicts)
    file = RubricFile(
        mode=labels.mode,
        scale=(rule.low, rule.high),
        tie=0.0 if labels.mode is Mode.POINTWISE else rule.near,
        votes=settings.votes,
        rubrics=rubrics,
    )
    learned = Learned(
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        model=helper.model,
        file=labels.name,
        sha256=labels.sha256,
        prompts={"propose": PROPOSE_PROMPT, "grade": grading.PROMPT, "themes": THEMES_PROMPT},
        train=len(train),
        held_out=tuple(s.place for s in held_out),
        agreement=_measured(measured),
        agreement_in_training=_measured(in_training),
        digest=file.digest,
        warnings=tuple(against),
        prints=tuple(print_of(s) for s in learned_from),
    )
    file = file.model_copy(update={"learned": learned})
    return Result(file, tuple(against), conflicts, in_training, measured, explained, len(texts))


BATCH = 10
"""Number of examples after which novelty is checked."""
MIN_INCREMENT = 0.02
"""Minimum relative gain in the coding rate of the best criteria for a batch to count as novel."""


async def _propose(train: Sequence[Sample], rule: Rule, grader: Grader, settings: Settings, say: Say) -> list[Found]:
    """Return criteria for each example, batch by batch, until batches bring nothing new."""
    found: list[Found] = []
    rate, idle = 0.0, 0
    for start in range(0, len(train), BATCH):
        batch = train[start : start + BATCH]
        what = f"proposing criteria ({start + 1} to {start + len(batch)} of {len(train)} examples)"
        each = await for_each(batch, lambda one: find_criteria(grader, rule, one, settings), what=what, say=say)
        found += [one for one in each if one is not None]
        texts = list(_origins(found))
        cosines = gram_of_words(texts)
        best = most_diverse(cosines, settings.max_rubrics, dimensions=_DIMENSIONS)
        now = coding_rate(cosines, best, dimensions=_DIMENSIONS)
        idle = idle + 1 if texts and now < rate * (1 + MIN_INCREMENT) else 0
        rate = max(rate, now)
        if idle >= PATIENCE and len(found) < len(train):
            say(f"{idle} batches brought nothing new; proposing ends after {len(found)} of {len(train)} examples")
            break
    return found


_DIMENSIONS = 64
"""Dimensions of word vectors: comparable to embeddings, so that both give similar rates."""


def _origins(found: Sequence[Found]) -> dict[str, tuple[Sample, ...]]:
    """Return distinct criteria in their original order, with their examples."""
    spelling: dict[str, str] = {}
    origins: dict[str, tuple[Sample, ...]] = {}
    for sample, criteria in found:
        for text in criteria:
            first = spelling.setdefault(text.casefold().rstrip(". "), text)
            origins[first] = (*origins.get(first, ()), sample)
    return origins


async def _candidates(
    found: Sequence[Found], embedder: Journal | None, settings: Settings
) -> tuple[Origins, Gram, int]:
    """Return candidate criteria, the cosines of all pairs, and the dimensions of the vectors."""
    origins = _origins(found)
    if not origins:
        raise NotLearned(
            f"no criterion gave any of the {len(found)} examples its label after {settings.max_epochs} revisions each. "
            "Check that question and answers contain everything a person needs to judge them, and use a stronger "
            "helper model"
        )
    texts = list(origins)
    vectors = await embedder.embed(texts) if embedder is not None else None
    cosines = gram(vectors) if vectors else gram_of_words(texts)
    dimensions = len(vectors[0]) if vectors else _DIMENSIONS
    most = CANDIDATES_PER_RUBRIC * settings.max_rubrics
    if len(texts) > most:
        kept = sorted(most_diverse(cosines, most, dimensions=dimensions))
        cosines = cosines[np.ix_(kept, kept)]
        origins = {texts[i]: origins[texts[i]] for i in kept}
    return origins, cosines, dimensions


async def _graded(
    samples: Sequence[Sample], criteria: Sequence[str], grader: Grader, votes: int, what: str, say: Say
) -> tuple[list[Sample], list[Matrix]]:
    """Return the samples that could be graded, and their grades."""

    async def one(sample: Sample) -> Matrix:
        return median_of(
            [
                await grader.grade(sample.question, sample.answers, criteria, purpose="learn.grade", vote=vote)
                for vote in range(votes)
            ]
        )

    grades = await for_each(samples, one, what=what, say=say)
    both = [(s, g) for s, g in zip(samples, grades, strict=True) if g is not None]
    return [s for s, _ in both], [g for _, g in both]


async def _judged(
    samples: Sequence[Sample], rubrics: Sequence[Rubric], grader: Grader, votes: int, what: str, say: Say
) -> tuple[list[Sample], list[tuple[float, ...]]]:
    """Return the samples that could be judged, and the verdicts of the final rubrics."""
    kept, grades = await _graded(samples, [r.text for r in rubrics], grader, votes, what, say)
    weights = [r.weight for r in rubrics]
    return kept, [overall(matrix, weights) for matrix in grades]


def _conflicts(
    rule: Rule, train: Sequence[Sample], grades: Sequence[Matrix], origins: Origins,
    final: Sequence[Sequence[float]],
) -> tuple[Conflict, ...]:  # fmt: skip
    """Return pairs of examples whose criteria judge each other wrongly while a final verdict on them is wrong.

    If the final verdicts on both are right, the weights resolved the conflict.
    """
    place = {s.place: i for i, s in enumerate(train)}
    wrong = [not rule.is_right(s.worth, said) for s, said in zip(train, final, strict=True)]
    decided = [right(rule, train, grades, c) for c in range(len(origins))]
    owns = [[place[s.place] for s in origin if s.place in place] for origin in origins.values()]
    found: dict[tuple[str, str], Conflict] = {}
    for (i, one), (j, other) in itertools.combinations(enumerate(origins), 2):
        for a, b in itertools.product(owns[i], owns[j]):
            if (wrong[a] or wrong[b]) and decided[i][b] < 0 and decided[j][a] < 0:
                places = (train[a].place, train[b].place)
                found.setdefault(places, Conflict(places, (one, other)))
    return tuple(found.values())


def _against(train: Agreement, held_out: Agreement, conflicts: Sequence[Conflict]) -> list[str]:
    """Return objections to using the rubrics."""
    found = []
    if not train.is_beyond_chance:
        pairs = "; ".join(map(str, conflicts[:_SHOWN]))
        more = f"; and {len(conflicts) - _SHOWN} more" if len(conflicts) > _SHOWN else ""
        disagree = f" The criteria of these examples judge each other wrongly: {pairs}{more}." if conflicts else ""
        found.append(
            f"the examples contradict each other, or depend on facts that the helper model cannot see: the best "
            f"rubrics agree with {train} of their training labels; chance is {percent(train.chance)}.{disagree}"
        )
    if not held_out.is_beyond_chance:
        found.append(
            f"on held-out examples the rubrics agree with {held_out} of the labels, which is not distinguishable from "
            f"chance ({percent(held_out.chance)}); add examples or raise --held-out"
        )
    return found


def _measured(a: Agreement) -> Agreement:
    """Return an agreement with rounded numbers, as in a file."""
    return Agreement(**{name: round(value, 4) for name, value in a.model_dump().items()})


def check_out(out: Path, inputs: Sequence[Path], *, overwrite: bool) -> None:
    """Check that rubrics may be written to ``out``.

    :param inputs: Input files of the command. They are never overwritten.
    :param overwrite: Allow to overwrite a file other than unedited rubrics.
    :raises ConfigError: The file may not be written. The message has the reason and a solution.
    """
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; use a file name, e.g. {out / 'rubrics.yaml'}")
    if not out.exists():
        return
    if any(path.exists() and path.samefile(out) for path in inputs):
        raise ConfigError(f"--out {out}: is an input of this command; use another file for the rubrics")
    if overwrite:
        return
    try:
        there = load_rubrics(out)
    except ConfigError:
        why = "exists and is not a rubric file"
    else:
        if there.learned is not None and not there.is_edited:
            return
        why = "was edited after learning" if there.is_edited else "was written manually"
    raise ConfigError(f"--out {out}: {why}; use another file, or add --overwrite")


def run_learning(
    labels: Labels, settings: Settings, helpers: HelperModels, helper: str | None, embedder: str | None, out: Path,
    say: Say, *, inputs: Sequence[Path] = (), overwrite: bool = False,
) -> tuple[Result, Mapping[str, float]]:  # fmt: skip
    """Learn rubrics, and write the file.

    :raises ConfigError: The file may not be written, see `check_out`. This is checked again after learning, because the
        file may have been edited in the meantime.
    :raises NotLearned: There are objections to the rubrics, and `force` is not set.
    :raises HelperFailed, BudgetSpent: Raised by the helper model; the message explains how to continue.
    """
    path = out.with_name(f"{out.name}.journal.jsonl")
    journal = Journal(path, choose(helpers, helper))
    vectors = Journal(path, helpers.get(embedder, where="--embedder")) if embedder is not None else None
    try:
        result = asyncio.run(learn(labels, settings, journal, vectors, say))
    except (BudgetSpent, HelperFailed) as e:
        raise type(e)(f"{e}; {_go_on(path)}") from e
    except KeyboardInterrupt:
        say(f"stopped; {_go_on(path)}")
        raise
    spent = journal.spent
    say(
        f"{spent['asked']} answers of {journal.model}, {spent['remembered']} from the journal; cost {spent['cost']:.4g}"
    )
    if result.objections and not settings.force:
        raise NotLearned("\n".join([*result.objections, f"no file was written; pass --force to write {out} anyway"]))
    check_out(out, inputs, overwrite=overwrite)
    save_rubrics(out, result.rubrics)
    return result, spent


def _go_on(journal: Path) -> str:
    """Return how to continue after a stop."""
    known = f"; answers in {journal} are reused" if journal.exists() else ""
    return f"to continue, repeat the command{known}"
