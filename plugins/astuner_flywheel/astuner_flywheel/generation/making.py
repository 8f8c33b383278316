"""Making tasks: propose, check, verify, until there are enough or nothing is left to ask.

Every answer is in the folder's journals before it is acted upon, and what is done next follows from the journals
alone: a process that is killed and started again goes on, and comes to what it would have come to.  Invariant: the
tasks in ``tasks.jsonl`` are no near-duplicates of each other or of the samples, and each passed every check.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from astuner.helper_models import Helper, HelperFailed
from astuner_flywheel.generation import checks, prompts
from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_flywheel.generation.folder import Folder
from astuner_flywheel.generation.known import Known
from astuner_flywheel.generation.material import Material
from astuner_flywheel.generation.rows import task_row
from astuner_flywheel.generation.units import Candidate, Unit, candidate, units
from astuner_flywheel.generation.verify import verify

GIVE_UP_AFTER = 3
"""Requests without an answer in a row (each was tried several times) before the helper is taken to be down."""
AT_ONCE = 16
"""Requests that are shown samples alone: the next ones are told what these brought, and passages bring variety."""
SHOWN_QUESTIONS = 20
"""Questions that exist already, in one request."""


class Making:
    """One generation at work.

    :param progress: called with this object whenever something has happened.
    """

    def __init__(
        self,
        config: DataGenerationConfig,
        material: Material,
        folder: Folder,
        helper: Helper,
        embedder: Helper | None,
        secret: str,
        progress: Callable[[Making], None] = lambda _: None,
    ) -> None:
        self._config, self._material, self._folder = config, material, folder
        self._helper, self._embedder, self._secret, self._progress = helper, embedder, secret, progress
        self._units = {unit.id: unit for unit in units(material, config)}
        self.accepted: dict[str, dict[str, Any]] = {row["task_id"]: row for row in folder.tasks.rows()}
        """Name -> row of ``tasks.jsonl``."""
        self.rejected: Counter[str] = Counter()
        """Reason -> how many."""
        self.failed: dict[str, str] = {}
        """Requests that brought no answer this time -> why; they are asked again next time."""
        self.waiting: list[Candidate] = []
        """Proposed and not decided, in order."""
        self._decided = {(row["unit"], row["number"]) for row in self.accepted.values()}
        for row in folder.rejected.rows():
            self._decided.add((row["unit"], row["number"]))
            self.rejected[row["reason"]] += 1
        self._asked: set[str] = set()
        for row in folder.proposals.rows():
            self._take(row)
        self._known = Known(config, embedder)
        self._failures_in_a_row = 0

    @property
    def wanted(self) -> int:
        """Tasks that are still missing."""
        return max(0, self._config.tasks - len(self.accepted))

    @property
    def answered(self) -> int:
        """Requests for tasks that were answered, in all processes that worked in the folder."""
        return len(self._asked)

    async def run(self) -> None:
        """Make what is missing.

        What gets no verdict is rejected in the end: a helper that will not answer one question is not down.

        :raises HelperFailed: the helper gives no answers any more, or gave none that led to a task.
        :raises astuner.helper_models.BudgetSpent: the budget is reached.
        """
        await self._learn([(f"sample {sample.id}", sample.question) for sample in self._material.samples])
        await self._learn([(name, row["main_query"]) for name, row in self.accepted.items()])
        self._progress(self)
        while self.wanted:
            if await self._settle():
                continue
            batch = [unit for unit in self._units.values() if unit.id not in self._asked and unit.id not in self.failed]
            if not batch:
                break
            requests = -(-self.wanted // self._config.per_call)
            if not self._material.chunks:
                requests = min(requests, AT_ONCE)
            await self._each((unit.id, self._propose(unit)) for unit in batch[:requests])
        if self.wanted and self.failed:
            if not self.accepted:
                raise HelperFailed(next(iter(self.failed.values())))
            self._throw_out(self._unanswered)

    async def _learn(self, named: Sequence[tuple[str, str]]) -> None:
        await self._known.prepare([question for _, question in named])
        for name, question in named:
            self._known.keep(name, question)

    def _take(self, row: dict[str, Any]) -> None:
        """The tasks of an answer to one request."""
        unit = self._units.get(row["unit"])
        if unit is None:
            return  # of a round that is not wanted any more
        self._asked.add(unit.id)
        for number, task in enumerate(row["tasks"]):
            found = candidate(unit, number, task["question"], task["answer"], task["evidence"])
            if found.place not in self._decided:
                self.waiting.append(found)
        self.waiting.sort(key=lambda found: found.order)

    async def _propose(self, unit: Unit) -> None:
        config = self._config
        shown = [(sample.question, sample.answer) for sample in unit.samples]
        known = self._shown_questions(unit)
        messages = prompts.write(
            None if unit.chunk is None else unit.chunk.text,
            shown,
            count=config.per_call,
            language=config.language,
            instructions=config.instructions,
            known=known,
            secret=self._secret,
        )
        answer = await self._helper.ask(
            messages,
            purpose="write tasks",
            answer=prompts.Proposal,
            temperature=config.temperature,
            sample=unit.index,
        )
        row = {"unit": unit.id, "tasks": [task.model_dump() for task in answer.data.tasks]}
        self._folder.proposals.append(row)
        self._take(row)

    def _shown_questions(self, unit: Unit) -> list[str]:
        """What a request is told that exists: of its own passage, or the newest."""
        rows = list(self.accepted.values())
        if unit.chunk is not None:
            place = (unit.chunk.document.sha256, unit.chunk.id)
            rows = [row for row in rows if (row["metadata"]["provenance"].get("sha256"), row["passage"]) == place]
        return [row["main_query"] for row in rows[-SHOWN_QUESTIONS:]]

    async def _settle(self) -> bool:
        """Decide about what is waiting, as far as it is needed; whether anything was decided."""
        self._throw_out(self._fault)
        await self._known.prepare([found.question for found in self.waiting])
        self._throw_out(self._repeats)
        batch: list[Candidate] = []
        among = self._known.beside()
        for found in self.waiting:
            if _name(found) in self.failed or len(batch) == self.wanted:
                continue
            if among.near(found.question) is None:  # else it waits for what becomes of the one that it repeats
                among.keep(found.id, found.question)
                batch.append(found)
        await self._each((_name(found), self._decide(found)) for found in batch)
        return bool(batch)

    async def _decide(self, found: Candidate) -> None:
        verdict = await verify(self._helper, found, self._config.independent_solutions, self._secret)
        self.waiting.remove(found)
        if verdict.reason:
            self._reject(found, verdict.reason, verdict.detail)
            return
        row = task_row(found, model=self._helper.model)
        self._folder.tasks.append(row)
        self.accepted[found.id] = row
        self._decided.add(found.place)
        self._known.keep(found.id, found.question)

    def _throw_out(self, why: Callable[[Candidate], tuple[str, str] | None]) -> None:
        kept = []
        for found in self.waiting:
            if (fault := why(found)) is not None:
                self._reject(found, *fault)
            else:
                kept.append(found)
        self.waiting = kept

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
        return None if why is None else ("no verdict", why[:500])

    def _repeats(self, found: Candidate) -> tuple[str, str] | None:
        near = self._known.near(found.question)
        return None if near is None else (near[1], f"of {near[0]}")

    def _reject(self, found: Candidate, reason: str, detail: str) -> None:
        self._folder.rejected.append(
            {
                "task_id": found.id,
                "reason": reason,
                "detail": detail,
                "question": found.question[:5000],
                "answer": found.answer[:5000],
                "evidence": found.evidence[:5000],
                "unit": found.unit.id,
                "number": found.number,
            }
        )
        self._decided.add(found.place)
        self.rejected[reason] += 1

    async def _each(self, jobs: Iterable[tuple[str, Coroutine[Any, Any, None]]]) -> None:
        """All at once, by name; the first error that ends the work cancels the others."""
        tasks = [asyncio.ensure_future(self._one(name, job)) for name, job in jobs]
        try:
            for task in asyncio.as_completed(tasks):
                await task
                self._progress(self)
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
