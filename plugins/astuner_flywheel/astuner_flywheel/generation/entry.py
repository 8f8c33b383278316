"""Where a generation begins and ends: from an experiment's config to a finished folder, its plan and its report.

The command and the task reader ``data_generation`` both come in here.  A finished folder is read as it is, and asks
nobody; an unfinished one is finished first.  Invariants: a folder that is finished for the same material and settings
is never worked on again, and one that is not is left so that the same command goes on; the plan of ``--dry-run``
counts requests from the real material and the real folder, as a start would count them, and what can only be guessed
(how long answers are, how many proposals pass) is said to be a guess; the two sides are made from ``tasks.jsonl``
alone, in the order of the material, so however often a generation was interrupted, the result is the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from astuner import Config, Task, TaskReader
from astuner.contracts.building import BuildContext
from astuner.contracts.errors import ConfigError, DataError, Interrupted
from astuner.contracts.types import Split
from astuner_flywheel.generation import prompts
from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_flywheel.generation.folder import Folder, Journal, Standing, kept_row, sample_row, task_of
from astuner_flywheel.generation.making import Making, NothingAccepted
from astuner_flywheel.generation.material import Material, Unit, gather
from astuner_flywheel.splits import Sides, separate, split
from astuner_flywheel.support import run, write_rows
from astuner_helpers import BudgetSpent, Helper, HelperFailed, HelperModels, Usage
from astuner_helpers.settings import HelperModel, HelperModelKeys

_CHARACTERS_PER_TOKEN = 4
_TOKENS_PER_TASK = 120
"""Of question, answer and evidence as JSON."""
_TOKENS_PER_SOLUTION = 150


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """What is there, what would be asked, and about what that takes if every proposal passes."""

    documents: int
    chunks: int
    samples: int
    folder: str
    tasks: int
    """How many are wanted in all."""
    made: int
    """How many of them there are already."""
    at_most: int
    """How many there can be, if every request brings as many as it is asked for and all pass."""
    finished: bool
    """Whether a start would find nothing to do."""
    waiting: int
    """Proposals that are there already, and are checked first."""
    write_requests: int
    possible_write_requests: int
    """As many as the rounds still allow, if few proposals pass."""
    solve_requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None
    """Of what is left, in the money of `price`; None without one."""
    used: Usage
    """What was used in this folder so far; budgets count it."""
    skipped: dict[str, str]
    ignored: dict[str, str]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    def __str__(self) -> str:
        found = [f"{self.documents} documents in {self.chunks} passages"] * bool(self.documents)
        found += [f"{self.samples} samples"] * bool(self.samples)
        price = "" if self.cost is None else f", {self.cost:.4g} in money"
        lines = [f"from         {' and '.join(found)}", f"tasks        {self._tasks()}"]
        if self.made < self.tasks and not self.finished:
            first = f"{self.waiting} proposals wait to be checked; " if self.waiting else ""
            lines += [
                f"requests     {first}{self.write_requests} to write more (at most {self.possible_write_requests}), "
                f"{self.solve_requests} to check them, and one where two answers are worded differently",
                f"takes about  {self.prompt_tokens:,} prompt tokens, {self.completion_tokens:,} of answers{price}, "
                "if every proposal passes",
            ]
        if self.used.calls:
            lines.append(f"used so far  {self.used}")
        lines += [f"skipped      {why}" for why in self.skipped.values()]
        lines += [f"not read     {name}: {why}" for name, why in self.ignored.items()]
        lines += [f"note         {note}" for note in self.notes]
        return "\n".join(lines)

    def _tasks(self) -> str:
        if self.finished:
            return f"finished: {self.made} of {self.tasks} are in {self.folder}; a start asks nobody"
        if self.made >= self.tasks:
            return f"{self.tasks}, all made in {self.folder}; a start asks nobody, and writes the two sides anew"
        if not self.made and not self.waiting and not self.used.calls:
            return f"{self.tasks}, in {self.folder}"
        left = self.tasks - self.made
        return f"{self.tasks}, of which {self.made} are made in {self.folder}; a start goes on with the other {left}"


def plan(
    config: DataGenerationConfig,
    material: Material,
    helper: HelperModel,
    standing: Standing,
    *,
    finished: bool,
    folder: Path,
    used: Usage,
    notes: Sequence[str] = (),
) -> GenerationPlan:
    """The plan for a section, its material, and what there is already."""
    waiting = min(len(standing.waiting), standing.wanted)
    wanted = 0 if finished else -(-(standing.wanted - waiting) // config.per_call)
    possible = [*standing.unasked, *standing.refused_units]
    asked = possible[:wanted]
    made = min(len(standing.accepted), config.tasks)
    at_most = made + len(standing.waiting) + len(possible) * config.per_call
    solved = 0 if finished else min(standing.wanted, waiting + len(asked) * config.per_call)
    solutions = solved * config.independent_solutions
    prompt_tokens = _prompt_tokens(config, asked, [found.unit for found in standing.waiting[:waiting]], solutions)
    completion_tokens = min(standing.wanted - waiting, len(asked) * config.per_call) * _TOKENS_PER_TASK
    completion_tokens += solutions * _TOKENS_PER_SOLUTION
    cost = None
    if helper.price is not None:
        cost = (prompt_tokens * helper.price.input + completion_tokens * helper.price.output) / 1e6
    said = [f"{document.path}: {note}" for document in material.documents for note in document.notes]
    if not finished and at_most < config.tasks:
        said.append(
            f"there is material for at most {at_most} tasks: raise rounds or per_call, or give it more documents"
        )
    said += _over(helper, used, cost, prompt_tokens + completion_tokens)
    return GenerationPlan(
        documents=len(material.documents),
        chunks=len(material.chunks),
        samples=len(material.samples),
        folder=str(folder),
        tasks=config.tasks,
        made=made,
        at_most=at_most,
        finished=finished,
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
        notes=(*notes, *said),
    )


def _prompt_tokens(config: DataGenerationConfig, asked: Sequence[Unit], waiting: Sequence[Unit], solutions: int) -> int:
    """Of all requests; each solution is shown a passage of the usual length."""
    passages = [len(unit.chunk.text) if unit.chunk is not None else 0 for unit in (*asked, *waiting)]
    shown = sum(len(sample.question) + len(sample.answer) for unit in asked for sample in unit.samples)
    empty = prompts.write("", [], count=1, language="", instructions=config.instructions, known=[], secret="")
    overhead = sum(len(message["content"]) for message in empty)
    passage = sum(passages) // max(1, len(passages))
    written = sum(passages[: len(asked)]) + shown + overhead * len(asked)
    return (written + solutions * (passage + overhead)) // _CHARACTERS_PER_TOKEN


def _over(helper: HelperModel, used: Usage, cost: float | None, tokens: int) -> list[str]:
    """What the budgets will say to that."""
    found = []
    if helper.budget is not None and used.cost + (cost or 0.0) > helper.budget:
        found.append(f"the budget of {helper.budget:g} does not suffice: {used.cost:.4g} are spent in this folder")
    if helper.budget_tokens is not None and used.tokens + tokens > helper.budget_tokens:
        spent = f"{used.tokens:,} are spent in this folder"
        found.append(f"the budget of {helper.budget_tokens:,} tokens does not suffice: {spent}")
    return found


def result_settings(config: DataGenerationConfig) -> dict[str, Any]:
    """What the result depends on beside the material's fingerprint; may change from run to run of one folder."""
    return config.model_dump(mode="json", include=_RESULT)


_RESULT = {"tasks", "validation_share", "use_seeds", "leak_threshold"}


def write_result(config: DataGenerationConfig, material: Material, folder: Folder, standing: Standing) -> Sides:
    """Split what was accepted, and write both files."""
    rows = sorted(standing.accepted.values(), key=lambda row: (row["index"], row["number"]))
    made = [task_of(kept_row(row)) for row in rows[: config.tasks]]
    samples = [task_of(sample_row(sample)) for sample in material.samples]
    threshold, numbers = config.leak_threshold, config.numbers_tell_apart
    if config.use_seeds == "validation":
        sides = separate(made, samples, threshold=threshold, numbers_tell_apart=numbers)
    else:
        pool = made + (samples if config.use_seeds == "train" else [])
        share, seed = config.validation_share, config.seed
        groups = _by_evidence(pool)
        sides = split(
            pool,
            validation_share=share,
            seed=seed,
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
    """Everything that happened, as JSON; ``sides`` is None where it was stopped before the end."""
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


def summary(found: Mapping[str, Any], folder: Folder, *, files: bool = True) -> str:
    """The report in a few lines, for a person."""
    lines = [f"{found['made']} of {found['wanted']} tasks"]
    sides = found["split"]
    if sides is not None and files:
        lines[0] += f": {sides['train']} in {folder.train}, {sides['validation']} in {folder.validation}"
        if sides["leaks"]:
            moved = len(sides["leaks"])
            lines.append(f"{moved} stood on the other side of a near-duplicate and were moved or dropped (report.json)")
        lines += sides["notes"]
    if found["rejected"]:
        lines.append("rejected: " + ", ".join(f"{count} {reason}" for reason, count in found["rejected"].items()))
    if found["failed"]:
        lines.append(f"requests without an answer: {len(found['failed'])} (report.json); a larger --tasks asks again")
    if found.get("refused"):
        lines.append(f"requests that the helper would not answer: {len(found['refused'])} (report.json)")
    if found["material"]["skipped"]:
        lines.append(f"documents skipped: {'; '.join(found['material']['skipped'].values())}")
    if "earlier" in found:
        lines.append(f"what was there before is in {found['earlier']}")
    for name, usage in found["usage"].items():
        used = f"{usage['prompt_tokens'] + usage['completion_tokens']:,} tokens"
        cost = f", {usage['cost']:.4g} in money" if usage["cost"] else ""
        lines.append(f"{name}: {usage['calls']} requests, {used}{cost}; {usage['cached']} answers from the cache")
    return "\n".join(lines)


def progress_line(standing: Standing) -> str:
    """How far it is, in one line."""
    rejected = ", ".join(f"{count} {reason}" for reason, count in standing.rejected.most_common(3))
    wanted = standing.wanted + len(standing.accepted)
    parts = [
        f"{len(standing.accepted)} of {wanted} tasks",
        f"{standing.answered} requests for tasks answered",
        f"{len(standing.waiting)} waiting",
        f"{sum(standing.rejected.values())} rejected{f' ({rejected})' * bool(rejected)}",
    ]
    return " · ".join(parts)


def _by_evidence(tasks: Sequence[Task]) -> dict[str, str]:
    """Task -> the stretch of a document that decides it; tasks that share a sentence give each other away."""
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
    names = ("task_id", "main_query", "init_messages")
    inner = {name: value for name, value in task.metadata.items() if name not in names}
    history = {"init_messages": list(task.init_messages)} if task.init_messages else {}
    return {"task_id": task.task_id, "main_query": task.main_query, **history, "metadata": inner}


READER = "data_generation"
WHERE = f"astuner.task_reader.{READER}"

_FREE = {
    "tasks", "validation_share", "use_seeds", "leak_threshold", "folder", "documents", "seeds", "on_bad_document",
    "helper_model", "rounds", "max_file_mb", "max_pages", "max_characters", "max_seconds", "max_memory_mb",
}  # fmt: skip
"""Keys that may change while a folder is worked on; documents and samples count by their content."""


class Generation:
    """One experiment's generation.

    :param say: called with what is being done, a line at a time, while documents are read.
    :param progress: called with how far it is whenever something has happened while tasks are made.
    :param tell: called with what a person should know meanwhile, once each.
    :param again: what a person types to go on; None: the command, with the experiment's file alone.
    """

    def __init__(
        self,
        config: Config,
        *,
        say: Callable[[str], None] = lambda _: None,
        progress: Callable[[Standing], None] = lambda _: None,
        tell: Callable[[str], None] = lambda _: None,
        again: str | None = None,
    ) -> None:
        section = config.section("task reader", READER)
        if section is None:
            raise ConfigError(
                f"{config.path} has no data generation; add {WHERE} with helper_model, and documents or seeds"
            )
        self._config, self._say, self._progress, self._tell = config, say, progress, tell
        self._again = again or f"astuner data generate {config.path}"
        self.section: DataGenerationConfig = section
        self.folder = Folder(folder_of(config, section))
        self._earlier: Path | None = None

    def plan(self, *, fresh: bool = False) -> GenerationPlan:
        """What `run` would do, ask and take; asks nobody and writes nothing.

        :raises ConfigError: as `run`; or there is no such helper model.
        :raises RunError: another process is at work in the folder.
        """
        self.folder.check_free()
        models, name = self._models(), self.section.helper_model
        if name not in models.names:
            models.get(name, where=f"{WHERE}.helper_model")
        material, there, done = self._gather(None), None, False
        if not fresh and self.folder.check(self._fingerprint(material), self._again) is not None:
            there, done = self.folder, self._is_done(self.folder.read_report())
        notes = []
        try:
            models.get(name, where=f"{WHERE}.helper_model")
        except ConfigError as e:
            notes.append(f"{e}: a start would be refused")
        if fresh and self.folder.read_about() is not None:
            notes.append(f"what is in {self.folder.path} would be kept in a folder earlier-… in it")
        return plan(
            self.section,
            material,
            self._config.keys_of(HelperModelKeys).helper_models[name],
            Standing(self.section, material, there),
            finished=done,
            folder=self.folder.path,
            used=models.usage()[name],
            notes=notes,
        )

    def run(self, *, fresh: bool = False) -> dict[str, Any]:
        """Make the tasks that are missing; the report.

        :param fresh: start over; what is in the folder is kept in a folder in it.
        :raises ConfigError: the folder's tasks were made from something else.
        :raises astuner_helpers.BudgetSpent: the budget is reached; says how to go on.
        :raises astuner_helpers.HelperFailed: the helper gives no answers; says how to go on.
        :raises NothingAccepted: the helper answers, and no task comes of it; says how to go on.
        :raises Interrupted: Ctrl-C; says how to go on.
        """
        with self.folder.locked():
            self._earlier = self.folder.start_over() if fresh else None
            material = self._gather(self.folder.documents)
            secret = self.folder.begin(self._fingerprint(material), self._again)
            if self._is_done(done := self.folder.read_report()):
                return done
            return self._make(material, secret)

    def finished(self) -> dict[str, Any]:
        """The report of tasks that are made already; asks nobody and writes nothing.

        :raises DataError: they are not made yet, or others were.
        """
        done = self.folder.read_report()
        if not self._is_done(done):
            raise DataError(
                f"{self.folder.path} holds no finished set of tasks, and a dry run asks no model; type first: "
                f"astuner data generate {self._config.path} (what that would take: --dry-run)"
            )
        return done

    def _make(self, material: Material, secret: str) -> dict[str, Any]:
        models = self._models()
        helper = models.get(self.section.helper_model, where=f"{WHERE}.helper_model")
        embedder: Helper | None = None
        if (meaning := self.section.near_in_meaning) is not None:
            embedder = models.get(meaning.helper_model, where=f"{WHERE}.near_in_meaning.helper_model")
        helpers = list(dict.fromkeys(h for h in (helper, embedder) if h is not None))
        making = Making(self.section, material, self.folder, helper, embedder, secret, self._progress, self._tell)
        stopped: BaseException | None = None
        try:
            run(making.run())
        except (BudgetSpent, HelperFailed, NothingAccepted, KeyboardInterrupt) as e:
            stopped = e
        sides = None if stopped else write_result(self.section, material, self.folder, making.standing)
        why = "" if stopped is None else str(stopped) or "Ctrl-C"
        found = report(self.section, material, making, helpers, sides=sides, stopped=why)
        if self._earlier is not None:
            found["earlier"] = str(self._earlier)
        self.folder.write_report(found)
        if stopped is None:
            return found
        made = f"{len(making.standing.accepted)} of {self.section.tasks} tasks"
        kept = f"{why}\n{made} are kept in {self.folder.path}; go on with: {self._again}"
        if isinstance(stopped, BudgetSpent):
            raise BudgetSpent(kept) from None
        if isinstance(stopped, NothingAccepted):
            raise NothingAccepted(kept) from None
        raise (Interrupted(kept) if isinstance(stopped, KeyboardInterrupt) else HelperFailed(kept)) from None

    def _models(self) -> HelperModels:
        return HelperModels(self._config.keys_of(HelperModelKeys).helper_models, scope=str(self.folder.path))

    def _is_done(self, report: Mapping[str, Any]) -> bool:
        return bool(report.get("finished") and report["settings"] == result_settings(self.section))

    def _gather(self, kept: Path | None) -> Material:
        return gather(self.section, self._config.base_dir, kept, self._say)

    def _fingerprint(self, material: Material) -> dict[str, Any]:
        helper = self._config.keys_of(HelperModelKeys).helper_models.get(self.section.helper_model)
        model = helper.model if helper is not None else None  # None is an error further on, which says more
        section = self.section.model_dump(mode="json", exclude=_FREE)
        return {**material.fingerprint(), "model": model, "prompts": prompts.VERSION, **section}


def folder_of(config: Config, section: DataGenerationConfig) -> Path:
    """Where an experiment's generated tasks are."""
    return config.base_dir / Path(section.folder or f"generated/{config.experiment_name}").expanduser()


class GeneratedTaskReader(TaskReader):
    """Reads the generated tasks, and has them made where they are not there yet.

    :param experiment: the whole config, for its helper models and its folder.
    :param dry_run: nobody is to be asked: only a finished folder is read.
    """

    config: DataGenerationConfig

    def __init__(self, config: DataGenerationConfig, experiment: Config, *, dry_run: bool = False) -> None:
        super().__init__(config)
        self._dry_run = dry_run
        self._generation = Generation(experiment, say=_say, progress=_Spoken(), tell=_say)
        self._report: dict[str, Any] | None = None
        self.skipped: dict[str, str] = {}
        """Documents that could not be read -> why (`on_bad_document: skip`)."""

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> GeneratedTaskReader:
        return cls(section, context.config, dry_run=context.dry_run)

    def read(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of ``split``, after making them if need be.

        :raises astuner.contracts.errors.AstunerError: as `Generation.run`, or of a dry run as `Generation.finished`.
        """
        if self._report is None:
            self._report = self._generation.finished() if self._dry_run else self._generation.run()
            self.skipped.update(self._report["material"]["skipped"])
            _say(summary(self._report, self._generation.folder))
        folder = self._generation.folder
        path = folder.train if split is Split.TRAIN else folder.validation
        yield from map(task_of, Journal(path).rows())


class _Spoken:
    """Progress as a line every ten seconds: a run has one log, and many readers."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, standing: Standing) -> None:
        if time.monotonic() - self._last >= 10:
            self._last = time.monotonic()
            _say(progress_line(standing))


def _say(text: str) -> None:
    print(f"data generation: {text}", file=sys.stderr, flush=True)
