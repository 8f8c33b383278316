"""Making tasks: propose, check, verify, until there are enough or nothing is left to ask.

Every answer is in the folder's journals before it is acted upon, and what is done next follows from the journals
alone: a process that is killed and started again goes on, and comes to what it would have come to.  A helper that is
down is one thing (`GIVE_UP_AFTER`); one that answers and refuses, or whose proposals all fail their checks, is another
(`Luck`): single refusals stop nothing, and only a start that has brought no task at all ends.  Invariants: the tasks
in ``tasks.jsonl`` are no near-duplicates of each other or of the samples, and each passed every check; a folder that
has a task is never stopped for want of luck, and every start may try as often as the first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from astuner.contracts.errors import DataError
from astuner_flywheel.generation import prompts
from astuner_flywheel.generation.checks import Verdict, fault, locate, refers_to_text, verify
from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_flywheel.generation.folder import Folder, Standing, task_row
from astuner_flywheel.generation.material import Candidate, Material, Unit
from astuner_flywheel.near import NearDuplicates, NearVectors
from astuner_helpers import Helper, HelperFailed
from astuner_helpers.members import together

_WHERE = "astuner.task_reader.data_generation.near_in_meaning.helper_model"


class Known:
    """The questions so far; `near` asks about one, `keep` adds one.

    :param embedder: who embeds questions, where the section compares by meaning.
    """

    def __init__(self, config: DataGenerationConfig, embedder: Helper | None) -> None:
        self._config, self._embedder = config, embedder
        self._words = NearDuplicates[str](
            config.near_duplicate_threshold, numbers_tell_apart=config.numbers_tell_apart
        )
        self._vectors: NearVectors | None = None
        self._embedded: dict[str, Sequence[float]] = {}
        if config.near_in_meaning is not None:
            self._vectors = NearVectors(config.near_in_meaning.threshold)

    async def prepare(self, questions: Sequence[str]) -> None:
        """Embed them in one request; without a comparison by meaning this does nothing."""
        new = [question for question in dict.fromkeys(questions) if question not in self._embedded]
        if self._embedder is not None and new:
            vectors = await self._embedder.embed(new, purpose="compare tasks")
            self._embedded.update(zip(new, vectors, strict=True))

    def near(self, question: str) -> tuple[str, str] | None:
        """The name of a question that this one repeats, and how: ``near-duplicate`` or ``near in meaning``."""
        if found := self._words.near(question):
            return found[0][0], "near-duplicate"
        if self._vectors is not None:
            try:
                name = self._vectors.near(self._embedded[question])
            except ValueError as e:
                raise HelperFailed(f"{_WHERE}: cannot compare what it gives: {e}; choose another model") from None
            if name is not None:
                return name, "near in meaning"
        return None

    def keep(self, name: str, question: str) -> None:
        """Make a question known; it was prepared."""
        self._words.keep(name, question)
        if self._vectors is not None:
            self._vectors.keep(name, self._embedded[question])

    def beside(self) -> Known:
        """An empty one that shares what was embedded: for the questions of one batch among each other."""
        other = Known(self._config, self._embedder)
        other._embedded = self._embedded
        return other


TRIES = 20
"""Proposals and requests that come to nothing, in one start, before a generation without any task stops."""
WINDOW, MANY = 20, 10
"""So many refusals among the last requests are said, once."""
_EXAMPLES = 2


class NothingAccepted(DataError):
    """Of all that was proposed nothing became a task."""


class Luck:
    """What became of one start's requests and proposals.

    :param tell: is given what a person should know, once.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._reasons: Counter[str] = Counter()
        self._examples: list[str] = []
        self.told = ""
        """What was said of refusals; empty while nothing was."""

    def answered(self, refusal: str = "") -> None:
        """The helper answered a request, or (with why) would not."""
        self._recent.append(bool(refusal))
        if refusal and len(self._examples) < _EXAMPLES and refusal not in self._examples:
            self._examples.append(refusal)
        refused = sum(self._recent)
        if not self.told and refused >= MANY and len(self._recent) == WINDOW:
            self.told = (
                f"the helper would not answer {refused} of the last {WINDOW} requests, and the others go on; "
                f"for example: {'; '.join(self._examples)}"
            )
            self._tell(self.told)

    def in_vain(self, reason: str, example: str) -> None:
        """A proposal, or a request, that came to nothing."""
        self._reasons[reason] += 1
        if self._reasons[reason] == 1 and len(self._reasons) <= _EXAMPLES:
            self._examples.append(f"{reason}: {example}"[:300])

    def give_up(self, standing: Standing, *, left: bool) -> None:
        """Called when nothing is under way.

        :param left: whether there is more to ask.
        :raises NothingAccepted: there is no task after all these tries.
        """
        tries = sum(self._reasons.values())
        if standing.accepted or (left and tries < TRIES):
            return
        what = f"the {tries} tries of this start" if tries else "all that was asked so far"
        counted = (self._reasons or standing.rejected).most_common()
        counts = ", ".join(f"{count} {reason}" for reason, count in counted) or "nothing was proposed"
        examples = f". For example: {'; '.join(self._examples)}" if self._examples else ""
        help_ = "Another helper model, other instructions or other documents may help"
        further = f"the same command tries up to {TRIES} more" if left else "nothing is left to ask: raise rounds too"
        raise NothingAccepted(f"no task came of {what}: {counts}{examples}. {help_}; {further}")


GIVE_UP_AFTER = 3
"""Requests in a row that fail and not for what they ask (each was tried several times): the helper is down."""
AT_ONCE = 16
"""Requests that are shown samples alone: the next ones are told what these brought, and passages bring variety."""
SHOWN_QUESTIONS = 20
"""Questions that exist already, in one request."""
REFUSED = "no verdict"


class Making:
    """One generation at work.

    :param progress: called with how far it is whenever something has happened.
    :param tell: called with what a person should know, once each.
    """

    def __init__(
        self,
        config: DataGenerationConfig,
        material: Material,
        folder: Folder,
        helper: Helper,
        embedder: Helper | None,
        secret: str,
        progress: Callable[[Standing], None] = lambda _: None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._config, self._material, self._helper = config, material, helper
        self._secret, self._progress = secret, progress
        self.standing = Standing(config, material, folder)
        self.failed: dict[str, str] = {}
        """Requests that brought no answer this time -> why; they are asked again next time."""
        self.luck = Luck(tell)
        self._refused_before = [unit.id for unit in self.standing.refused_units]
        self._known = Known(config, embedder)
        self._decided = 0
        """Proposals that were solved in this start."""
        self._failures_in_a_row = 0

    async def run(self) -> None:
        """Make what is missing.

        A request that the helper will not answer is passed over, and asked again when nothing else is left to ask, by
        another start.

        :raises HelperFailed: the helper gives no answers any more, or gave none that led to a task.
        :raises NothingAccepted: the helper answers, and no task comes of it.
        :raises astuner_helpers.BudgetSpent: the budget is reached.
        """
        await self._learn([(f"sample {sample.id}", sample.question) for sample in self._material.samples])
        await self._learn([(name, row["main_query"]) for name, row in self.standing.accepted.items()])
        self._progress(self.standing)
        while self.standing.wanted:
            if await self._settle():
                continue
            batch = self._next()
            if not batch:
                break
            requests = -(-self.standing.wanted // self._config.per_call)
            if not self._material.chunks:
                requests = min(requests, AT_ONCE)
            await self._each((unit.id, self._propose(unit)) for unit in batch[:requests])
        if self.standing.wanted:
            if self.failed and not self.standing.accepted:
                raise HelperFailed(next(iter(self.failed.values())))
            self.luck.give_up(self.standing, left=False)
            self.standing.throw_out(self._unanswered)

    def _next(self) -> list[Unit]:
        """What may be asked next; at the end, what was refused before this start."""
        new = [unit for unit in self.standing.unasked if unit.id not in self.failed]
        again = [unit for unit in self.standing.refused_units if unit.id in self._refused_before]
        return new or [unit for unit in again if unit.id not in self.failed]

    async def _learn(self, named: Sequence[tuple[str, str]]) -> None:
        await self._known.prepare([question for _, question in named])
        for name, question in named:
            self._known.keep(name, question)

    async def _propose(self, unit: Unit) -> None:
        config = self._config
        shown = [(sample.question, sample.answer) for sample in unit.samples]
        messages = prompts.write(
            None if unit.chunk is None else unit.chunk.text,
            shown,
            count=config.per_call,
            language=config.language,
            instructions=config.instructions,
            known=self._shown_questions(unit),
            secret=self._secret,
        )
        if unit.id in self._refused_before:
            self._refused_before.remove(unit.id)
        try:
            answer = await self._helper.ask(
                messages,
                purpose="write tasks",
                answer=prompts.Proposal,
                temperature=config.temperature,
                sample=unit.index,
            )
        except HelperFailed as e:
            if not e.about_question:
                raise
            self.standing.refuse(unit, str(e))
            self.luck.answered(str(e))
            self.luck.in_vain("requests for tasks refused", str(e))
        else:
            self.standing.propose(unit, [task.model_dump() for task in answer.data.tasks])
            self.luck.answered()
            if not answer.data.tasks:
                self.luck.in_vain("requests answered with no task", unit.id)
        self._give_up_in_time()

    def _shown_questions(self, unit: Unit) -> list[str]:
        """What a request is told that exists: of its own passage, or the newest."""
        rows = list(self.standing.accepted.values())
        if unit.chunk is not None:
            place = (unit.chunk.document.sha256, unit.chunk.id)
            rows = [row for row in rows if (row["metadata"]["provenance"].get("sha256"), row["passage"]) == place]
        return [row["main_query"] for row in rows[-SHOWN_QUESTIONS:]]

    async def _settle(self) -> bool:
        """Decide about what is waiting, as far as it is needed; whether anything was decided."""
        self._throw_out(self._fault)
        await self._known.prepare([found.question for found in self.standing.waiting])
        self._throw_out(self._repeats)
        self._give_up_in_time()
        # A wrong proposal is refused at its first solution, and a right one accepted after its last.  So the first few
        # are decided wholly before anything is said of them.
        most = self.standing.wanted if self.standing.accepted else min(self.standing.wanted, TRIES)
        batch: list[Candidate] = []
        among = self._known.beside()
        for found in self.standing.waiting:
            if _name(found) in self.failed or len(batch) == most:
                continue
            if among.near(found.question) is None:  # else it waits for what becomes of the one that it repeats
                among.keep(found.id, found.question)
                batch.append(found)
        await self._each((_name(found), self._decide(found)) for found in batch)
        self._decided += len(batch)
        if self._decided >= TRIES:
            self.luck.give_up(self.standing, left=True)
        return bool(batch)

    async def _decide(self, found: Candidate) -> None:
        try:
            verdict = await verify(self._helper, found, self._config.independent_solutions, self._secret)
        except HelperFailed as e:
            if not e.about_question:
                raise
            verdict = Verdict(REFUSED, str(e)[:500])
        self.standing.waiting.remove(found)
        self.luck.answered(verdict.detail if verdict.reason == REFUSED else "")
        if verdict.reason:
            self.standing.reject(found, verdict.reason, verdict.detail)
            self.luck.in_vain(verdict.reason, f"{found.question[:100]!r}, {verdict.detail}")
            return
        self.standing.accept(found, task_row(found, model=self._helper.model))
        self._known.keep(found.id, found.question)

    def _throw_out(self, why: Callable[[Candidate], tuple[str, str] | None]) -> None:
        for found, reason, detail in self.standing.throw_out(why):
            self.luck.in_vain(reason, f"{found.question[:100]!r} {detail}")

    def _give_up_in_time(self) -> None:
        """Where nothing waits: what waits may still become a task."""
        if not self.standing.waiting:
            self.luck.give_up(self.standing, left=True)

    def _fault(self, found: Candidate) -> tuple[str, str] | None:
        config = self._config
        why = fault(
            found.question,
            found.answer,
            longest_question=config.max_question_characters,
            longest_answer=config.max_answer_characters,
        )
        if why is None and found.unit.chunk is not None:
            if refers_to_text(found.question):
                why = "asks about the text"
            elif locate(found.evidence, found.unit.chunk.text) is None:
                why = "evidence is not in the passage"
        return None if why is None else (why, "")

    def _unanswered(self, found: Candidate) -> tuple[str, str] | None:
        why = self.failed.get(_name(found))
        return None if why is None else (REFUSED, why[:500])

    def _repeats(self, found: Candidate) -> tuple[str, str] | None:
        near = self._known.near(found.question)
        return None if near is None else (near[1], f"of {near[0]}")

    async def _each(self, jobs: Iterable[tuple[str, Coroutine[Any, Any, None]]]) -> None:
        """All at once, by name; the first error that ends the work cancels the others."""
        await together([self._one(name, job) for name, job in jobs])

    async def _one(self, name: str, job: Coroutine[Any, Any, None]) -> None:
        try:
            await job
        except HelperFailed as e:
            self.failed[name] = str(e)
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= GIVE_UP_AFTER:
                raise
        else:
            self._failures_in_a_row = 0
        self._progress(self.standing)


def _name(found: Candidate) -> str:
    return f"{found.unit.id}#{found.number}"
