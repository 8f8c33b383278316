"""From labelled examples to a rubric file: the whole of learning, step after step.

    examples ─split▶ train ─propose, grade, validate, revise▶ candidates ─grade all▶ select ─(themes)▶ rubrics
                └──▶ held out ──────────────────────────────────────────────────────────measure──▶ agreement

Invariants: what is held out is first seen when the rubrics are final; a rubric file is written whole and at the end, or
not at all, and the journal stays, so nothing is paid twice; what a person made (examples, an experiment, rubrics that
were edited) is never written over unasked; when something ends, however it ends, nothing that it started still runs.
"""

from __future__ import annotations

import asyncio
import datetime
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from astuner.contracts.errors import ConfigError
from astuner_helpers import BudgetSpent, HelperFailed, HelperModels
from astuner_helpers.members import together
from astuner_rubrics import grading
from astuner_rubrics.agreement import Agreement, Rule, agreement
from astuner_rubrics.grading import AT_ONCE, Grader, Matrix, median_of, overall
from astuner_rubrics.labels import Labels, Mode, Sample, print_of
from astuner_rubrics.learn import proposing
from astuner_rubrics.learn.examples import NotLearned, Settings, Split, objections, rule_of, split
from astuner_rubrics.learn.journal import Journal, Spent
from astuner_rubrics.learn.proposing import Found, find_criteria, merge_into_themes
from astuner_rubrics.learn.selection import (
    Gram,
    Selection,
    coding_rate,
    gram,
    gram_of_words,
    most_diverse,
    right,
    select,
    verdicts,
)
from astuner_rubrics.models import choose
from astuner_rubrics.rubric_file import Learned, Rubric, RubricFile, load_rubrics, save_rubrics

T = TypeVar("T")
R = TypeVar("R")

_MAY_FAIL = 0.1
_REPORTS = 4


async def for_each(
    items: Sequence[T], work: Callable[[T], Awaitable[R]], *, what: str, say: Callable[[str], None]
) -> list[R | None]:
    """The result for each item, None where the helper failed for it.

    :param what: what is done, for progress: ``proposing criteria``.
    :raises HelperFailed: it failed for more than a tenth of the items, and at least two.
    """
    asked = failed = 0
    most = max(1, int(_MAY_FAIL * len(items)))

    async def one(item: T) -> R | None:
        nonlocal asked, failed
        result: R | None = None
        try:
            result = await work(item)
        except HelperFailed as e:
            failed += 1
            if failed > most or len(items) == 1:
                raise HelperFailed(
                    f"{what}: the helper could not be asked ({e}); stopped after {asked - failed + 1} of {len(items)}, "
                    f"since {failed} failed"
                ) from e
        asked += 1
        if asked % max(1, len(items) // _REPORTS) == 0 or asked == len(items):
            say(f"{what}: {asked} of {len(items)}" + (f", of which {failed} failed" if failed else ""))
        return result

    return await together([one(item) for item in items])


_PROMPT_TOKENS = 700
"""Of instructions, about."""
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class Estimate:
    """Requests and tokens that learning takes."""

    mode: str
    train: int
    held_out: int
    fewest_requests: int
    """If every first proposal is right, and all agree on ten criteria."""
    most_requests: int
    prompt_tokens_per_request: int
    objections: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.train} {self.mode} examples to learn from, {self.held_out} held out",
            f"{self.fewest_requests:,} to {self.most_requests:,} requests, each with about "
            f"{self.prompt_tokens_per_request:,} tokens of prompt: "
            f"{self.fewest_requests * self.prompt_tokens_per_request:,} to "
            f"{self.most_requests * self.prompt_tokens_per_request:,} tokens of prompts",
        ]
        return "\n".join([*lines, *(f"it would refuse: {text}" for text in self.objections)])


def check_and_estimate(labels: Labels, settings: Settings) -> Estimate:
    """:raises NotLearned: the examples cannot teach anything."""
    rule = rule_of(labels, settings)
    parts = split(labels.samples, settings.held_out, settings.seed)
    train, held_out = len(parts.train), len(parts.held_out)
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
"""More candidates than this for each rubric that may stay are thinned out to the most diverse ones."""
_SHOWN = 10

Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidates:
    """Validated criteria, each with the examples that it comes from, and the cosines of every two."""

    origins: Mapping[str, tuple[Sample, ...]]
    cosines: Gram
    dimensions: int

    @property
    def texts(self) -> list[str]:
        return list(self.origins)


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
    """What learning found."""

    rubrics: RubricFile
    objections: tuple[str, ...]
    """Why the rubrics should not be used, in words; empty if nothing speaks against it."""
    conflicts: tuple[Conflict, ...]
    train: Agreement
    held_out: Agreement
    explained: int
    """Training examples with criteria that give them their label."""
    candidates: int


async def learn(labels: Labels, settings: Settings, helper: Journal, embedder: Journal | None, say: Say) -> Result:
    """Learn rubrics.

    :param embedder: whose vectors say what is alike; None: the words.
    :raises NotLearned: the examples cannot teach anything, or no criterion explains any of them.
    :raises HelperFailed: the helper fails again and again.
    :raises BudgetSpent: the budget does not allow one more request.
    """
    rule = rule_of(labels, settings)
    against = objections(labels, rule, settings)
    if against and not settings.force:
        raise NotLearned("\n".join(against))
    parts = split(labels.samples, settings.held_out, settings.seed)
    say(f"{len(parts.train)} {labels.mode.value} examples to learn from, {len(parts.held_out)} held out")
    grader = Grader(helper.ask, rule.low, rule.high)

    found = await _propose(parts.train, rule, grader, helper, settings, say)
    candidates = await _candidates(found, embedder, settings)
    explained = sum(bool(f.criteria) for f in found)
    say(f"{explained} of {len(found)} examples explained; {len(candidates.texts)} criteria to choose from")
    train, grades = await _graded(parts.train, candidates.texts, grader, settings.votes, "grading by criteria", say)
    chosen = select(rule, train, grades, candidates.cosines, candidates.dimensions, settings)
    if not chosen.weights:
        against.append("no criterion gives the training examples their labels")
        best = max(range(len(grades[0])), key=lambda c: sum(right(rule, train, grades, c)))
        chosen = Selection({best: 1}, 0.0)
    rubrics = _rubrics(chosen, candidates)
    said = verdicts(grades, chosen.weights)
    conflicts = _conflicts(rule, train, grades, candidates, said)
    if settings.themes:
        rubrics = await merge_into_themes(helper.ask, rubrics, settings.themes)
        train, said = await _judged(parts.train, rubrics, grader, settings.votes, "grading by themes", say)
    in_training = agreement(rule, train, said)

    held, held_said = await _judged(parts.held_out, rubrics, grader, settings.votes, "measuring", say)
    measured = agreement(rule, held, held_said)
    against += _against(in_training, measured, conflicts)
    file = _file(labels, settings, rule, rubrics, parts, helper, against, in_training, measured, len(train))
    return Result(file, tuple(against), conflicts, in_training, measured, explained, len(candidates.texts))


async def _propose(
    train: Sequence[Sample], rule: Rule, grader: Grader, helper: Journal, settings: Settings, say: Say
) -> list[Found]:
    """Criteria for each example, batch after batch, until batches bring nothing new."""

    async def one(sample: Sample) -> Found:
        return await find_criteria(
            helper.ask, grader, rule, sample, proposals=settings.proposals, max_epochs=settings.max_epochs
        )

    found: list[Found] = []
    rate, idle = 0.0, 0
    for start in range(0, len(train), settings.batch):
        batch = train[start : start + settings.batch]
        what = f"proposing criteria ({start + 1} to {start + len(batch)} of {len(train)} examples)"
        found += [f for f in await for_each(batch, one, what=what, say=say) if f is not None]
        texts = list(_origins(found))
        cosines = gram_of_words(texts)
        best = most_diverse(cosines, settings.max_rubrics, dimensions=_DIMENSIONS)
        now = coding_rate(cosines, best, dimensions=_DIMENSIONS)
        idle = idle + 1 if texts and now < rate * (1 + settings.min_increment) else 0
        rate = max(rate, now)
        if idle >= settings.patience and len(found) < len(train):
            say(f"{idle} batches brought nothing new; proposing ends after {len(found)} of {len(train)} examples")
            break
    return found


_DIMENSIONS = 64
"""Of the vectors of words: as many as an embedding is worth, so that both give rates of one size."""


def _origins(found: Sequence[Found]) -> dict[str, tuple[Sample, ...]]:
    """Criteria, the same ones once, in the order in which they came."""
    spelling: dict[str, str] = {}
    origins: dict[str, tuple[Sample, ...]] = {}
    for one in found:
        for text in one.criteria:
            first = spelling.setdefault(text.casefold().rstrip(". "), text)
            origins[first] = (*origins.get(first, ()), one.sample)
    return origins


async def _candidates(found: Sequence[Found], embedder: Journal | None, settings: Settings) -> Candidates:
    origins = _origins(found)
    if not origins:
        raise NotLearned(
            f"no criterion gave any of the {len(found)} examples its label, after {settings.max_epochs} revisions "
            "each: the helper cannot tell what the labels go by. Look whether question and answers hold all that a "
            "person needs to judge them, and try a stronger helper model"
        )
    texts = list(origins)
    vectors = await embedder.embed(texts) if embedder is not None else None
    cosines = gram(vectors) if vectors else gram_of_words(texts)
    dimensions = len(vectors[0]) if vectors else _DIMENSIONS
    most = CANDIDATES_PER_RUBRIC * settings.max_rubrics
    if len(texts) > most:
        kept = sorted(most_diverse(cosines, most, dimensions=dimensions))
        cosines = tuple(tuple(cosines[i][j] for j in kept) for i in kept)
        origins = {texts[i]: origins[texts[i]] for i in kept}
    return Candidates(origins, cosines, dimensions)


async def _graded(
    samples: Sequence[Sample], criteria: Sequence[str], grader: Grader, votes: int, what: str, say: Say
) -> tuple[list[Sample], list[Matrix]]:
    """The samples that could be graded, and their grades."""

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
    """The samples that could be judged, and what final rubrics say about them."""
    kept, grades = await _graded(samples, [r.text for r in rubrics], grader, votes, what, say)
    weights = [r.weight for r in rubrics]
    return kept, [overall(matrix, weights) for matrix in grades]


def _conflicts(
    rule: Rule, train: Sequence[Sample], grades: Sequence[Matrix], candidates: Candidates,
    final: Sequence[Sequence[float]],
) -> tuple[Conflict, ...]:  # fmt: skip
    """Pairs of examples such that a criterion of each decides the other wrongly, and the final verdicts one of them.

    Where the final verdicts are right about both, the weights have settled it: criteria may well pull apart.
    """
    place = {s.place: i for i, s in enumerate(train)}
    wrong = [not rule.is_right(s.worth, said) for s, said in zip(train, final, strict=True)]
    decided = [right(rule, train, grades, c) for c in range(len(candidates.texts))]
    owns = [[place[s.place] for s in origin if s.place in place] for origin in candidates.origins.values()]
    found: dict[tuple[str, str], Conflict] = {}
    for i, one in enumerate(candidates.texts):
        for j in range(i + 1, len(candidates.texts)):
            for a in owns[i]:
                for b in owns[j]:
                    if (wrong[a] or wrong[b]) and decided[i][b] < 0 and decided[j][a] < 0:
                        places = (train[a].place, train[b].place)
                        found.setdefault(places, Conflict(places, (one, candidates.texts[j])))
    return tuple(found.values())


def _rubrics(chosen: Selection, candidates: Candidates) -> tuple[Rubric, ...]:
    texts = candidates.texts
    return tuple(
        Rubric(
            criterion=texts[c], weight=float(weight), samples=tuple(s.place for s in candidates.origins[texts[c]])
        )
        for c, weight in sorted(chosen.weights.items(), key=lambda item: -item[1])
    )


def _against(train: Agreement, held_out: Agreement, conflicts: Sequence[Conflict]) -> list[str]:
    """What speaks against using the rubrics."""
    found = []
    if not train.is_beyond_chance:
        pairs = "; ".join(map(str, conflicts[:_SHOWN]))
        more = f"; and {len(conflicts) - _SHOWN} more" if len(conflicts) > _SHOWN else ""
        disagree = f" The criteria of these examples judge each other wrongly: {pairs}{more}." if conflicts else ""
        found.append(
            f"the examples contradict each other, or are about something that the helper cannot see: the best rubrics "
            f"agree with {train} of the labels that they were learned from, and chance is {train.chance:.0%}.{disagree}"
        )
    if not held_out.is_beyond_chance:
        found.append(
            f"on held-out examples the rubrics agree with {held_out} of the labels, which cannot be told from chance "
            f"({held_out.chance:.0%}); add examples, or raise --held-out"
        )
    return found


def _file(
    labels: Labels, settings: Settings, rule: Rule, rubrics: tuple[Rubric, ...], parts: Split,
    helper: Journal, against: Sequence[str], in_training: Agreement, measured: Agreement, train: int,
) -> RubricFile:  # fmt: skip
    grades_by = RubricFile(
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
        prompts={"propose": proposing.PROMPT, "grade": grading.PROMPT, "themes": proposing.THEMES_PROMPT},
        train=train,
        held_out=tuple(s.place for s in parts.held_out),
        agreement=_measured(measured),
        agreement_in_training=_measured(in_training),
        digest=grades_by.digest,
        warnings=tuple(against),
        prints=tuple(print_of(s) for s in parts.train),
    )
    return grades_by.model_copy(update={"learned": learned})


def _measured(a: Agreement) -> Agreement:
    """As a file has it."""
    return Agreement(**{name: round(value, 4) for name, value in a.model_dump().items()})


def journal_of(out: Path) -> Path:
    """The journal beside a rubric file."""
    return out.with_name(f"{out.name}.journal.jsonl")


def check_out(out: Path, inputs: Sequence[Path], *, overwrite: bool) -> None:
    """Whether rubrics may be written to ``out``.

    :param inputs: files that the command reads; they are not written over even if asked.
    :param overwrite: whether something else than rubrics as they were learned may be written over.
    :raises ConfigError: they may not; says why, and what to type.
    """
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; name a file, e.g. {out / 'rubrics.yaml'}")
    if not out.exists():
        return
    if any(path.exists() and path.samefile(out) for path in inputs):
        raise ConfigError(f"--out {out}: is a file that this command reads; name another place for the rubrics")
    if overwrite:
        return
    try:
        there = load_rubrics(out)
    except ConfigError:
        why = "is there and no rubric file"
    else:
        if there.learned is not None and not there.is_edited:
            return
        why = "was edited since it was learned" if there.is_edited else "was written by hand"
    raise ConfigError(f"--out {out}: {why}; name another place, or add --overwrite")


def run_learning(
    labels: Labels, settings: Settings, helpers: HelperModels, helper: str | None, embedder: str | None, out: Path,
    say: Say, *, inputs: Sequence[Path] = (), overwrite: bool = False,
) -> tuple[Result, Spent]:  # fmt: skip
    """Learn, and write the file.

    :raises ConfigError: the file may not be written, see `check_out`; this is looked at again when the rubrics are
        there, since somebody may edit the file meanwhile.
    :raises NotLearned: something speaks against the rubrics, and `force` is not set.
    :raises HelperFailed, BudgetSpent: of the helper; says that typing the same again goes on.
    """
    check_out(out, inputs, overwrite=overwrite)
    path = journal_of(out)
    journal = Journal(path, choose(helpers, helper))
    vectors = Journal(path, helpers.get(embedder, where="--embedder")) if embedder is not None else None
    try:
        result = asyncio.run(learn(labels, settings, journal, vectors, say))
    except BudgetSpent as e:
        raise BudgetSpent(f"{e}; {_go_on(path)}") from e
    except HelperFailed as e:
        raise HelperFailed(f"{e}; {_go_on(path)}") from e
    except KeyboardInterrupt:
        say(f"stopped; {_go_on(path)}")
        raise
    spent = journal.spent
    say(f"{spent.asked} answers of {journal.model}, {spent.remembered} of the journal; cost {spent.cost:.4g}")
    if result.objections and not settings.force:
        raise NotLearned("\n".join([*result.objections, f"no file was written; --force writes {out} all the same"]))
    check_out(out, inputs, overwrite=overwrite)
    save_rubrics(out, result.rubrics)
    return result, spent


def _go_on(journal: Path) -> str:
    """How to go on after learning was stopped."""
    known = f", and what is in {journal} is not asked again" if journal.exists() else ""
    return f"nothing is lost: type the same again{known}"
