"""Making tasks: propose, check, verify, until there are enough or nothing is left to ask.

Every answer is in the folder's journals before it is acted upon, and what is done next follows from the journals
alone: a process that is killed and started again goes on, and comes to what it would have come to.  Invariant: the
tasks in ``tasks.jsonl`` are no near-duplicates of each other or of the samples, and each passed every check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from astuner_flywheel.generation import checks, luck, prompts
from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_flywheel.generation.folder import Folder
from astuner_flywheel.generation.known import Known
from astuner_flywheel.generation.material import Material
from astuner_flywheel.generation.rows import task_row
from astuner_flywheel.generation.standing import Standing
from astuner_flywheel.generation.units import Candidate, Unit
from astuner_flywheel.generation.verify import Verdict, verify
from astuner_helpers import Helper, HelperFailed

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
        self.luck = luck.Luck(tell)
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
        most = self.standing.wanted if self.standing.accepted else min(self.standing.wanted, luck.TRIES)
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
        if self._decided >= luck.TRIES:
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
        fault = checks.fault(
            found.question,
            found.answer,
            longest_question=config.max_question_characters,
            longest_answer=config.max_answer_characters,
        )
        if fault is None and found.unit.chunk is not None:
            if checks.refers_to_text(found.question):
                fault = "asks about the text"
            elif checks.locate(found.evidence, found.unit.chunk.text) is None:
                fault = "evidence is not in the passage"
        return None if fault is None else (fault, "")

    def _unanswered(self, found: Candidate) -> tuple[str, str] | None:
        why = self.failed.get(_name(found))
        return None if why is None else (REFUSED, why[:500])

    def _repeats(self, found: Candidate) -> tuple[str, str] | None:
        near = self._known.near(found.question)
        return None if near is None else (near[1], f"of {near[0]}")

    async def _each(self, jobs: Iterable[tuple[str, Coroutine[Any, Any, None]]]) -> None:
        """All at once, by name; the first error that ends the work cancels the others."""
        tasks = [asyncio.ensure_future(self._one(name, job)) for name, job in jobs]
        try:
            for task in asyncio.as_completed(tasks):
                await task
                self._progress(self.standing)
        finally:
            for unfinished in tasks:
                unfinished.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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


def _name(found: Candidate) -> str:
    return f"{found.unit.id}#{found.number}"
