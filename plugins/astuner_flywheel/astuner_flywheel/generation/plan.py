"""What a generation would ask and take, without asking anybody: the plan of ``--dry-run``.

Invariant: the requests are counted from the real material, and what can only be guessed (how long answers are, how many
proposals pass) is said to be a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from astuner.config.helper_models import HelperModel
from astuner_flywheel.generation import prompts
from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_flywheel.generation.material import Material
from astuner_flywheel.generation.units import units

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
    tasks: int
    write_requests: int
    possible_write_requests: int
    """As many as the rounds allow, if few proposals pass."""
    solve_requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None
    """In the money of `price`; None without one."""
    skipped: dict[str, str]
    ignored: dict[str, str]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}

    def __str__(self) -> str:
        found = [f"{self.documents} documents in {self.chunks} passages"] * bool(self.documents)
        found += [f"{self.samples} samples"] * bool(self.samples)
        price = "" if self.cost is None else f", {self.cost:.4g} in money"
        lines = [
            f"from         {' and '.join(found)}",
            f"tasks        {self.tasks}",
            f"requests     {self.write_requests} to write them (at most {self.possible_write_requests}), "
            f"{self.solve_requests} to check them, and one where two answers are worded differently",
            f"takes about  {self.prompt_tokens:,} prompt tokens, {self.completion_tokens:,} of answers{price}, "
            "if every proposal passes",
        ]
        lines += [f"skipped      {why}" for why in self.skipped.values()]
        lines += [f"not read     {name}: {why}" for name, why in self.ignored.items()]
        lines += [f"note         {note}" for note in self.notes]
        return "\n".join(lines)


def plan(config: DataGenerationConfig, material: Material, helper: HelperModel) -> GenerationPlan:
    """The plan for a section and its material."""
    possible = units(material, config)
    wanted = -(-config.tasks // config.per_call)
    asked = possible[:wanted]
    shown = [[(sample.question, sample.answer) for sample in unit.samples] for unit in asked]
    characters = 0
    for unit, samples in zip(asked, shown, strict=True):
        shown_text = unit.chunk.text if unit.chunk is not None else ""
        characters += len(shown_text) + sum(len(q) + len(a) for q, a in samples)
    empty = prompts.write("", [], count=1, language="", instructions=config.instructions, known=[], secret="")
    overhead = sum(len(message["content"]) for message in empty)
    solutions = config.tasks * config.independent_solutions
    passage = characters // max(1, len(asked)) if config.documents else 0
    prompt_tokens = (characters + overhead * len(asked) + solutions * (passage + overhead)) // _CHARACTERS_PER_TOKEN
    completion_tokens = config.tasks * _TOKENS_PER_TASK + solutions * _TOKENS_PER_SOLUTION
    cost = None
    if helper.price is not None:
        cost = (prompt_tokens * helper.price.input + completion_tokens * helper.price.output) / 1e6
    notes = [f"{document.path}: {note}" for document in material.documents for note in document.notes]
    if len(asked) < wanted:
        most = len(possible) * config.per_call
        notes.append(f"there is material for at most {most} tasks: raise rounds or per_call, or give it more documents")
    return GenerationPlan(
        documents=len(material.documents),
        chunks=len(material.chunks),
        samples=len(material.samples),
        tasks=config.tasks,
        write_requests=len(asked),
        possible_write_requests=len(possible),
        solve_requests=solutions,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cost=cost,
        skipped=material.skipped,
        ignored=material.ignored,
        notes=tuple(notes),
    )
