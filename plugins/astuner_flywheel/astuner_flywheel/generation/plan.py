"""What a generation would do, ask and take from where its folder is, without asking anybody: the plan of ``--dry-run``.

Invariant: the requests are counted from the real material and the real folder, as a start would count them, and what
can only be guessed (how long answers are, how many proposals pass) is said to be a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from astuner_flywheel.generation import prompts
from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_flywheel.generation.material import Material
from astuner_flywheel.generation.standing import Standing
from astuner_flywheel.generation.units import Unit
from astuner_helpers import Usage
from astuner_helpers.settings import HelperModel

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
