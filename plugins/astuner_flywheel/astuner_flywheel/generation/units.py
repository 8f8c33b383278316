"""What is asked, and in which order: a passage at a time, or some of the samples at a time.

Invariant: the same material and section give the same units with the same names in the same order, and asking for more
tasks only appends to them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from astuner_flywheel.documents.document import Chunk
from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_flywheel.generation.material import Material
from astuner_flywheel.generation.samples import Sample

SHOWN = 4
"""Samples in one request: enough to show what they have in common, and different ones in the next."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One request for tasks."""

    id: str
    index: int
    """Its place in the order."""
    chunk: Chunk | None
    """The passage; None where there are only samples."""
    samples: tuple[Sample, ...]
    """Those that are shown: of samples that stand alone, since nothing else of a conversation is shown."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One proposed task."""

    id: str
    """The name of the task that it becomes; who proposes the same twice gives both the same name."""
    unit: Unit
    number: int
    """Its place in the answer."""
    question: str
    answer: str
    evidence: str

    @property
    def place(self) -> tuple[str, int]:
        """Which proposal it is: its request, and its number in the answer."""
        return self.unit.id, self.number

    @property
    def order(self) -> tuple[int, int]:
        """For sorting."""
        return self.unit.index, self.number


def units(material: Material, config: DataGenerationConfig) -> list[Unit]:
    """All that may be asked: every passage once, then every passage again, …; or as many draws of samples."""
    if not material.chunks and config.documents:
        return []
    passages = list(_passages(material, config)) if config.documents else _draws(config)
    samples = [sample for sample in material.samples if sample.stands_alone]
    found = []
    for index, (name, chunk) in enumerate(passages):
        shown = _some(samples, f"{config.seed}:{name}")
        found.append(Unit(id=name, index=index, chunk=chunk, samples=shown))
    return found


def candidate(unit: Unit, number: int, question: str, answer: str, evidence: str) -> Candidate:
    """A proposed task with its name, which is a hash of what it says and of what it was made from."""
    question, answer = question.strip(), answer.strip()
    source = unit.chunk.document.sha256 if unit.chunk else ""
    hashed = hashlib.sha256("\n".join([source, question, answer]).encode("utf-8", "backslashreplace")).hexdigest()
    return Candidate(
        id=f"gen-{hashed[:16]}", unit=unit, number=number, question=question, answer=answer, evidence=evidence.strip()
    )


def _passages(material: Material, config: DataGenerationConfig) -> Iterator[tuple[str, Chunk | None]]:
    for turn in range(config.rounds):
        for chunk in sorted(material.chunks, key=lambda chunk: _draw(config.seed, turn, chunk.id)):
            yield f"{turn}:{chunk.id}", chunk


def _draws(config: DataGenerationConfig) -> list[tuple[str, Chunk | None]]:
    should_do = -(-config.tasks // config.per_call)
    return [(f"samples:{number}", None) for number in range(config.rounds * should_do)]


def _some(samples: Sequence[Sample], seed: str) -> tuple[Sample, ...]:
    rng = random.Random(hashlib.sha256(seed.encode()).digest())
    return tuple(rng.sample(samples, min(SHOWN, len(samples))))


def _draw(seed: int, turn: int, name: str) -> str:
    return hashlib.sha256(f"{seed}:{turn}:{name}".encode()).hexdigest()
