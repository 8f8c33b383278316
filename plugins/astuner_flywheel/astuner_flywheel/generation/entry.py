"""Run a generation: from an experiment's config to a finished folder, its plan and its report.

The command and the task reader ``data_generation`` both use it. A finished folder is read without requests; an
unfinished one is completed: propose, check and verify until there are enough tasks or no requests are left. Every
answer is written to the folder's journals before it is used, and the next step depends only on the journals, so an
interrupted process continues where it stopped with the same result. A helper model that is down (`GIVE_UP_AFTER`) is
distinguished from one that answers but refuses, or whose proposals fail all checks (`Luck`): single refusals do not
stop a generation; only a start without any task ends.

Each task is solved again without showing the proposed answer, because agreement of independent solutions indicates a
right answer (self-consistency: Wang et al. 2022, arXiv:2203.11171). The first different solution ends the check, so
wrong answers are cheap.

Invariants: tasks in ``tasks.jsonl`` are not near-duplicates of each other or of samples, and each passed every check; a
folder with at least one task is never stopped by `Luck`, and every start has the same number of tries; a folder that is
finished for the same material and settings is not changed; the plan of ``--dry-run`` counts requests from the real
material and folder and marks estimates (answer lengths, acceptance) as such; both sides are made from ``tasks.jsonl``
only, in the order of the material, so interruptions do not change the result.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from astuner import Config, Task, TaskReader, read_jsonl
from astuner.contracts.building import BuildContext
from astuner.contracts.errors import ConfigError, DataError, Interrupted
from astuner.contracts.types import Split
from astuner_flywheel.generation import prompts
from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_flywheel.generation.folder import Folder, Standing, history, made_task, sample_task, task_of, task_row
from astuner_flywheel.generation.material import Candidate, Material, Unit, fault, gather
from astuner_flywheel.near import NearDuplicates, NearVectors, words
from astuner_flywheel.splits import Sides, separate, split
from astuner_flywheel.support import Live, run, told, write_json, write_rows
from astuner_helpers import BudgetSpent, Helper, HelperFailed, HelperModels, Usage
from astuner_helpers.members import together
from astuner_helpers.settings import HelperModel, HelperModelKeys

READER = "data_generation"
WHERE = f"astuner.task_reader.{READER}"


class Known:
    """Known questions, to find near-duplicates of a new one.

    :param embedder: Helper model for embeddings if the section compares by meaning.
    """

    def __init__(self, config: DataGenerationConfig, embedder: Helper | None) -> None:
        self._config, self._embedder = config, embedder
        self._words = NearDuplicates[str](config.near_duplicate_threshold, numbers_tell_apart=config.numbers_tell_apart)
        meaning = config.near_in_meaning
        self._vectors = NearVectors(meaning.threshold) if meaning is not None else None
        self._embedded: dict[str, Sequence[float]] = {}

    async def prepare(self, questions: Sequence[str]) -> None:
        """Embed questions in one request. Does nothing without a comparison by meaning."""
        new = [question for question in dict.fromkeys(questions) if question not in self._embedded]
        if self._embedder is not None and new:
            vectors = await self._embedder.embed(new, purpose="compare tasks")
            self._embedded.update(zip(new, vectors, strict=True))

    def near(self, question: str) -> tuple[str, str] | None:
        """Return the name of a question that this one repeats, and ``near-duplicate`` or ``near in meaning``."""
        if found := self._words.near(question):
            return found[0][0], "near-duplicate"
        if self._vectors is not None:
            try:
                name = self._vectors.near(self._embedded[question])
            except ValueError as e:
                raise HelperFailed(
                    f"{WHERE}.near_in_meaning.helper_model: cannot compare its embeddings: {e}; use another model"
                ) from None
            if name is not None:
                return name, "near in meaning"
        return None

    def keep(self, name: str, question: str) -> None:
        """Add a question. It must have been prepared."""
        self._words.keep(name, question)
        if self._vectors is not None:
            self._vectors.keep(name, self._embedded[question])

    def beside(self) -> Known:
        """Return an empty collection that shares the embeddings, for comparing questions of one batch."""
        other = Known(self._config, self._embedder)
        other._embedded = self._embedded
        return other


TRIES = 20
"""Unsuccessful proposals and requests of one start after which a generation without any task stops."""
WINDOW, MANY = 20, 10
"""Number of recent requests, and of refusals among them that are reported once."""
_EXAMPLES = 2


class NothingAccepted(DataError):
    """No proposal became a task."""


class Luck:
    """Results of the requests and proposals of one start.

    :param live: Receives one-time messages for users.
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._reasons: Counter[str] = Counter()
        self._examples: list[str] = []
        self.told = ""
        """Message about refusals, or empty."""

    def answered(self, refusal: str = "") -> None:
        """Record that the helper model answered a request or refused it."""
        self._recent.append(bool(refusal))
        if refusal and len(self._examples) < _EXAMPLES and refusal not in self._examples:
            self._examples.append(refusal)
        refused = sum(self._recent)
        if not self.told and refused >= MANY and len(self._recent) == WINDOW:
            self.told = (
                f"the helper model refused {refused} of the last {WINDOW} requests; generation continues; "
                f"for example: {'; '.join(self._examples)}"
            )
            self._live.tell(self.told)

    def in_vain(self, reason: str, example: str) -> None:
        """Record an unsuccessful proposal or request."""
        self._reasons[reason] += 1
        if self._reasons[reason] == 1 and len(self._reasons) <= _EXAMPLES:
            self._examples.append(f"{reason}: {example}"[:300])

    def give_up(self, standing: Standing, *, left: bool) -> None:
        """Check whether to stop. Called when no request is in progress.

        :param left: Whether more requests are possible.
        :raises NothingAccepted: There is no task after all tries.
        """
        tries = sum(self._reasons.values())
        if standing.accepted or (left and tries < TRIES):
            return
        what = f"the {tries} tries of this start" if tries else "all requests so far"
        counted = (self._reasons or standing.rejected).most_common()
        counts = ", ".join(f"{count} {reason}" for reason, count in counted) or "no proposals"
        examples = f". For example: {'; '.join(self._examples)}" if self._examples else ""
        help_ = "Try another helper model, other instructions or other documents"
        further = f"repeat the command for up to {TRIES} more tries" if left else "raise rounds for more requests"
        raise NothingAccepted(f"no task resulted from {what}: {counts}{examples}. {help_}; {further}")


GIVE_UP_AFTER = 3
"""Consecutive failures, not caused by the question itself, after which a helper model counts as down."""
AT_ONCE = 16
"""Concurrent requests that show only samples. Later requests show earlier results; passages provide variety."""
SHOWN_QUESTIONS = 20
"""Number of existing questions shown in one request."""
REFUSED = "no verdict"


class Making:
    """A generation in progress.

    :param live: Receives progress after each step, and one-time messages for users.
    """

    def __init__(
        self, config: DataGenerationConfig, material: Material, folder: Folder, helper: Helper, embedder: Helper | None,
        secret: str, live: Live,
    ) -> None:  # fmt: skip
        self._config, self._material, self._helper = config, material, helper
        self._secret, self._live = secret, live
        self.standing = Standing(config, material, folder)
        self.failed: dict[str, str] = {}
        """Reasons of requests that failed in this start. They are repeated in the next start."""
        self.luck = Luck(live)
        self._refused_before = [unit.id for unit in self.standing.refused_units]
        self._known = Known(config, embedder)
        self._decided = 0
        """Proposals that were solved in this start."""
        self._failures_in_a_row = 0

    async def run(self) -> None:
        """Generate the missing tasks.

        A refused request is skipped, and repeated in another start if nothing else is left to request.

        :raises HelperFailed: The helper model is down, or no answer led to a task.
        :raises NothingAccepted: The helper model answers, but no task results.
        :raises astuner_helpers.BudgetSpent: The budget is spent.
        """
        await self._learn([(f"sample {sample.id}", sample.question) for sample in self._material.samples])
        await self._learn([(name, row["main_query"]) for name, row in self.standing.accepted.items()])
        self._live.say(str(self.standing))
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
            unanswered = {name: (REFUSED, why[:500]) for name, why in self.failed.items()}
            self.standing.throw_out(lambda found: unanswered.get(found.place))

    def _next(self) -> list[Unit]:
        """Return the next possible requests; at the end, those refused before this start."""
        new = [unit for unit in self.standing.unasked if unit.id not in self.failed]
        again = [unit for unit in self.standing.refused_units if unit.id in self._refused_before]
        return new or [unit for unit in again if unit.id not in self.failed]

    async def _learn(self, named: Sequence[tuple[str, str]]) -> None:
        await self._known.prepare([question for _, question in named])
        for name, question in named:
            self._known.keep(name, question)

    async def _propose(self, unit: Unit) -> None:
        passage, rows = None, list(self.standing.accepted.values())
        if unit.chunk is not None:  # show existing questions of the passage; without a passage, the newest
            passage, place = unit.chunk.text, (unit.chunk.document.sha256, unit.chunk.id)
            rows = [row for row in rows if (row["metadata"]["provenance"].get("sha256"), row["passage"]) == place]
        known = [row["main_query"] for row in rows[-SHOWN_QUESTIONS:]]
        messages = prompts.write(self._config, passage, unit.samples, known, secret=self._secret)
        if unit.id in self._refused_before:
            self._refused_before.remove(unit.id)
        try:
            answer = await self._helper.ask(
                messages,
                purpose="write tasks",
                answer=prompts.Proposal,
                temperature=self._config.temperature,
                sample=unit.index,
            )
        except HelperFailed as e:
            if not e.about_question:
                raise
            self.standing.propose(unit, [], refused=str(e)[:500])
            self.luck.answered(str(e))
            self.luck.in_vain("requests for tasks refused", str(e))
        else:
            self.standing.propose(unit, [task.model_dump() for task in answer.data.tasks])
            self.luck.answered()
            if not answer.data.tasks:
                self.luck.in_vain("requests answered with no task", unit.id)
        self._give_up_in_time()

    async def _settle(self) -> bool:
        """Decide about waiting proposals as far as needed, and return whether any was decided."""
        self._throw_out(lambda found: fault(found, self._config))
        await self._known.prepare([found.question for found in self.standing.waiting])
        self._throw_out(
            lambda found: (near[1], f"of {near[0]}") if (near := self._known.near(found.question)) else None
        )
        self._give_up_in_time()
        # A wrong proposal is rejected at its first solution, a right one accepted after its last. So the first few
        # proposals are decided completely before their results are used.
        most = self.standing.wanted if self.standing.accepted else min(self.standing.wanted, TRIES)
        batch: list[Candidate] = []
        among = self._known.beside()
        for found in self.standing.waiting:
            if found.place in self.failed or len(batch) == most:
                continue
            if among.near(found.question) is None:  # otherwise it waits for the proposal that it repeats
                among.keep(found.id, found.question)
                batch.append(found)
        await self._each((found.place, self._decide(found)) for found in batch)
        self._decided += len(batch)
        if self._decided >= TRIES:
            self.luck.give_up(self.standing, left=True)
        return bool(batch)

    async def _decide(self, found: Candidate) -> None:
        try:
            reason, detail = await verify(self._helper, found, self._config.independent_solutions, self._secret)
        except HelperFailed as e:
            if not e.about_question:
                raise
            reason, detail = REFUSED, str(e)[:500]
        self.standing.waiting.remove(found)
        self.luck.answered(detail if reason == REFUSED else "")
        if reason:
            self.standing.reject(found, reason, detail)
            self.luck.in_vain(reason, f"{found.question[:100]!r}, {detail}")
            return
        self.standing.accept(found, task_row(found, model=self._helper.model))
        self._known.keep(found.id, found.question)

    def _throw_out(self, why: Callable[[Candidate], tuple[str, str] | None]) -> None:
        for found, reason, detail in self.standing.throw_out(why):
            self.luck.in_vain(reason, f"{found.question[:100]!r} {detail}")

    def _give_up_in_time(self) -> None:
        """Check whether to stop if no proposal is waiting, because waiting ones may become tasks."""
        if not self.standing.waiting:
            self.luck.give_up(self.standing, left=True)

    async def _each(self, jobs: Iterable[tuple[str, Coroutine[Any, Any, None]]]) -> None:
        """Run all jobs concurrently. The first error that ends the work cancels the others."""
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
        self._live.say(str(self.standing))


_TEMPERATURE = 0.7
"""Temperature of several solutions, which would be identical at 0; the paper's value."""


async def verify(helper: Helper, candidate: Candidate, solutions: int, secret: str) -> tuple[str, str]:
    """Solve a task ``solutions`` times, and compare the answers.

    :returns: Reason and detail of a rejection, or two empty texts.
    :raises astuner_helpers.HelperFailed: There is no verdict.
    """
    passage = candidate.unit.chunk.text if candidate.unit.chunk is not None else None
    for number in range(solutions):
        asked = await helper.ask(
            prompts.solve(candidate.question, passage, secret=secret),
            purpose="solve tasks",
            answer=prompts.Solution,
            temperature=0.0 if solutions == 1 else _TEMPERATURE,
            sample=number,
        )
        solution: prompts.Solution = asked.data
        if not solution.found or not solution.answer.strip():
            return "not answerable", solution.reasoning[:500]
        if same_answer(candidate.answer, solution.answer):
            continue
        compared = await helper.ask(
            prompts.compare(candidate.question, candidate.answer, solution.answer, secret=secret),
            purpose="compare answers",
            answer=prompts.Comparison,
            temperature=0.0,
        )
        comparison: prompts.Comparison = compared.data
        if not comparison.same:
            return "another answer", f"{solution.answer[:200]!r}: {comparison.reason[:500]}"
    return "", ""


def same_answer(one: str, other: str) -> bool:
    """Return whether two answers are certainly the same: the same words or the same number."""
    if words(one) and words(one) == words(other):
        return True
    first, second = _number(one), _number(other)
    return first is not None and first == second


def _number(text: str) -> float | None:
    """Return the number that a text consists of, with or without thousands separators, or None."""
    match = re.fullmatch(r"[\s$€£]*([-+]?\d+(?:,\d{3})*(?:\.\d+)?)[\s.%]*", text.replace("−", "-"))
    return float(match[1].replace(",", "")) if match else None


_CHARACTERS_PER_TOKEN = 4
_TOKENS_PER_TASK = 120
"""Tokens of question, answer and evidence as JSON."""
_TOKENS_PER_SOLUTION = 150


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """Existing material, planned requests, and their approximate costs if every proposal passes."""

    documents: int
    chunks: int
    samples: int
    folder: str
    tasks: int
    """Requested number of tasks."""
    made: int
    """Number of existing tasks."""
    at_most: int
    """Maximum number of tasks if every request yields all tasks and all pass."""
    finished: bool
    """Whether a start would have nothing to do."""
    waiting: int
    """Existing proposals, which are checked first."""
    write_requests: int
    possible_write_requests: int
    """Maximum number of requests that the rounds allow."""
    solve_requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None
    """Cost of the remaining work in the currency of `price`, or None without a price."""
    used: Usage
    """Usage in this folder so far, which counts towards budgets."""
    skipped: dict[str, str]
    ignored: dict[str, str]
    notes: tuple[str, ...]


def _prompt_tokens(config: DataGenerationConfig, asked: Sequence[Unit], waiting: Sequence[Unit], solutions: int) -> int:
    """Return the prompt tokens of all requests. A solution shows a passage of average length."""
    passages = [len(unit.chunk.text) if unit.chunk is not None else 0 for unit in (*asked, *waiting)]
    shown = sum(len(sample.question) + len(sample.answer) for unit in asked for sample in unit.samples)
    empty = prompts.write(config, "", [], [], secret="")
    overhead = sum(len(message["content"]) for message in empty)
    passage = sum(passages) // max(1, len(passages))
    written = sum(passages[: len(asked)]) + shown + overhead * len(asked)
    return (written + solutions * (passage + overhead)) // _CHARACTERS_PER_TOKEN


def _over(helper: HelperModel, used: Usage, cost: float | None, tokens: int) -> list[str]:
    """Return notes on budgets that do not suffice."""
    found = []
    if helper.budget is not None and used.cost + (cost or 0.0) > helper.budget:
        found.append(f"the budget of {helper.budget:g} does not suffice: {used.cost:.4g} are spent in this folder")
    if helper.budget_tokens is not None and used.tokens + tokens > helper.budget_tokens:
        spent = f"{used.tokens:,} are spent in this folder"
        found.append(f"the budget of {helper.budget_tokens:,} tokens does not suffice: {spent}")
    return found


def result_settings(config: DataGenerationConfig) -> dict[str, Any]:
    """Return the settings of the result that may change between runs of one folder."""
    return config.model_dump(mode="json", include={"tasks", "validation_share", "use_seeds", "leak_threshold"})


def write_result(config: DataGenerationConfig, material: Material, folder: Folder, standing: Standing) -> Sides:
    """Split the accepted tasks, and write both files."""
    rows = sorted(standing.accepted.values(), key=lambda row: (row["index"], row["number"]))
    made = [made_task(row) for row in rows[: config.tasks]]
    samples = [sample_task(sample) for sample in material.samples]
    threshold, numbers = config.leak_threshold, config.numbers_tell_apart
    if config.use_seeds == "validation":
        sides = separate(made, samples, threshold=threshold, numbers_tell_apart=numbers)
    else:
        pool = made + (samples if config.use_seeds == "train" else [])
        groups = _by_evidence(pool)
        sides = split(
            pool,
            validation_share=config.validation_share,
            seed=config.seed,
            threshold=threshold,
            numbers_tell_apart=numbers,
            group=lambda task: groups.get(task.task_id, ""),
        )
    write_rows(folder.train, [_row(task) for task in sides.train])
    write_rows(folder.validation, [_row(task) for task in sides.validation])
    return sides


def report(
    config: DataGenerationConfig,
    material: Material,
    making: Making,
    helpers: Sequence[Helper],
    *,
    sides: Sides | None,
    stopped: str = "",
) -> dict[str, Any]:
    """Return the report as JSON. ``sides`` is None if the generation was stopped."""
    standing = making.standing
    repeats = sum(standing.rejected[reason] for reason in ("near-duplicate", "near in meaning"))
    return {
        "finished": sides is not None,
        "stopped": stopped,
        "settings": result_settings(config),
        "wanted": config.tasks,
        "made": min(len(standing.accepted), config.tasks),
        "split": sides.report() if sides is not None else None,
        "rejected": dict(sorted(standing.rejected.items())),
        "duplicates": repeats,
        "spare": len(standing.waiting),
        "requests_answered": standing.answered,
        "failed": dict(making.failed),
        "refused": dict(standing.refused),
        "remarks": [making.luck.told] if making.luck.told else [],
        "material": {
            "documents": {document.path: len(document.text) for document in material.documents},
            "notes": {document.path: list(document.notes) for document in material.documents if document.notes},
            "passages": len(material.chunks),
            "samples": len(material.samples),
            "skipped": material.skipped,
            "ignored": material.ignored,
        },
        "model": helpers[0].model,
        "prompt_version": prompts.VERSION,
        "usage": {helper.name: asdict(helper.usage()) for helper in helpers},
    }


def _by_evidence(tasks: Sequence[Task]) -> dict[str, str]:
    """Map tasks to the text that decides them. Tasks that share a sentence reveal each other's answers."""
    spans = []
    for task in tasks:
        provenance = task.metadata["provenance"]
        if provenance.get("span") is not None:
            spans.append((provenance["sha256"], *provenance["span"], task.task_id))
    groups: dict[str, str] = {}
    before, reach, name = "", -1, ""
    for sha256, start, end, task_id in sorted(spans):
        if sha256 != before or start >= reach:
            before, reach, name = sha256, end, f"{sha256}:{start}"
        reach = max(reach, end)
        groups[task_id] = name
    return groups


def _row(task: Task) -> dict[str, Any]:
    row = {"task_id": task.task_id, "main_query": task.main_query, **history(task.init_messages)}
    return {**row, "metadata": dict(task.metadata)}


_FREE = {
    "tasks", "validation_share", "use_seeds", "leak_threshold", "folder", "documents", "seeds", "on_bad_document",
    "helper_model", "rounds", "max_file_mb", "max_pages", "max_characters", "max_seconds", "max_memory_mb",
}  # fmt: skip
"""Keys that may change while a folder is in progress. Documents and samples count by their content."""


class Generation:
    """The generation of an experiment.

    :param live: Receives progress and one-time messages for users.
    :param again: Command to continue. None: the command with the experiment's file only.
    """

    def __init__(self, config: Config, live: Live | None = None, *, again: str | None = None) -> None:
        section = config.section("task reader", READER)
        if section is None:
            raise ConfigError(
                f"{config.path} has no data generation; add {WHERE} with helper_model, and documents or seeds"
            )
        self._config, self._live = config, live or Live(every=math.inf)
        self._again = again or f"astuner data generate {config.path}"
        self.section: DataGenerationConfig = section
        self.folder = Folder(
            config.base_dir / Path(section.folder or f"generated/{config.experiment_name}").expanduser()
        )

    def plan(self, *, fresh: bool = False) -> GenerationPlan:
        """Return what `run` would do, request and cost, without requests and without writing.

        :raises ConfigError: As `run`, or the helper model does not exist.
        :raises RunError: Another process uses the folder.
        """
        self.folder.check_free()
        models, name = self._models(), self.section.helper_model
        notes = []
        try:
            models.get(name, where=f"{WHERE}.helper_model")
        except ConfigError as e:
            if name not in models.names:
                raise
            notes.append(f"{e}: a start would fail")
        material, there, done = gather(self.section, self._config.base_dir, None, self._live.say), None, False
        if not fresh and self.folder.check(self._fingerprint(material), self._again) is not None:
            there, done = self.folder, self._is_done(self.folder.read_report())
        if fresh and self.folder.read_about() is not None:
            notes.append(f"the contents of {self.folder.path} would be moved to a subfolder earlier-…")
        standing, used = Standing(self.section, material, there), models.usage()[name]
        helper = self._config.keys_of(HelperModelKeys).helper_models[name]
        per_call = self.section.per_call
        waiting = min(len(standing.waiting), standing.wanted)
        possible = [*standing.unasked, *standing.refused_units]
        asked = possible[: 0 if done else -(-(standing.wanted - waiting) // per_call)]
        at_most = min(len(standing.accepted), self.section.tasks) + len(standing.waiting) + len(possible) * per_call
        solved = 0 if done else min(standing.wanted, waiting + len(asked) * per_call)
        solutions = solved * self.section.independent_solutions
        checked = [found.unit for found in standing.waiting[:waiting]]
        prompt_tokens = _prompt_tokens(self.section, asked, checked, solutions)
        completion_tokens = min(standing.wanted - waiting, len(asked) * per_call) * _TOKENS_PER_TASK
        completion_tokens += solutions * _TOKENS_PER_SOLUTION
        cost = None
        if helper.price is not None:
            cost = (prompt_tokens * helper.price.input + completion_tokens * helper.price.output) / 1e6
        notes += [f"{document.path}: {note}" for document in material.documents for note in document.notes]
        if not done and at_most < self.section.tasks:
            notes.append(
                f"the material suffices for at most {at_most} tasks: raise rounds or per_call, or add documents"
            )
        notes += _over(helper, used, cost, prompt_tokens + completion_tokens)
        return GenerationPlan(
            documents=len(material.documents),
            chunks=len(material.chunks),
            samples=len(material.samples),
            folder=str(self.folder.path),
            tasks=self.section.tasks,
            made=min(len(standing.accepted), self.section.tasks),
            at_most=at_most,
            finished=done,
            waiting=waiting,
            write_requests=len(asked),
            possible_write_requests=len(possible),
            solve_requests=solutions,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cost=cost,
            used=used,
            skipped=material.skipped,
            ignored=material.ignored,
            notes=tuple(notes),
        )

    def run(self, *, fresh: bool = False) -> dict[str, Any]:
        """Generate the missing tasks, and return the report.

        :param fresh: Start over. The contents of the folder are moved to a subfolder.
        :raises ConfigError: The folder's tasks were made from other material or settings.
        :raises astuner_helpers.BudgetSpent: The budget is spent. The message explains how to continue.
        :raises astuner_helpers.HelperFailed: The helper model is down. The message explains how to continue.
        :raises NothingAccepted: The helper model answers, but no task results. The message explains how to continue.
        :raises Interrupted: Ctrl-C was pressed. The message explains how to continue.
        """
        with self.folder.locked():
            earlier = self.folder.start_over() if fresh else None
            material = gather(self.section, self._config.base_dir, self.folder.documents, self._live.say)
            secret = self.folder.begin(self._fingerprint(material), self._again)
            if self._is_done(done := self.folder.read_report()):
                return done
            return self._make(material, secret, earlier)

    def finished(self) -> dict[str, Any]:
        """Return the report of finished tasks, without requests and without writing.

        :raises DataError: The tasks are not finished, or were made from other material or settings.
        """
        done = self.folder.read_report()
        if not self._is_done(done):
            raise DataError(
                f"{self.folder.path} has no finished tasks, and a dry run does not generate them; first run: "
                f"astuner data generate {self._config.path} (add --dry-run to see its plan)"
            )
        return done

    def _make(self, material: Material, secret: str, earlier: Path | None) -> dict[str, Any]:
        models = self._models()
        helper = models.get(self.section.helper_model, where=f"{WHERE}.helper_model")
        embedder: Helper | None = None
        if (meaning := self.section.near_in_meaning) is not None:
            embedder = models.get(meaning.helper_model, where=f"{WHERE}.near_in_meaning.helper_model")
        helpers = list(dict.fromkeys(h for h in (helper, embedder) if h is not None))
        making = Making(self.section, material, self.folder, helper, embedder, secret, self._live)
        stopped: BaseException | None = None
        try:
            run(making.run())
        except (BudgetSpent, HelperFailed, NothingAccepted, KeyboardInterrupt) as e:
            stopped = e
        sides = None if stopped else write_result(self.section, material, self.folder, making.standing)
        why = "" if stopped is None else str(stopped) or "Ctrl-C"
        found = report(self.section, material, making, helpers, sides=sides, stopped=why)
        if earlier is not None:
            found["earlier"] = str(earlier)
        write_json(self.folder.report, found)
        if stopped is None:
            return found
        made = f"{len(making.standing.accepted)} of {self.section.tasks} tasks"
        kept = f"{why}\n{made} are saved in {self.folder.path}; to continue: {self._again}"
        raise (Interrupted if isinstance(stopped, KeyboardInterrupt) else type(stopped))(kept) from None

    def _models(self) -> HelperModels:
        return HelperModels(self._config.keys_of(HelperModelKeys).helper_models, scope=str(self.folder.path))

    def _is_done(self, report: Mapping[str, Any]) -> bool:
        return bool(report.get("finished") and report["settings"] == result_settings(self.section))

    def _fingerprint(self, material: Material) -> dict[str, Any]:
        helper = self._config.keys_of(HelperModelKeys).helper_models.get(self.section.helper_model)
        model = helper.model if helper is not None else None  # a missing model is reported later, with more details
        section = self.section.model_dump(mode="json", exclude=_FREE)
        return {**material.fingerprint(), "model": model, "prompts": prompts.VERSION, **section}


class GeneratedTaskReader(TaskReader):
    """Read generated tasks, and generate them first if necessary.

    :param experiment: Complete config, for its helper models and its folder.
    :param dry_run: Send no requests: read a finished folder only.
    """

    config: DataGenerationConfig

    def __init__(self, config: DataGenerationConfig, experiment: Config, *, dry_run: bool = False) -> None:
        super().__init__(config)
        self._dry_run = dry_run
        self._live = Live("data generation: ", every=10)  # a run's log is read by many people
        self._generation = Generation(experiment, self._live)
        self._report: dict[str, Any] | None = None
        self.skipped: dict[str, str] = {}
        """Reasons of unreadable documents (`on_bad_document: skip`)."""

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> GeneratedTaskReader:
        return cls(section, context.config, dry_run=context.dry_run)

    def read(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of ``split``, after generating them if necessary.

        :raises astuner.contracts.errors.AstunerError: As `Generation.run`, or in a dry run as `Generation.finished`.
        """
        if self._report is None:
            self._report = self._generation.finished() if self._dry_run else self._generation.run()
            self.skipped.update(self._report["material"]["skipped"])
            for line in told("made", folder=self._generation.folder, **self._report).splitlines():
                self._live.tell(line)
        folder = self._generation.folder
        path = folder.train if split is Split.TRAIN else folder.validation
        yield from map(task_of, read_jsonl(path))
